"""Requests that must be answered, in every way the server takes them, and the token ids of their answers."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx

from dllm.noise import sample_seed
from recipes.stress.target import Target
from rollout import wire

SEED, STEP = 1, 0

Ids = list[list[int]]
"""Token ids of the samples of one request."""


class WrongAnswer(Exception):
    """An answer that is none, or not to this request."""


@dataclass(frozen=True)
class Ask:
    """One prompt with its own seeds: no other number has the same prompt.

    Attributes:
        number: of the request; its prompt index, from which the seeds of its samples follow.
    """

    number: int
    input_ids: tuple[int, ...]
    n: int
    max_new_tokens: int
    ignore_eos: bool
    temperature: float

    def params(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
        }

    def body(self, **more: Any) -> dict[str, Any]:
        """Of ``POST /rollout/generate``."""
        prompt = {"input_ids": list(self.input_ids), "index": self.number}
        given = {"prompts": [prompt], "n": self.n, "seed": SEED, "step": STEP, "sampling_params": self.params()}
        return given | more


def ask(number: int, info: dict[str, Any], longest: int = 70) -> Ask:
    """Request ``number``: its first two tokens are the number, the rest is random.

    Args:
        info: what ``GET /rollout/info`` answered.
        longest: visible tokens at most.
    """
    usable = [t for t in range(6, min(info["vocab_size"], 250)) if t != info["mask_id"]]
    rng = random.Random(number)
    ids = [usable[number % len(usable)], usable[number // len(usable) % len(usable)]]
    ids += [rng.choice(usable) for _ in range(rng.randrange(1, 40))]
    n = rng.choice((1, 1, 1, 2))
    return Ask(number, tuple(ids), n, rng.randrange(1, longest), rng.random() < 0.5, rng.choice((0.0, 1.0, 1.0)))


def of(samples: list[Any], wanted: Ask) -> Ids:
    """Ids of complete samples of ``/rollout/generate``."""
    if len(samples) != wanted.n:
        raise WrongAnswer(f"{len(samples)} samples for n={wanted.n}")
    for sample in samples:
        if sample is None or "error" in sample:
            raise WrongAnswer(f"a sample is {sample}")
        if tuple(sample["input_ids"]) != wanted.input_ids:
            raise WrongAnswer("the answer has another prompt")
    return [sample["output_ids"] for sample in samples]


def checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != 200:
        raise WrongAnswer(f"{answer.status_code} {answer.text[:300]}")
    return answer


async def as_json(target: Target, wanted: Ask) -> Ids:
    answer = checked(await target.http.post("/rollout/generate", json=wanted.body()))
    return of(answer.json()["groups"][0]["samples"], wanted)


async def as_msgpack(target: Target, wanted: Ask) -> Ids:
    headers = {"Accept": wire.MSGPACK, "Content-Type": wire.MSGPACK}
    content = wire.encode_msgpack(wanted.body())
    answer = checked(await target.http.post("/rollout/generate", content=content, headers=headers))
    return of(wire.decode_msgpack(answer.content)["groups"][0]["samples"], wanted)


async def as_stream(target: Target, wanted: Ask) -> Ids:
    """The blocks of the stream; they must add up to the complete samples at its end."""
    blocks: Ids = [[] for _ in range(wanted.n)]
    whole: list[Any] = [None] * wanted.n
    async for event in events(target, "/rollout/generate", wanted.body(stream=True)):
        if "error" in event:
            raise WrongAnswer(f"the stream ends with {event['error']}")
        if "finished" in event:
            whole[event["sample"]] = event["finished"]
        else:
            blocks[event["sample"]] += event["output_ids"]
    ids = of(whole, wanted)
    if ids != blocks:
        raise WrongAnswer("the streamed blocks are not the sample")
    return ids


async def of_sglang(target: Target, wanted: Ask, stream: bool = False) -> Ids:
    """SGLang's own endpoint, a request for all samples."""
    seeds = [sample_seed(SEED, STEP, wanted.number, j) for j in range(wanted.n)]
    body = {
        "input_ids": [list(wanted.input_ids)] * wanted.n,
        "sampling_params": [wanted.params() | {"sampling_seed": seed} for seed in seeds],
        "stream": stream,
    }
    if not stream:
        return [one["output_ids"] for one in checked(await target.http.post("/generate", json=body)).json()]
    last: dict[int, list[int]] = {}
    async for event in events(target, "/generate", body):
        if "error" in event:
            raise WrongAnswer(f"the stream ends with {event['error']}")
        last[event["index"]] = event["output_ids"]
    return [last.get(i, []) for i in range(wanted.n)]


async def of_sglang_stream(target: Target, wanted: Ask) -> Ids:
    return await of_sglang(target, wanted, stream=True)


async def events(target: Target, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events up to the last, which must be there."""
    async with target.http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
        checked(answer)
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise WrongAnswer("the stream has no end")


WAYS: dict[str, Callable[[Target, Ask], Coroutine[Any, Any, Ids]]] = {
    "/rollout/generate": as_json,
    "/rollout/generate, msgpack": as_msgpack,
    "/rollout/generate, stream": as_stream,
    "/generate": of_sglang,
    "/generate, stream": of_sglang_stream,
}
"""Each gives the same token ids."""


def way(number: int) -> str:
    """How request ``number`` is sent."""
    return tuple(WAYS)[number % len(WAYS)]
