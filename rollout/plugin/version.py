"""Which version of the weights this scheduler process holds.

SGLang keeps the version as a label of the tokenizer process, read when a response is built: a request that
spans a refresh reports only the new one. Here the scheduler itself remembers the version of its last
successful update, so that every block can be logged with the weights it was decoded with.
"""

from __future__ import annotations

from typing import Any

from weight_sync.control import LOADER

_current = "default"


def current() -> str:
    """Version of the weights in this process."""
    return _current


def set_current(version: str) -> None:
    global _current
    _current = version


def _after_update(result: Any, manager: Any, request: Any) -> None:
    if getattr(request, "load_format", None) == LOADER:
        _report_loader(result, manager)
        return
    version = getattr(request, "weight_version", None)
    if getattr(result, "success", False) and version is not None:
        from weight_sync.loader import STATE

        set_current(str(version))
        STATE.label = str(version)


def _before_loader(manager: Any, request: Any) -> None:
    """Let the loader drop the cache itself: SGLang asserts that this succeeds, and dies if a request is still there."""
    from weight_sync.loader import STATE

    STATE.flush = lambda: manager.is_fully_idle() and manager.flush_cache(empty_cache=False)


def _around_worker(update: Any, worker: Any, request: Any) -> Any:
    """A message for our loader that is no message is refused; SGLang's scheduler would die of it."""
    if getattr(request, "load_format", None) != LOADER:
        return update(worker, request)
    try:
        return update(worker, request)
    except Exception as error:
        # The loader never raises: this was unpickled, or should have been.
        from weight_sync.loader import unreadable

        unreadable(error)
        return False, str(error)


def _report_loader(result: Any, manager: Any) -> None:
    """Turn the status our loader left on every tensor-parallel rank into the answer of the request.

    SGLang answers for rank 0 only, and always with success when a custom loader returns. Blocks that are decoded while
    weights arrive carry the loader's label, which is no version.
    """
    import torch

    from weight_sync import loader

    size = torch.distributed.get_world_size(manager.tp_cpu_group)
    statuses: list[Any] = [loader.STATE.status]
    if size > 1:
        statuses = [None] * size
        torch.distributed.all_gather_object(statuses, loader.STATE.status, group=manager.tp_cpu_group)
    result.success, result.message = loader.answer(statuses)
    if loader.STATE.label is not None:
        set_current(loader.STATE.label)


def _after_scheduler_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    set_current(str(scheduler.server_args.weight_version))


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for source in ("disk", "distributed", "tensor", "ipc"):
        HookRegistry.register(f"{manager}.update_weights_from_{source}", _after_update, HookType.AFTER)
    HookRegistry.register(f"{manager}.update_weights_from_tensor", _before_loader, HookType.BEFORE)
    worker = "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_tensor"
    HookRegistry.register(worker, _around_worker, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_diffusion_llm", _after_scheduler_init, HookType.AFTER
    )
