"""Configuration classes for transformers, so that a checkpoint loads without running its remote code.

Imported only where transformers is loaded anyway.
"""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig


class LLaDA2MoeConfig(PretrainedConfig):
    """Every key of config.json becomes an attribute."""

    model_type = "llada2_moe"


class SDARConfig(PretrainedConfig):
    """Every key of config.json becomes an attribute."""

    model_type = "sdar"


class SDARMoeConfig(PretrainedConfig):
    """Every key of config.json becomes an attribute."""

    model_type = "sdar_moe"


def register_configs() -> None:
    """Make ``AutoConfig`` know the model types of ``dllm.models``; harmless if it already does."""
    for cls in (LLaDA2MoeConfig, SDARConfig, SDARMoeConfig):
        AutoConfig.register(cls.model_type, cls, exist_ok=True)
