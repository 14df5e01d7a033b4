"""Groups of samples over one engine: seeds, streams of committed blocks, aborts, deadlines, resumed samples.

The server and the local ``rollout.Engine`` run the same ``Service``, so both give the same samples. It knows the engine
as a ``Backend`` of five calls and nothing of SGLang.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dllm.config import BlockDiffusionConfig
from dllm.decoding.sampling import effective_sampling
from dllm.trace import PER_TOKEN
from rollout.params import RESUMED, GenerateParams
from rollout.records import RolloutError, RolloutSample, edits_of, join_samples, sample_from_response

RESEND = 0.2
"""Seconds between two abort messages: SGLang forgets one that arrives before its request."""


class Backend(Protocol):
    """An engine as the service sees it."""

    def generate(
        self, rid: str, input_ids: list[int], params: dict[str, Any], routing: bool
    ) -> AsyncIterator[Mapping[str, Any]]:
        """SGLang's streamed answers to one request, about one per block, each with all tokens so far."""

    def abort(self, rid: str) -> None:
        """End a request at its next block boundary; unknown ids are ignored."""

    def version(self) -> str:
        """Label of the weights of new requests."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""


@dataclass(frozen=True)
class Job:
    """One sample to decode, ``sample`` of prompt ``prompt``; ``resume`` is the part of it that exists already."""

    prompt: int
    sample: int
    prompt_ids: Sequence[int]
    seed: int | None
    resume: RolloutSample | None = None


@dataclass(frozen=True)
class Block:
    """What a sample gained: the visible tokens of its newest blocks, with one entry per token in every field.

    Attributes:
        fields: ``output_ids`` and the per-token fields of a rollout line; ``text``; ``steps_per_block`` and
            ``weight_versions``, one entry per block; ``tail`` of the terminal block and ``edits`` where there are any.
    """

    prompt: int
    sample: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A sample is complete, or the engine failed it."""

    prompt: int
    sample: int
    result: RolloutSample | RolloutError


Event = Block | Finished


@dataclass
class Run:
    """A running group of samples.

    Attributes:
        rid: what the user calls it.
        name: what its requests' ids begin with.
        live: ids of the requests that the engine may still know.
        ended: set when no request is left.
    """

    rid: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    live: set[str] = field(default_factory=set)
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class DuplicateRequest(ValueError):
    """A request of this id is running."""


