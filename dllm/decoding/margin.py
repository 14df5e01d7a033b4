"""Positions by the margin between the two most probable tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal
from dllm.decoding.confidence import above_threshold_or_best, masked_confidence, masked_statistic
from dllm.decoding.select_then_sample import draw_and_reveal


def margin(logits: Tensor) -> Tensor:
    """Difference of the two largest probabilities of float [m, V] at temperature 1: float32 [m]."""
    first, second = logits.float().softmax(-1).topk(2, dim=-1).values.unbind(-1)
    return first - second


class Margin:
    """Reveal positions whose margin is above ``threshold``, else the one with the largest margin.

    A position with two good candidates waits, however probable the first is (Kim et al., "Train for the Worst, Plan
    for the Best", 2025, section 4: top probability margin).
    """

    options: ClassVar[dict[str, Any]] = {"threshold": 0.9}

    def __init__(self, mask_id: int, threshold: float = 0.9) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} is not in (0, 1]; it is a difference of probabilities")
        self.mask_id = mask_id
        self.threshold = threshold

    def max_steps(self, block_size: int) -> int:
        return block_size + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        margins = masked_statistic(blocks.ids, logits, self.mask_id, margin)
        chosen = above_threshold_or_best(margins, self.threshold)
        return draw_and_reveal(blocks, logits, self.mask_id, chosen, confidence)
