"""A long steady load of everything at once; memory stays flat and answers stay right."""

from __future__ import annotations

import asyncio
import random
import time
import uuid

import httpx

from recipes.stress.concurrent import one
from recipes.stress.malformed import attempts, hang_up
from recipes.stress.memory import FLAT_MIB, FLAT_SHARE, growths, memory_mib
from recipes.stress.report import Phase
from recipes.stress.send import send
from recipes.stress.target import Target
from recipes.stress.wellformed import WAYS, Ask, Ids, WrongAnswer, as_json, ask, of

WORKERS = 16
LONG = 400
"""Visible tokens of the requests that are aborted."""

SAMPLES = 400
"""How often memory is looked at."""

JUDGED_MINUTES = 5.0
"""A shorter run only reports the growth of memory: it consists of warm-up."""


async def soak(target: Target, minutes: float, seed: int, references: int = 64) -> Phase:
    """Good requests (three fifths), malformed ones, clients that hang up, aborts, deadlines from ``WORKERS`` clients.

    Args:
        references: different good requests of either length; their right answers are asked for first, one by one.
    """
    phase = Phase("soak")
    short = [ask(number, target.info) for number in range(references)]
    long = [ask(number, target.info, LONG) for number in range(references)]
    right = {wanted: await as_json(target, wanted) for wanted in dict.fromkeys([*short, *long])}
    await target.at_rest()
    start = time.monotonic()
    end = start + 60 * minutes
    odd = attempts(random.Random(seed), 1 << 40, target.info)
    times: list[float] = []
    sizes: list[dict[str, float]] = []

    async def worker(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            draw = rng.random()
            if draw < 0.6:
                await good(target, rng.choice(short), rng.choice(tuple(WAYS)), right, phase)
            elif draw < 0.8:
                await send(target, next(odd), phase)
            elif draw < 0.9:
                await send(target, hang_up(rng, "", target.info), phase)
            elif draw < 0.95:
                await aborted(target, rng.choice(long), rng.uniform(0, 1), right, phase)
            else:
                await expired(target, rng.choice(long), rng.uniform(0.05, 1), right, phase)

    async def watch(pid: int) -> None:
        while time.monotonic() < end:
            times.append(time.monotonic() - start)
            sizes.append(memory_mib(pid))
            await asyncio.sleep(60 * minutes / SAMPLES)

    watches = [] if target.pid is None else [watch(target.pid)]
    await asyncio.gather(*watches, *(worker(i) for i in range(WORKERS)))
    phase.seconds = time.monotonic() - start
    phase.figures["requests_per_s"] = phase.requests / phase.seconds
    if sizes:
        judge(phase, times, sizes, minutes)
    await target.check(phase)
    return phase


def judge(phase: Phase, times: list[float], sizes: list[dict[str, float]], minutes: float) -> None:
    """Figures of the memory of every process; growth is a problem."""
    for name, line in growths(times, sizes).items():
        short = name.rpartition("::")[2]
        phase.figures |= {f"{short}_mib": line.last, f"{short}_mib_per_minute": line.per_minute}
        if minutes >= JUDGED_MINUTES and not line.flat:
            phase.problem(
                f"memory of {name} grew from {line.first:.1f} to {line.last:.1f} MiB after the warm-up, "
                f"{line.per_minute:.2f} MiB a minute; flat is {FLAT_MIB:.0f} MiB or {FLAT_SHARE:.0%}"
            )


async def good(target: Target, wanted: Ask, way: str, right: dict[Ask, Ids], phase: Phase) -> None:
    """The answer must be that of the same request alone."""
    ids = await one(target, wanted, way, phase)
    if ids is not None and ids != right[wanted]:
        phase.problem(f"request {wanted.number} by {way}: {ids} instead of {right[wanted]}")


async def aborted(target: Target, wanted: Ask, after: float, right: dict[Ask, Ids], phase: Phase) -> None:
    """A request and, a little later, its abort; both answer the same beginning of the response."""
    rid = uuid.uuid4().hex
    request = asyncio.ensure_future(target.http.post("/rollout/generate", json=wanted.body(rid=rid)))
    try:
        await asyncio.sleep(after)
        answer = await target.http.post("/rollout/abort", json={"rid": rid}, headers=target.admin)
        ids = begun(await request, wanted, right, phase, "abort")
        found = answer.json()
        if answer.status_code != 200 or (found["found"] and of(found["groups"][0]["samples"], wanted) != ids):
            phase.problem(f"an abort answered {answer.status_code} {answer.text[:300]}; the request {ids}")
    except (httpx.HTTPError, WrongAnswer, ValueError, KeyError) as error:
        phase.count("abort", "lost")
        phase.problem(f"an abort: {error!r}")
        request.cancel()


async def expired(target: Target, wanted: Ask, deadline: float, right: dict[Ask, Ids], phase: Phase) -> None:
    """A request with a deadline."""
    try:
        body = wanted.body(deadline_s=deadline)
        begun(await target.http.post("/rollout/generate", json=body), wanted, right, phase, "deadline")
    except (httpx.HTTPError, WrongAnswer, ValueError, KeyError) as error:
        phase.count("deadline", "lost")
        phase.problem(f"a deadline: {error!r}")


def begun(answer: httpx.Response, wanted: Ask, right: dict[Ask, Ids], phase: Phase, kind: str) -> Ids:
    """Ids of an answer that may have been cut; they must be a beginning of the right ones."""
    if answer.status_code != 200:
        raise WrongAnswer(f"{answer.status_code} {answer.text[:300]}")
    samples = answer.json()["groups"][0]["samples"]
    ids = of(samples, wanted)
    cut = [sample["finish_reason"] == "abort" for sample in samples]
    phase.count(kind, "200, cut" if any(cut) else "200, complete")
    for got, whole, short in zip(ids, right[wanted], cut, strict=True):
        if got != (whole[: len(got)] if short else whole):
            phase.problem(f"{kind} of request {wanted.number}: {got} is no beginning of {whole}")
    return ids
