"""Refresh the weights of running engines from trainer ranks, in place. Knows no trainer framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_sync.control import EngineControl as EngineControl
    from weight_sync.layout import CheckpointLayout as CheckpointLayout
    from weight_sync.layout import LayoutError as LayoutError
    from weight_sync.layout import LLaDA2Layout as LLaDA2Layout
    from weight_sync.messages import EngineFailed as EngineFailed
    from weight_sync.messages import SyncReport as SyncReport
    from weight_sync.messages import WeightSyncError as WeightSyncError
    from weight_sync.publisher import WeightPublisher as WeightPublisher

_HOME = {
    "CheckpointLayout": "layout",
    "EngineControl": "control",
    "EngineFailed": "messages",
    "LLaDA2Layout": "layout",
    "LayoutError": "layout",
    "SyncReport": "messages",
    "WeightPublisher": "publisher",
    "WeightSyncError": "messages",
}
"""Public names and their modules; imported on first use, because every engine process imports this package."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"weight_sync.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
