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


def test_aborted_in_the_first_block_behind_a_cached_prompt(server):
    """The prompt is a whole page, so that SGLang counts its first block as part of the prompt."""

    async def aborted(target: Target) -> Phase:
        found, body = Phase("aborted"), {"input_ids": list(range(8, 40)), "sampling_params": {"ignore_eos": True}}
        (await target.http.post("/generate", json=body)).raise_for_status()
        for i in range(12):
            name = f"behind-a-page-{i}"
            asked = asyncio.create_task(target.http.post("/generate", json=body | {"rid": name}))
            await asyncio.sleep(0.004 * i)
            while not asked.done():
                await target.http.post("/abort_request", json={"rid": name})
                await asyncio.sleep(0.005)
            if (answer := asked.result()).status_code == 200:
                info = answer.json()["meta_info"]
                found.count("behind a page", {0: "nothing", 32: "one block"}.get(info["completion_tokens"], "more"))
                assert info.get("cached_tokens", 32) == 32
        await target.check(found)
        return found

    assert run(server, aborted).outcomes().get("one block", 0) > 0
