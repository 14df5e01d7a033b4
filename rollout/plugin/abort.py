"""Aborts at a block boundary: the response so far comes back with its log, and can be resumed.

Stock SGLang drops a running block-diffusion request at once and returns none of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.plugin import metrics


def _pop_aborted(original: Callable, manager: Any, abort_all: bool, rid: str) -> list[Any]:
    """Let a request that is denoising finish its block; only others leave the queues at once."""
    from sglang.srt.dllm.mixin.req import DllmReqPhase
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    denoising = []
    for queue in ("waiting_queue", "staging_queue"):
        kept = []
        for req in getattr(manager, queue):
            selected = abort_all or req.rid.startswith(rid)
            # SGLang sets the phase before it searches the prefix cache: behind a prompt that is cached as a whole, the
            # first block runs as STAGING_PREFILL. Dropped there, its page is lost if the prompt ends with a page.
            if selected and (req.dllm_phase == DllmReqPhase.STAGING_DECODE or req.dllm_incomplete_ids):
                req.to_finish = FINISH_ABORT()
                denoising.append((queue, req))
            else:
                kept.append(req)
        setattr(manager, queue, kept)
    popped = original(manager, abort_all, rid)
    if (counters := metrics.current()) is not None:
        counters.dropped(len(popped))
    for queue, req in denoising:
        getattr(manager, queue).append(req)
    return popped


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.dllm.mixin.scheduler.DllmManager.pop_aborted_reqs", _pop_aborted, HookType.AROUND)
