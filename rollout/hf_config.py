"""LLaDA2's configuration class for transformers, so that a checkpoint loads without running its remote code.

Imported only where transformers is loaded anyway.
"""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig


class LLaDA2MoeConfig(PretrainedConfig):
    """Every key of config.json becomes an attribute."""

    model_type = "llada2_moe"


def register_llada2_config() -> None:
    """Make ``AutoConfig`` know ``model_type: llada2_moe``; harmless if it already does."""
    AutoConfig.register("llada2_moe", LLaDA2MoeConfig, exist_ok=True)
