"""Sub-blocks from left to right inside the block."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal
from dllm.decoding.confidence import above_threshold_or_best, masked_confidence
from dllm.decoding.select_then_sample import draw_and_reveal


class FastDLLMv2:
    """Select-then-sample inside the first sub-block that still has hidden positions (Wu et al., "Fast-dLLM v2", 2025).

    The whole block is computed at every step. The original's cache of the block's other sub-blocks makes logits depend
    on the order of earlier reveals, so no replay could rebuild them: ``use_block_cache`` is refused.
    """

    options: ClassVar[dict[str, Any]] = {"threshold": 0.9, "sub_block_size": 8, "use_block_cache": False}

    def __init__(
        self, mask_id: int, threshold: float = 0.9, sub_block_size: int = 8, use_block_cache: bool = False
    ) -> None:
        if use_block_cache:
            raise ValueError(
                "use_block_cache=True would reuse keys and values of the block from earlier steps: logits then depend "
                "on the history of the block, not on its state, and no replay has them; leave it out"
            )
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} is not in (0, 1]; Fast-dLLM v2 uses 0.9")
        if sub_block_size < 1:
            raise ValueError(f"sub_block_size={sub_block_size} is not positive; Fast-dLLM v2 uses 8")
        self.mask_id = mask_id
        self.threshold = threshold
        self.sub_block_size = sub_block_size

    def max_steps(self, block_size: int) -> int:
        return block_size + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        eligible = torch.where(self._active(blocks.ids), confidence, -torch.inf)
        chosen = above_threshold_or_best(eligible, self.threshold)
        return draw_and_reveal(blocks, logits, self.mask_id, chosen, confidence)

    def _active(self, ids: Tensor) -> Tensor:
        """bool [n, B]: positions of the first sub-block with a hidden one."""
        first = (ids == self.mask_id).int().argmax(1, keepdim=True)
        column = torch.arange(ids.shape[1], device=ids.device)
        return column // self.sub_block_size == first // self.sub_block_size
