"""The three phases of ``python -m recipes.stress`` in small, on the server of the other tests."""

from __future__ import annotations

import asyncio
import random

import pytest

from recipes.stress.concurrent import concurrent
from recipes.stress.described import described
from recipes.stress.malformed import attempts
from recipes.stress.report import Phase
from recipes.stress.send import malformed
from recipes.stress.soak import soak
from recipes.stress.target import Target


def run(server, phase) -> Phase:
    """What ``phase(target)`` found; a server that holds more afterwards than before is a problem of it."""

    async def whole() -> Phase:
        target = await Target.at(server.url, server.process.pid, None)
        try:
            before = await target.at_rest()
            found = await phase(target)
            assert await target.at_rest() == before
        finally:
            await target.http.aclose()
        return found

    found = asyncio.run(whole())
    assert not found.problems, "\n".join(found.problems) + "\n" + server.tail()
    assert found.figures["leaked_kv_tokens"] == found.figures["requests_left"] == 0
    return found


def test_malformed_by_hand(server):
    found = run(server, lambda target: malformed(target, attempts(random.Random(0), 150, target.info)))
    assert found.requests == 150 and found.outcomes()["400"] > 50 and found.outcomes()["200"] > 10


def test_malformed_by_the_servers_own_description(server):
    pytest.importorskip("schemathesis", reason="schemathesis is in the group dev")
    description = server.client.get("/openapi.json").json()
    made = described(description, 120, 0, ("/rollout/", "/generate"), random_cases=5)
    found = run(server, lambda target: malformed(target, made))
    assert found.requests == 120 and set(found.kinds) == {"described, at borders", "described, at random"}


def test_many_at_once(server):
    found = run(server, lambda target: concurrent(target, 20))
    assert found.figures["compared"] == 20 and found.outcomes() == {"200": 20}


def test_soak(server):
    found = run(server, lambda target: soak(target, 1.5 / 60, 0, references=3))
    assert found.figures["scheduler_mib"] > 100 and found.outcomes()["200"] > 5
