"""LLaDA2-MoE with Hugging Face weight names and attention over packed states.

Architecture (inclusionAI/LLaDA2.0-mini, config.json): pre-norm blocks, grouped-query attention with QK norm
and partial RoPE, a dense first layer, then mixtures of experts with a sigmoid group-limited router, a bias that
steers the choice of experts only, and a shared expert. Experts are stored fused (``experts.gate_up_proj``
[E, 2I, H] and ``experts.down_proj`` [E, H, I]); ``dllm.models.checkpoint`` converts to and from the published
per-expert tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.attention import Attention
from dllm.config import ConfigError
from dllm.models.base import BlockDiffusionLM, Router, shape_values
from dllm.models.layers import MLP, Experts, RMSNorm, rotary_tables, rotate, selection_gap


@dataclass(frozen=True)
class LLaDA2Config:
    """The keys of config.json that shape the network, under their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_group: int
    topk_group: int
    num_shared_experts: int = 1
    first_k_dense_replace: int = field(default=1, metadata={"least": 0})
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    partial_rotary_factor: float = 0.5
    rope_theta: float = 600000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LLaDA2Config:
        """Read a published config.json.

        Raises:
            ConfigError: a needed key is missing or cannot be right, or a feature is asked for that this model does not
                have.
        """
        for key, only in (
            ("score_function", "sigmoid"),
            ("hidden_act", "silu"),
            ("use_bias", False),
            ("use_qkv_bias", False),
            ("use_qk_norm", True),
            ("tie_word_embeddings", False),
            ("norm_head", False),
            ("rope_scaling", None),
            ("moe_router_enable_expert_bias", True),
        ):
            if config.get(key, only) != only:
                raise ConfigError(f"config.json {key}={config[key]!r} is not supported; LLaDA2 has {only!r}")
        try:
            result = cls(**shape_values(cls, config))
        except TypeError as error:
            raise ConfigError(f"config.json is not a complete LLaDA2 configuration: {error}") from error
        if result.num_experts % result.n_group or not 0 < result.topk_group <= result.n_group:
            raise ConfigError(
                f"config.json n_group={result.n_group}, topk_group={result.topk_group} do not divide "
                f"num_experts={result.num_experts} into groups"
            )
        if result.num_experts_per_tok > (allowed := result.num_experts // result.n_group * result.topk_group):
            raise ConfigError(
                f"config.json num_experts_per_tok={result.num_experts_per_tok} is more than the {allowed} experts of "
                f"topk_group={result.topk_group} groups"
            )
        if result.partial_rotary_factor > 1:
            raise ConfigError(f"config.json partial_rotary_factor={result.partial_rotary_factor} is more than 1")
        return result

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class SelfAttention(nn.Module):
    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.rotary = config.rotary_dim, config.rope_theta
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=False)
        self.dense = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, position: Tensor, attention: Attention) -> Tensor:
        rows, length, _ = x.shape
        packed = self.query_key_value(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        query, key, value = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos, sin = (table[:, None] for table in rotary_tables(position, *self.rotary))
        query = rotate(self.query_layernorm(query), cos, sin)
        key = rotate(self.key_layernorm(key), cos, sin)
        out = attention(query, key, value.contiguous(), self.head_dim**-0.5)
        return self.dense(out.transpose(1, 2).reshape(rows, length, -1))


class SigmoidRouter(Router):
    """Sigmoid scores; the choice is by score + bias, limited to the best groups; the weights are the scores."""

    fp32 = True
    expert_bias: Tensor

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, H] -> expert ids int64 [n, k] and their weights float32 [n, k]."""
        c = self.config
        # The engine computes the gate in fp32 and rounds its logits to the activations' dtype; so do we.
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float()).to(x.dtype)
        scores = logits.float().sigmoid()
        choice = scores.detach() + self.expert_bias
        grouped = choice.view(len(x), c.n_group, -1)
        group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        groups = group_score.topk(c.topk_group, dim=-1).indices
        allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, groups, True)
        limited = choice.masked_fill(~allowed.repeat_interleave(grouped.shape[-1], 1), -torch.inf)
        experts = limited.topk(c.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.record_gap:
            self.gap = torch.minimum(
                selection_gap(limited, c.num_experts_per_tok), selection_gap(group_score, c.topk_group)
            )
        return experts, weights * c.routed_scaling_factor


class MoE(nn.Module):
    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.gate = SigmoidRouter(config)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        routed = self.experts(flat, *self.gate(flat))
        return routed.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: LLaDA2Config, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = index < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def forward(self, x: Tensor, position: Tensor, attention: Attention) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), position, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LLaDA2MoeModelLM(BlockDiffusionLM):
    """LLaDA2.0, LLaDA2.0-CAP and LLaDA2.1, mini and flash: one architecture, other weights."""

    fp32_suffixes = ("mlp.gate.weight", "mlp.gate.expert_bias")
    embedding = "word_embeddings"
    layer_class = Layer

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.shape = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LLaDA2MoeModelLM:
        return cls(LLaDA2Config.from_hf(config))
