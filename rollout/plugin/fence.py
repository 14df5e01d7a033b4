"""Closes an engine for a weight refresh within milliseconds, and without losing a request if asked to wait.

Stock ``pause_generation(mode="abort")`` looks once a second whether all requests have ended, and knows no other way
than to abort them. A pause whose request id is ``weight_sync.control.DRAIN`` plus a number of seconds lets the
running ones end on their own for that long; new ones wait at the door until ``continue_generation`` either way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from weight_sync.control import DRAIN

POLL_SECONDS, ABORT_AGAIN_SECONDS = 0.005, 0.25


async def _pause(original: Callable, manager: Any, request: Any) -> None:
    if request.mode != "abort":
        from fastapi import HTTPException

        raise HTTPException(
            400,
            f"pause_generation mode {request.mode!r} leaves half-denoised blocks behind, which the scheduler cannot "
            "take up again; use mode 'abort', which ends requests at a block boundary",
        )
    rid = request.rid or ""
    now = time.monotonic()
    abort_at = now + float(rid.removeprefix(DRAIN)) if rid.startswith(DRAIN) else now
    async with manager.is_pause_cond:
        manager.is_pause = True
        idle = 0
        # A request that has passed the door may not have entered yet: it is seen at the second look.
        while idle < 2:
            idle = 0 if await manager.model_update_lock.is_locked() else idle + 1
            if not idle and time.monotonic() >= abort_at:
                manager.abort_request(abort_all=True)
                abort_at = time.monotonic() + ABORT_AGAIN_SECONDS
            await asyncio.sleep(0 if idle else POLL_SECONDS)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation", _pause, HookType.AROUND
    )
