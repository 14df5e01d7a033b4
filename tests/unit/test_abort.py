"""Which requests an abort lets finish their block, in SGLang's own queues."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.plugin.abort import _pop_aborted
from rollout.plugin.cpu import prepare_environment


@pytest.fixture(scope="module")
def dllm():
    """SGLang's queues; the environment of its CPU engine is taken back."""
    environment, path = dict(os.environ), list(sys.path)
    prepare_environment()
    from sglang.srt.dllm.mixin import req, scheduler

    yield SimpleNamespace(phases=req.DllmReqPhase, manager=scheduler.DllmManager)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


def request(rid: str, phase: Any, unresolved: bool) -> SimpleNamespace:
    return SimpleNamespace(
        rid=rid, dllm_phase=phase, dllm_incomplete_ids=[7] * 32 if unresolved else [], to_finish=None
    )


@pytest.mark.parametrize(
    ("phase", "unresolved", "kept"),
    [
        ("STAGING_DECODE", True, True),
        ("STAGING_DECODE", False, True),
        # The first block behind a prompt that lies in the prefix cache as a whole; its page was lost once.
        ("STAGING_PREFILL", True, True),
        ("STAGING_PREFILL", False, False),
        ("INCOMING_PREFILL", False, False),
        ("INCOMING_DECODE", False, False),
    ],
)
def test_a_block_under_way_is_finished(dllm, phase, unresolved, kept):
    manager, phase = dllm.manager(), dllm.phases[phase]
    aborted, other = request("a.", phase, unresolved), request("b.", phase, unresolved)
    manager.waiting_queue = [aborted, other]
    manager.staging_queue = [aborted, other]
    popped = _pop_aborted(dllm.manager.pop_aborted_reqs, manager, False, "a.")
    assert popped == ([] if kept else [aborted])
    for queue in (manager.waiting_queue, manager.staging_queue):
        assert (aborted in queue) is kept and other in queue
    assert (aborted.to_finish is not None) is kept and other.to_finish is None
