"""From prompts to the jobs of the service, and from its events to samples, for callers outside its event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from dllm.noise import sample_seed
from rollout.params import content_seeds
from rollout.records import RolloutError, RolloutSample
from rollout.service import Event, Finished, Job

Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]
"""Token ids, a text, or chat messages."""

OnSample = Callable[[int, int, RolloutSample], None]
"""Called with prompt index, sample index and sample."""


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of chat messages, up to where the answer begins."""
    return list(
        tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True, return_dict=False)
    )


def jobs_by_content(prompts: Sequence[Sequence[int]], n: int, seed: int | None) -> list[Job]:
    """``n`` samples of every prompt, with seeds that follow from the prompts; None leaves the seeds to the engine."""
    seeds: Sequence[Sequence[int | None]] = [[None] * n] * len(prompts)
    if seed is not None:
        seeds = content_seeds(seed, prompts, n)
    return [Job(i, j, prompt, seeds[i][j]) for i, prompt in enumerate(prompts) for j in range(n)]


def jobs_by_place(prompts: Sequence[Sequence[int]], n: int, seed: int | None, step: int) -> list[Job]:
    """``n`` samples of every prompt, with seeds injective over (step, prompt, sample); None draws a seed."""
    base = secrets.randbits(62) if seed is None else seed
    return [Job(i, j, prompt, sample_seed(base, step, i, j)) for i, prompt in enumerate(prompts) for j in range(n)]


def events_in(loop: asyncio.AbstractEventLoop, events: AsyncIterator[Event]) -> Iterator[Event]:
    """The events, one by one, in a loop that does not run otherwise; closing the iterator aborts what is left."""
    try:
        while (event := loop.run_until_complete(anext(events, None))) is not None:  # type: ignore[arg-type]
            yield event
    finally:
        loop.run_until_complete(events.aclose())  # type: ignore[attr-defined]


def collected(
    events: Iterator[Event], prompts: int, n: int, on_sample: OnSample | None = None
) -> list[list[RolloutSample]]:
    """The samples of all events in their places.

    Raises:
        RolloutError: the engine failed one; what is left is aborted.
    """
    results: list[list[Any]] = [[None] * n for _ in range(prompts)]
    with closing(events):  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Finished):
                if isinstance(event.result, RolloutError):
                    raise event.result
                results[event.prompt][event.sample] = event.result
                if on_sample is not None:
                    on_sample(event.prompt, event.sample, event.result)
    return results
