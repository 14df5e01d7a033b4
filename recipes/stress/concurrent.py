"""Many requests at once: each is answered, with the answer that it gets alone."""

from __future__ import annotations

import asyncio
import time

import httpx

from recipes.stress.report import Phase
from recipes.stress.target import Target
from recipes.stress.wellformed import WAYS, Ask, Ids, WrongAnswer, as_json, ask, way


async def one(target: Target, wanted: Ask, name: str, phase: Phase) -> Ids | None:
    """An answer by one of ``WAYS``, or None and a problem."""
    try:
        ids = await WAYS[name](target, wanted)
    except (httpx.HTTPError, WrongAnswer, ValueError, KeyError) as error:
        phase.count(name, "lost")
        phase.problem(f"request {wanted.number} by {name}: {error!r}")
        return None
    phase.count(name, "200")
    return ids


async def concurrent(target: Target, count: int, may_differ: float = 0.0) -> Phase:
    """``count`` different requests at once, and then each of them alone.

    Args:
        may_differ: share of the answers that may have other tokens than alone; 0 holds where the arithmetic does not
            depend on the batch, as in fp32 on a CPU. An answer that another request gets alone is never allowed.
    """
    phase, start = Phase("concurrent"), time.monotonic()
    asks = [ask(number, target.info) for number in range(count)]
    answers = await asyncio.gather(*(one(target, wanted, way(wanted.number), phase) for wanted in asks))
    phase.seconds = time.monotonic() - start
    alone = [await as_json(target, wanted) for wanted in asks]
    judge(phase, answers, alone, may_differ)
    phase.figures["requests_per_s"] = count / phase.seconds
    phase.figures["alone_requests_per_s"] = count / (time.monotonic() - start - phase.seconds)
    await target.check(phase)
    return phase


def judge(phase: Phase, answers: list[Ids | None], alone: list[Ids], may_differ: float) -> None:
    """Compare every answer with that of the same request alone."""
    owners: dict[str, list[int]] = {}
    for number, ids in enumerate(alone):
        owners.setdefault(repr(ids), []).append(number)
    different = swapped = 0
    for number, (got, right) in enumerate(zip(answers, alone, strict=True)):
        if got is None or got == right:
            continue
        different += 1
        if repr(got) in owners:
            swapped += 1
            phase.problem(f"request {number} by {way(number)} got the answer of request {owners[repr(got)][0]}")
        elif may_differ == 0:
            phase.problem(f"request {number} by {way(number)}: {got} at once, {right} alone")
    if different > may_differ * len(answers) > 0:
        phase.problem(f"{different} of {len(answers)} answers have other tokens than alone")
    phase.figures |= {
        "lost": sum(ids is None for ids in answers),
        "swapped": swapped,
        "different": different,
        "compared": len(answers),
    }
