"""A fixed number of tokens per denoise step, the most confident first."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal
from dllm.decoding.confidence import best, masked_confidence
from dllm.decoding.select_then_sample import draw_and_reveal


class StaticSteps:
    """Reveal the ``tokens_per_step`` most confident positions, drawing tokens there.

    With 1 it is the slowest schedule of a model and usually its most accurate one.
    """

    options: ClassVar[dict[str, Any]] = {"tokens_per_step": 1}

    def __init__(self, mask_id: int, tokens_per_step: int = 1) -> None:
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={tokens_per_step} is not positive; 1 reveals one token per step")
        self.mask_id = mask_id
        self.tokens_per_step = tokens_per_step

    def max_steps(self, block_size: int) -> int:
        return -(-block_size // self.tokens_per_step) + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        chosen = best(confidence, self.tokens_per_step)
        return draw_and_reveal(blocks, logits, self.mask_id, chosen, confidence)