class Service:
    """Decodes jobs on one engine.

    Args:
        decoder: class of the engine's decoder, which says how it draws; None for SGLang's own.
    """

    def __init__(self, backend: Backend, block_diffusion: BlockDiffusionConfig, decoder: type | None) -> None:
        self.backend, self.block_diffusion, self.decoder = backend, block_diffusion, decoder
        self.block_size = block_diffusion.block_size
        self.runs: dict[str, Run] = {}

    async def events(
        self,
        jobs: Sequence[Job],
        params: GenerateParams,
        *,
        rid: str | None = None,
        deadline: float | None = None,
        blocks: bool = False,
    ) -> AsyncIterator[Event]:
        """Decode all jobs at once; what is complete comes first.

        Args:
            rid: name for ``abort``.
            deadline: seconds after which what is left ends at a block boundary as "abort".
            blocks: also yield every committed block.

        Closing the iterator aborts what is left.

        Raises:
            DuplicateRequest: ``rid`` is running.
            ValueError: the engine refused a request; the others are aborted.
        """
        run = Run(rid or uuid.uuid4().hex)
        if run.rid in self.runs:
            raise DuplicateRequest(f"a request with rid {run.rid!r} is running; wait for its end or use another")
        self.runs[run.rid] = run
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._decode(run, job, params, queue, blocks)) for job in jobs]
        watch = asyncio.ensure_future(self._expire(run, deadline)) if deadline is not None else None
        try:
            left = len(jobs)
            while left:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                left -= isinstance(event, Finished)
                yield event
        finally:
            if watch is not None:
                watch.cancel()
            run.aborted = True
            for task in tasks:
                task.cancel()
            for name in run.live:
                self.backend.abort(name)
            await asyncio.gather(*tasks, return_exceptions=True)
            self.runs.pop(run.rid, None)
            run.ended.set()

    async def collect(self, jobs: Sequence[Job], params: GenerateParams, **options: Any) -> list[Finished]:
        """The complete samples of ``events``, in the order of ``jobs``."""
        place = {(job.prompt, job.sample): index for index, job in enumerate(jobs)}
        made: list[Any] = [None] * len(jobs)
        async with aclosing(self.events(jobs, params, **options)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Finished):
                    made[place[event.prompt, event.sample]] = event
        return made

    async def abort(self, rid: str) -> bool:
        """End a group at its next block boundaries; True if it ran. Returns when nothing of it is left."""
        run = self.runs.get(rid)
        if run is None:
            return False
        await self._abort(run)
        return True

    async def _abort(self, run: Run) -> None:
        run.aborted = True
        while not run.ended.is_set():
            for name in list(run.live):
                self.backend.abort(name)
            try:
                await asyncio.wait_for(run.ended.wait(), RESEND)
            except TimeoutError:
                continue

    async def _expire(self, run: Run, deadline: float) -> None:
        await asyncio.sleep(deadline)
        await self._abort(run)

    async def _decode(
        self, run: Run, job: Job, params: GenerateParams, queue: asyncio.Queue[Event | Exception], blocks: bool
    ) -> None:
        try:
            result = await self._sample(run, job, params, queue, blocks)
        except RolloutError as error:
            queue.put_nowait(Finished(job.prompt, job.sample, error))
        except Exception as error:  # the reader of the queue raises it and ends the others
            queue.put_nowait(error)
        else:
            queue.put_nowait(Finished(job.prompt, job.sample, result))

    async def _sample(
        self, run: Run, job: Job, params: GenerateParams, queue: asyncio.Queue[Event | Exception], blocks: bool
    ) -> RolloutSample:
        done = job.resume
        if done is not None and done.finish_reason != "abort":
            return done
        visible = [] if done is None else done.trace.replay_ids[: done.trace.visible].tolist()
        prompt = [*job.prompt_ids, *visible]
        params = replace(params, max_new_tokens=params.max_new_tokens - len(visible))
        # SGLang aborts by prefix: no text of a user, and a full stop that keeps sample 1 from taking 11 with it.
        name = f"{run.name}/{job.prompt}/{job.sample}."
        admitted = self.backend.version()
        answer: dict[str, Any] | None = None
        sent = Progress(len(prompt) // self.block_size, self.block_size)
        if run.aborted:
            answer = {"output_ids": [], "text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
        else:
            run.live.add(name)
            try:
                asked = params.to_sglang(job.seed)
                if visible and params.stop:
                    asked["custom_params"] = {RESUMED: len(visible)}
                request = self.backend.generate(name, prompt, asked, params.routing)
                async with aclosing(request) as answers:  # type: ignore[type-var]
                    async for part in answers:
                        answer = latest(answer, part)
                        if blocks and (fields := sent.advance(answer)):
                            queue.put_nowait(Block(job.prompt, job.sample, fields))
                run.live.discard(name)
            finally:
                if name in run.live:
                    self.backend.abort(name)
                    run.live.discard(name)
        if answer is None:
            raise RolloutError("the engine ended a request without an answer")
        sampling = effective_sampling(self.decoder, params.sampling)
        made = sample_from_response(answer, prompt, self.block_size, sampling, params.max_new_tokens, job.seed)
        made.stop_rules, made.version_at_admission = params.stop_rules, admitted
        made.version_at_completion = self.backend.version()
        if done is None:
            return made
        ids = [*visible, *made.trace.replay_ids[: made.trace.visible].tolist()]
        return join_samples(done, made, self._text(ids, answer["meta_info"].get("finish_reason") or {}))

    def _text(self, ids: Sequence[int], reason: Mapping[str, Any]) -> str:
        """What SGLang makes of a whole response: without special tokens, and without what ended it."""
        matched = reason.get("matched")
        text = self.backend.decode(ids[:-1] if isinstance(matched, int) else ids)
        return text.partition(matched)[0] if isinstance(matched, str) else text


@dataclass
class Progress:
    """How much of a streamed answer has been passed on.

    Attributes:
        first_block: the block that the prompt ends in, on the absolute grid of ``block_size``.
    """

    first_block: int
    block_size: int
    tokens: int = 0
    characters: int = 0
    blocks: int = 0

    def advance(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of what is new in a cumulative answer; empty if nothing is."""
        ids, meta, text = answer["output_ids"], answer["meta_info"], answer.get("text") or ""
        if len(ids) <= self.tokens:
            return {}
        log = [block for block in meta.get("dllm_block", []) if block is not None]
        new = {"output_ids": list(ids[self.tokens :]), "text": text[self.characters :]}
        new |= {name: list(meta.get(f"dllm_{name}", []))[self.tokens : len(ids)] for name in PER_TOKEN}
        fresh = log[self.blocks :]
        new["steps_per_block"] = [int(block["steps"]) for block in fresh]
        new["weight_versions"] = [str(block["weight_version"]) for block in fresh]
        if edits := edits_of(fresh, self.first_block + self.blocks, self.block_size):
            new["edits"] = [list(edit) for edit in edits]
        if fresh and "tail" in fresh[-1]:
            new["tail"] = fresh[-1]["tail"]
        self.tokens, self.characters, self.blocks = len(ids), len(text), len(log)
        return new


def latest(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The newest answer; a request that ends while it waits for its next block comes without its tokens and log."""
    reason = now["meta_info"].get("finish_reason") or {}
    logged = before is not None and "dllm_block" in before["meta_info"]
    if before is not None and logged and reason.get("type") == "abort" and "dllm_block" not in now["meta_info"]:
        return {**before, "meta_info": {**before["meta_info"], "finish_reason": reason}}
    return {**now, "output_ids": list(now["output_ids"])}
