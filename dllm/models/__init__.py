"""Models with Hugging Face names and a packed forward pass, by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dllm.config import ConfigError, architecture_name
from dllm.models.base import BlockDiffusionLM
from dllm.models.llada2 import LLaDA2MoeModelLM
from dllm.models.sdar import SDARForCausalLM, SDARMoeForCausalLM

MODELS: Mapping[str, type[BlockDiffusionLM]] = {
    cls.__name__: cls for cls in (LLaDA2MoeModelLM, SDARForCausalLM, SDARMoeForCausalLM)
}
"""Architectures that can be trained."""

__all__ = ["MODELS", "BlockDiffusionLM", "meta_model", "model_class"]


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


def meta_model(config: Mapping[str, Any], where: object = "config.json") -> BlockDiffusionLM:
    """The network of a config.json on the meta device: names and shapes, no weights and no memory.

    Args:
        where: what the config was read from, for the message.

    Raises:
        ConfigError: there is no model of its architecture, or its keys do not describe one.
    """
    cls = model_class(architecture_name(config), where)
    try:
        with torch.device("meta"):
            return cls.from_hf(config)
    except ConfigError:
        raise
    except Exception as error:  # sizes that are right one by one and wrong together; torch says so in many ways
        raise ConfigError(
            f"{where} does not describe a network of its architecture {cls.__name__!r}: {error!r}; restore the file "
            "from the checkpoint"
        ) from error
