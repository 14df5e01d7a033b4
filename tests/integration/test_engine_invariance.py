"""A prompt gives the same tokens alone, in a batch, after a radix hit and after an abort of its neighbours.

On the HTTP server with first-done-first-out scheduling, in fp32; ``test_engine_synchronous.py`` adds the other mode.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from rollout.records import RolloutSample
from tests.integration.conftest import Request
from tests.integration.invariance import BATCH, Alone, assert_same_tokens, batches
from tests.support import wait_for


def together(server, requests: list[Request]) -> list[RolloutSample]:
    made: dict[int, RolloutSample] = {}
    for numbers in batches(requests):
        made |= zip(numbers, server.generate([requests[i] for i in numbers]), strict=True)
    return [made[i] for i in range(len(requests))]


def test_the_requests_are_what_the_test_is_about(alone):
    """Prompts of 0 to 3 whole blocks, responses within a block and across blocks, drawn and greedy."""
    assert {len(r.prompt) // 32 for r in alone.requests} == {0, 1, 2, 3}
    assert {len(a.trace.steps_per_block) for a in alone.answers} == {1, 2}
    assert len({tuple(a.trace.replay_ids.tolist()) for a in alone.answers}) > 190


def test_in_a_batch_of_16(server, tiny, alone):
    wait_for(lambda: server.client.post("/flush_cache").status_code == 200, 10, "an idle engine")
    assert_same_tokens(tiny, alone, together(server, alone.requests))


def test_after_a_radix_hit(server, tiny, alone):
    """The prompts were just read, so that their whole blocks come from the cache."""
    chosen = [i for i, r in enumerate(alone.requests) if len(r.prompt) >= 32][: 4 * BATCH]
    part = Alone([alone.requests[i] for i in chosen], [alone.answers[i] for i in chosen])
    hits = [answer["meta_info"]["cached_tokens"] for answer in server.answers(part.requests[:BATCH])]
    assert hits == [len(r.prompt) // 32 * 32 for r in part.requests[:BATCH]]
    assert_same_tokens(tiny, part, together(server, part.requests))


def test_after_an_abort_of_the_neighbours(server, tiny, alone):
    """Eight more are aborted while they denoise; the batch does not notice."""
    made: dict[int, RolloutSample] = {}
    aborted = 0
    with ThreadPoolExecutor(2) as pool:
        for number, numbers in enumerate(batches(alone.requests)):
            chosen = [alone.requests[i] for i in numbers]
            neighbours = [Request(tiny.prompt(30 + i, 200 + number), max_new_tokens=400) for i in range(8)]
            names = [f"gone-{number}-{i}" for i in range(8)]
            body = {
                "input_ids": [r.prompt for r in neighbours],
                "sampling_params": [r.sglang() | {"ignore_eos": True} for r in neighbours],
                "rid": names,
            }
            leaving = pool.submit(server.client.post, "/generate", json=body)
            staying = pool.submit(server.generate, chosen)
            time.sleep(0.1)
            while not leaving.done():
                for name in names:
                    server.client.post("/abort_request", json={"rid": name})
                time.sleep(0.02)
            reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in leaving.result().json()]
            aborted += reasons.count("abort")
            made |= zip(numbers, staying.result(), strict=True)
    assert aborted == 8 * len(list(batches(alone.requests)))
    assert_same_tokens(tiny, alone, [made[i] for i in range(len(alone.requests))])
