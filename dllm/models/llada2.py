"""LLaDA2-MoE with Hugging Face weight names and attention over packed states.

Architecture (inclusionAI/LLaDA2.0-mini, config.json): pre-norm blocks, grouped-query attention with QK norm
and partial RoPE, a dense first layer, then mixtures of experts with a sigmoid group-limited router, a bias that
steers the choice of experts only, and a shared expert. Experts are stored fused (``experts.gate_up_proj``
[E, 2I, H] and ``experts.down_proj`` [E, H, I]); ``dllm.models.checkpoint`` converts to and from the published
per-expert tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.attention import Attention
from dllm.config import ConfigError

T = TypeVar("T")


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
    first_k_dense_replace: int = 1
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
            ConfigError: a needed key is missing, or a feature is asked for that this model does not have.
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
        values = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        rope = config.get("rope_parameters") or {}
        values.update({key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope})
        try:
            result = cls(**values)
        except TypeError as error:
            raise ConfigError(f"config.json is not a complete LLaDA2 configuration: {error}") from error
        if result.num_experts % result.n_group or not 0 < result.topk_group <= result.n_group:
            raise ConfigError(
                f"config.json n_group={result.n_group}, topk_group={result.topk_group} do not divide "
                f"num_experts={result.num_experts} into groups"
            )
        return result

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


def rotary_tables(position: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [..., dim / 2] of rotary embeddings at ``position``."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=position.device, dtype=torch.float32) / dim)
    angle = position[..., None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading ``2 * cos.shape[-1]`` features (first half with second half), leave the rest."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


class SelfAttention(nn.Module):
    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=False)
        self.dense = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        rows, length, _ = x.shape
        packed = self.query_key_value(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        query, key, value = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos, sin = (table[:, None] for table in rotary)
        query = rotate(self.query_layernorm(query), cos, sin)
        key = rotate(self.key_layernorm(key), cos, sin)
        out = attention(query, key, value.contiguous(), self.head_dim**-0.5)
        return self.dense(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the choice is by score + bias, limited to the best groups; the weights are the scores."""

    expert_bias: Tensor

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.record_gap = False
        self.gap: Tensor | None = None

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


def selection_gap(scores: Tensor, k: int) -> Tensor:
    """Distance between the last of the top k and the first behind it, +inf if nothing is behind it: [n]."""
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:1], torch.inf, device=scores.device)
    best = scores.topk(k + 1, dim=-1).values
    return best[:, k - 1] - best[:, k]


class Experts(nn.Module):
    """All experts of a layer, fused: gate_up_proj [E, 2I, H] (gate rows first), down_proj [E, H, I]."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        count, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [n, H], expert ids [n, k], weights [n, k] -> [n, H]."""
        tokens, k = experts.shape
        order = experts.reshape(-1).argsort(stable=True)
        counts = torch.bincount(experts.reshape(-1), minlength=len(self.down_proj))
        sorted_x = x[order // k]
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = torch._grouped_mm(sorted_x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
            out = torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        else:
            pieces = []
            for index, chunk in enumerate(sorted_x.split(counts.tolist())):
                if len(chunk):
                    gate, up = F.linear(chunk, self.gate_up_proj[index]).chunk(2, -1)
                    pieces.append(F.linear(F.silu(gate) * up, self.down_proj[index]))
            out = torch.cat(pieces)
        unsorted = torch.empty_like(out).index_copy(0, order, out)
        return (unsorted.view(tokens, k, -1).float() * weights[..., None]).sum(1).to(x.dtype)


class MoE(nn.Module):
    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
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

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), rotary, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LLaDA2MoeModelLM(nn.Module):
    """The network; ``state_dict`` has Hugging Face names with fused experts."""

    layer_class = Layer

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.shape = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.checkpoint_layers = False

    def forward(
        self, input_ids: Tensor, position: Tensor, attention: Attention, head: Callable[[Tensor, nn.Linear], T]
    ) -> T:
        """Run the network over packed states.

        Args:
            input_ids, position: int64 [rows, L].
            attention: who sees whom (see ``dllm.attention``).
            head: called as ``head(hidden [rows, L, H], lm_head)`` inside the forward pass, because under FSDP
                the head's weights exist only there; its result is returned.
        """
        rotary = rotary_tables(position, self.shape.rotary_dim, self.shape.rope_theta)
        x = self.model.word_embeddings(input_ids)
        for layer in self.model.layers:
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(layer, x, rotary, attention, use_reentrant=False)
            else:
                x = layer(x, rotary, attention)
        return head(self.model.norm(x), self.lm_head)

    def record_router_gaps(self, record: bool) -> None:
        """Keep the selection gaps of the next forward pass (see ``router_gap``)."""
        for module in self.modules():
            if isinstance(module, Router):
                module.record_gap, module.gap = record, None

    def router_gap(self) -> Tensor:
        """Smallest gap over all layers of the last forward pass: float [rows * L].

        A gap is the distance between the last expert (or group) chosen and the first one not chosen. Below
        about 1e-5 two correct fp32 implementations may choose differently.
        """
        gaps = [m.gap for m in self.modules() if isinstance(m, Router) and m.gap is not None]
        return torch.stack(gaps).amin(0)


@torch.no_grad()
def init_weights(model: LLaDA2MoeModelLM, seed: int, head_std: float | None = None) -> None:
    """Draw fresh weights: 1 / sqrt(fan in) for matrices, 1 for norms, 0 for the expert bias."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        std = parameter.shape[-1] ** -0.5
        if name == "lm_head.weight" and head_std is not None:
            std = head_std
        if name.endswith("word_embeddings.weight"):
            std = 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
