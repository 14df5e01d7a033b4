"""Shapes of published models, as far as an estimate of memory needs them: from their config.json on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LLADA2: dict[str, Any] = dict(
    architectures=["LLaDA2MoeModelLM"],
    dtype="bfloat16",
    vocab_size=157184,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    num_shared_experts=1,
    first_k_dense_replace=1,
)
_SDAR: dict[str, Any] = dict(
    architectures=["SDARForCausalLM"],
    dtype="bfloat16",
    vocab_size=151936,
    num_attention_heads=32,
    head_dim=128,
    rope_theta=1e6,
    max_position_embeddings=32768,
)


@dataclass(frozen=True)
class Published:
    """One model: its block size and the keys of its config.json that give the network its size."""

    block_size: int
    config: Mapping[str, Any]


PUBLISHED: Mapping[str, Published] = {
    "inclusionAI/LLaDA2.0-mini": Published(
        32,
        _LLADA2
        | dict(
            hidden_size=2048,
            intermediate_size=5120,
            moe_intermediate_size=512,
            num_hidden_layers=20,
            num_attention_heads=16,
            max_position_embeddings=32768,
        ),
    ),
    "inclusionAI/LLaDA2.0-flash": Published(
        32,
        _LLADA2
        | dict(
            hidden_size=4096,
            intermediate_size=9216,
            moe_intermediate_size=1024,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=16384,
        ),
    ),
    "JetLM/SDAR-4B-Chat": Published(
        4, _SDAR | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_key_value_heads=8)
    ),
    "JetLM/SDAR-8B-Chat": Published(
        4, _SDAR | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8)
    ),
    "JetLM/SDAR-30B-A3B-Chat": Published(
        4,
        _SDAR
        | dict(
            architectures=["SDARMoeForCausalLM"],
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_key_value_heads=4,
        ),
    ),
}
"""By repository on the hub."""
