"""Parts that the models share: norm, rotary embedding, gated MLP, fused experts, the gap of a top-k choice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """cos and sin float32 [..., dim / 2] of rotary embeddings at ``position``.

    Every layer makes its own: handed from outside, FSDP's mixed precision would round them to bf16 in the forward pass
    and not in the recomputation of a checkpointed one.
    """
    frequency = theta ** (-torch.arange(0, dim, 2, device=position.device, dtype=torch.float32) / dim)
    angle = position[..., None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading ``2 * cos.shape[-1]`` features (first half with second half), leave the rest."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts of a layer, fused: gate_up_proj [E, 2I, H] (gate rows first), down_proj [E, H, I]."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
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


def selection_gap(scores: Tensor, k: int) -> Tensor:
    """Distance between the last of the top k and the first behind it, +inf if nothing is behind it: [n]."""
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:1], torch.inf, device=scores.device)
    best = scores.topk(k + 1, dim=-1).values
    return best[:, k - 1] - best[:, k]
