"""Closes an engine for a weight refresh within milliseconds, and without losing a request if asked to wait.

Stock ``pause_generation(mode="abort")`` looks once a second whether all requests have ended, and knows no other way
than to abort them. A pause whose request id is ``weight_sync.control.DRAIN`` plus a number of seconds lets the
running ones end on their own for that long; new ones wait at the door until ``continue_generation`` either way, which
is refused while the weights are a mixture, whoever asks for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from weight_sync.control import DRAIN, LOADER
from weight_sync.messages import mixture

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


MIXTURE = "dllm_mixture"
"""Attribute of SGLang's tokenizer manager: label of the mixture that its engine holds, or ""."""


async def _update(original: Callable, manager: Any, request: Any, *args: Any) -> Any:
    """An update passes, and what it leaves behind is remembered."""
    done, message, *_ = result = await original(manager, request, *args)
    if getattr(request, "load_format", None) == LOADER:
        setattr(manager, MIXTURE, mixture(message))
    elif done:
        setattr(manager, MIXTURE, "")
    return result


async def _continue(original: Callable, manager: Any, request: Any) -> None:
    if held := getattr(manager, MIXTURE, ""):
        from fastapi import HTTPException

        raise HTTPException(
            409,
            f"the engine holds a mixture of two versions of the weights ({held}) and stays closed until a complete "
            "update has arrived",
        )
    await original(manager, request)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}.pause_generation", _pause, HookType.AROUND)
    HookRegistry.register(f"{manager}.continue_generation", _continue, HookType.AROUND)
    for source in ("disk", "distributed", "tensor", "ipc"):
        HookRegistry.register(f"{manager}.update_weights_from_{source}", _update, HookType.AROUND)
