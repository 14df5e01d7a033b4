"""Random requests whose answers must not depend on the company they are decoded in."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dllm.decoding import SamplingParams
from rollout.engine import content_seed
from rollout.records import RolloutSample
from tests.integration.conftest import Request
from tests.integration.oracle import TinyModel

CASES, BATCH, NEW_TOKENS = 200, 16, 8

SAMPLING = (SamplingParams(0.0), SamplingParams(), SamplingParams(0.7, 0.95), SamplingParams(1.2, 1.0, 40, 0.02))


def random_requests() -> list[Request]:
    """``CASES`` requests of 1 to 120 tokens; a quarter of them greedy."""
    rng = random.Random(0)
    made = []
    for index in range(CASES):
        prompt = [rng.randrange(6, 250) for _ in range(rng.randint(1, 120))]
        made.append(Request(prompt, SAMPLING[index % 4], content_seed(0, prompt, 0), NEW_TOKENS))
    return made


def batches(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Numbers of the requests in shuffled batches of ``BATCH``."""
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    yield from (order[i : i + BATCH] for i in range(0, len(order), BATCH))


@dataclass
class Alone:
    """The requests and their answers when nothing else runs."""

    requests: list[Request]
    answers: list[RolloutSample] = field(default_factory=list)


def assert_same_tokens(tiny: TinyModel, alone: Alone, answers: Sequence[RolloutSample]) -> None:
    """Token for token and step for step.

    An answer may differ only if the reference decoder says that one of its decisions hung on the last bits of the
    logits, which no test could hold; the random requests have no more than a few of those.
    """
    differing = [
        index
        for index, (first, second) in enumerate(zip(alone.answers, answers, strict=True))
        if first.trace.replay_ids.tolist() != second.trace.replay_ids.tolist()
        or first.trace.reveal_step.tolist() != second.trace.reveal_step.tolist()
    ]
    for index in differing:
        r = alone.requests[index]
        _, close = tiny.watched(r.prompt, sampling=r.sampling, seed=r.seed, max_new_tokens=r.max_new_tokens)
        assert close, f"request {index} of {len(r.prompt)} tokens, {r.sampling}, depends on its neighbours"
    assert len(differing) <= 2, differing
