"""Sends malformed requests; a 5xx, a 4xx that does not say what is wrong, or no answer is a problem."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

import httpx

from recipes.stress.malformed import FIELDS, SAMPLING, Attempt
from recipes.stress.report import Phase
from recipes.stress.target import Target
from rollout.plugin.refusals import ABOUT_THE_SERVER

IN_FLIGHT = 32
"""Malformed requests at a time."""

UNDER_ADMIN = ("/rollout/abort",)
"""Routes that are sent with the administrator's key, so that more than the refusal is seen."""


async def malformed(target: Target, todo: Iterable[Attempt]) -> Phase:
    """All of ``todo``; the server answers a good request afterwards and holds nothing."""
    phase, start, left = Phase("malformed"), time.monotonic(), iter(todo)

    async def worker() -> None:
        for attempt in left:
            await send(target, attempt, phase)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    phase.seconds = time.monotonic() - start
    await target.check(phase)
    return phase


async def send(target: Target, attempt: Attempt, phase: Phase) -> None:
    """One attempt; what is wrong with the answer goes into ``phase``."""
    where = f"{attempt.kind}: {attempt.method} {attempt.path[:200]}"
    headers = attempt.headers | (target.admin if attempt.path.startswith(UNDER_ADMIN) else {})
    try:
        if attempt.hang_up:
            async with target.http.stream(attempt.method, attempt.path, content=attempt.body, headers=headers) as got:
                async for _ in got.aiter_bytes():
                    break
            phase.count(attempt.kind, "hung up")
            return
        answer = await target.http.request(attempt.method, attempt.path, content=attempt.body, headers=headers)
    except httpx.HTTPError as error:
        phase.problem(f"{where}: no answer: {error!r} for {attempt.body[:300]!r}")
        phase.count(attempt.kind, "no answer")
        return
    phase.count(attempt.kind, str(answer.status_code))
    if answer.status_code >= 500:
        phase.problem(f"{where}: {answer.status_code} {answer.text[:300]} for {attempt.body[:400]!r}")
    elif 400 <= answer.status_code < 500 and not says_what(answer, attempt):
        said = f"{where}: {answer.status_code} names no field: {answer.text[:300]}"
        phase.problem(f"{said} for {attempt.body[:300]!r}")


OURS = ("/rollout/", "/weights/")
"""Whose refusals must name the field as such; SGLang's may in their words."""

WITHOUT_A_FIELD = (401, 403, 404, 405, 409)
"""Not about a field: no rights, no such thing, already running."""

NAMES = {"body", "query", "header", "json", "boundary", *SAMPLING, *chain.from_iterable(FIELDS.values())}
"""What SGLang's messages call the parts of a request, besides the names in the request itself."""


def says_what(answer: httpx.Response, attempt: Attempt) -> bool:
    """Whether a refusal names the field: as ``field`` or OpenAI's ``param``, or, SGLang's only, in its message."""
    if answer.status_code in WITHOUT_A_FIELD:
        return True
    with suppress(ValueError, AttributeError, KeyError, TypeError):
        error = answer.json()["error"]
        if error.get("field") or error.get("param"):
            return True
    if attempt.path.startswith(OURS):
        return False
    if ABOUT_THE_SERVER.search(answer.text):
        return True
    words = set(re.findall(r"\w+", answer.text.lower()))
    return any(name.lower() in words for name in {*NAMES, *attempt.fields, *names_in(attempt.body)})


def names_in(body: bytes) -> set[str]:
    """Names of fields in a JSON body, at any depth."""
    try:
        todo: list[Any] = [json.loads(body)]
    except (ValueError, RecursionError):
        return set()
    found: set[str] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            found |= {name for name in node if name}
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    return found
