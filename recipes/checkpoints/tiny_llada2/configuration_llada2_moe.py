"""Configuration of LLaDA2-MoE for transformers; a copy lies in every checkpoint directory this project writes."""

from transformers import PretrainedConfig


class LLaDA2MoeConfig(PretrainedConfig):
    """Keeps every key of config.json as an attribute; the file names them all, so there are no defaults here."""

    model_type = "llada2_moe"
