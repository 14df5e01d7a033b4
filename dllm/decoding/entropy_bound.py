"""As many positions per step as an entropy budget allows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal
from dllm.decoding.confidence import masked_confidence, masked_statistic
from dllm.decoding.select_then_sample import draw_and_reveal


def negative_entropy(logits: Tensor) -> Tensor:
    """sum p log p of float [m, V] over the whole vocabulary at temperature 1, in nats: float32 [m]."""
    logp = logits.float().log_softmax(-1)
    return (logp.exp() * logp.clamp(min=-1e4)).sum(-1)


class EntropyBound:
    """Reveal positions in order of entropy while the entropies of all but the last add up to at most ``gamma``.

    The dependence that drawing them independently ignores is then at most ``gamma`` nats (Ben-Hamu et al.,
    "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking", 2025, section 3). With 0 it
    reveals one token per step.
    """

    options: ClassVar[dict[str, Any]] = {"gamma": 0.1}

    def __init__(self, mask_id: int, gamma: float = 0.1) -> None:
        if gamma < 0:
            raise ValueError(f"gamma={gamma} is negative; it is a budget in nats")
        self.mask_id = mask_id
        self.gamma = gamma

    def max_steps(self, block_size: int) -> int:
        return block_size + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        chosen = self._within_budget(blocks, logits)
        return draw_and_reveal(blocks, logits, self.mask_id, chosen, confidence)

    def _within_budget(self, blocks: BlockBatch, logits: Tensor) -> Tensor:
        certainty = masked_statistic(blocks.ids, logits, self.mask_id, negative_entropy)
        ordered, order = certainty.sort(dim=1, descending=True, stable=True)
        hidden = ordered > -torch.inf
        entropy = torch.where(hidden, -ordered, 0.0)
        before = entropy.cumsum(1) - entropy
        # The first one is always taken, whatever rounding makes of the sum before it.
        before[:, 0] = 0.0
        return torch.zeros_like(hidden).scatter_(1, order, (before <= self.gamma) & hidden)
