"""The engine side: stock SGLang with block-diffusion decoders and logs, started, attached to and looked into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client import connect
    from rollout.engine import Engine
    from rollout.params import GenerateParams

__all__ = ["Engine", "GenerateParams", "connect"]

_HOMES = {"Engine": "rollout.engine", "GenerateParams": "rollout.params", "connect": "rollout.client"}


def __getattr__(name: str) -> Any:
    """Public names on first use, so that ``import rollout`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
