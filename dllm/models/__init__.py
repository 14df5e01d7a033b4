"""Models with Hugging Face names and a packed forward pass, by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Mapping

from dllm.config import ConfigError
from dllm.models.base import BlockDiffusionLM
from dllm.models.llada2 import LLaDA2MoeModelLM
from dllm.models.sdar import SDARForCausalLM, SDARMoeForCausalLM

MODELS: Mapping[str, type[BlockDiffusionLM]] = {
    cls.__name__: cls for cls in (LLaDA2MoeModelLM, SDARForCausalLM, SDARMoeForCausalLM)
}
"""Architectures that can be trained."""

__all__ = ["MODELS", "BlockDiffusionLM", "model_class"]


def model_class(architecture: str, where: object = "config.json") -> type[BlockDiffusionLM]:
    """The model of an architecture.

    Args:
        where: what named it, for the message.

    Raises:
        ConfigError: there is no such model.
    """
    if architecture not in MODELS:
        raise ConfigError(f"architecture {architecture!r} of {where} has no trainer model; use one of {sorted(MODELS)}")
    return MODELS[architecture]
