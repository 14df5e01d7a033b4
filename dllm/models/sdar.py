"""SDAR, dense and mixture of experts, with Hugging Face weight names and attention over packed states.

Architecture (JetLM/SDAR-8B-Chat and SDAR-30B-A3B-Chat, config.json): Qwen3's blocks, that is pre-norm, grouped-query
attention with QK norm and full RoPE, a gated MLP or, in every layer, experts with a softmax router. Only attention
differs from Qwen3: a block sees itself in both directions. Tokens are predicted at their own position, without the
shift of an autoregressive model (Cheng et al., "SDAR", 2025, section 3; the published ``generate.py``). TraDo has
the same architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.attention import Attention
from dllm.config import ConfigError
from dllm.models.base import BlockDiffusionLM, Router, shape_values
from dllm.models.layers import MLP, Experts, RMSNorm, rotary_tables, rotate, selection_gap


@dataclass(frozen=True)
class SDARConfig:
    """The keys of config.json that shape the network, under their published names; 0 experts is a dense model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], moe: bool) -> SDARConfig:
        """Read a published config.json.

        Raises:
            ConfigError: a needed key is missing or cannot be right, or a feature is asked for that this model does not
                have.
        """
        for key, only in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            # Stock SGLang cannot load a checkpoint with tied embeddings into its SDAR classes.
            ("tie_word_embeddings", False),
            ("use_sliding_window", False),
            ("rope_scaling", None),
            ("decoder_sparse_step", 1),
            ("mlp_only_layers", []),
        ):
            if config.get(key, only) != only:
                raise ConfigError(f"config.json {key}={config[key]!r} is not supported; SDAR has {only!r}")
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        values = shape_values(cls, config if moe else {key: v for key, v in config.items() if key not in experts})
        try:
            if moe and (missing := [key for key in experts if key not in values]):
                raise TypeError(f"missing {missing}")
            result = cls(**values)
        except TypeError as error:
            raise ConfigError(f"config.json is not a complete SDAR configuration: {error}") from error
        if moe and not 0 < result.num_experts_per_tok <= result.num_experts:
            raise ConfigError(
                f"config.json num_experts_per_tok={result.num_experts_per_tok} is not in 1 to "
                f"num_experts={result.num_experts}"
            )
        return result

    @property
    def rotary_dim(self) -> int:
        return self.head_dim


class SelfAttention(nn.Module):
    def __init__(self, config: SDARConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = config.rotary_dim, config.rope_theta
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, position: Tensor, attention: Attention) -> Tensor:
        rows, length, _ = x.shape
        by_head = lambda projected: projected.view(rows, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = (table[:, None] for table in rotary_tables(position, *self.rotary))
        query = rotate(self.q_norm(by_head(self.q_proj(x))), cos, sin)
        key = rotate(self.k_norm(by_head(self.k_proj(x))), cos, sin)
        out = attention(query, key, by_head(self.v_proj(x)).contiguous(), self.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class SoftmaxRouter(Router):
    """The experts with the largest logits, weighted by their softmax probability.

    Unlike LLaDA2's router it computes in the dtype of the model, as the engine's does.
    """

    def __init__(self, config: SDARConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, H] -> expert ids int64 [n, k] and their weights float32 [n, k]."""
        k = self.config.num_experts_per_tok
        logits = F.linear(x, self.weight).float()
        weights, experts = logits.softmax(-1).topk(k, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.record_gap:
            # Of logits, not of probabilities: these get smaller with the number of experts.
            self.gap = selection_gap(logits.detach(), k)
        return experts, weights


class MoE(nn.Module):
    def __init__(self, config: SDARConfig) -> None:
        super().__init__()
        self.gate = SoftmaxRouter(config)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self.experts(flat, *self.gate(flat)).view_as(x)


class Layer(nn.Module):
    def __init__(self, config: SDARConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if config.num_experts else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, position: Tensor, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: SDARConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SDARForCausalLM(BlockDiffusionLM):
    """SDAR 1.7B, 4B and 8B, and TraDo."""

    embedding = "embed_tokens"
    layer_class = Layer
    moe = False

    def __init__(self, config: SDARConfig) -> None:
        super().__init__()
        self.shape = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> SDARForCausalLM:
        return cls(SDARConfig.from_hf(config, cls.moe))


class SDARMoeForCausalLM(SDARForCausalLM):
    """SDAR 30B-A3B: every layer is a mixture of experts."""

    moe = True
