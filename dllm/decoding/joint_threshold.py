"""Editing decoder of LLaDA2.1: hidden positions are filled, and tokens of the block may be replaced afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal
from dllm.decoding.confidence import ROWS_PER_CHUNK, masked_confidence
from dllm.decoding.select_then_sample import draw_and_reveal

# Value of the counter of a finished block; more than any edit budget.
_FINISHED = 1 << 40


class JointThreshold:
    """Mask-to-token by select-then-sample, token-to-token by argmax (LLaDA2.1 report, equations 1 to 3).

    A step fills hidden positions whose confidence is above ``threshold`` (else the most confident one), drawing their
    tokens, and replaces revealed tokens of the block by the model's argmax where that has a probability above
    ``edit_threshold``. A block ends with the first step that changes nothing, or when ``max_post_edit_steps`` steps
    have passed without a hidden position. Edits are deterministic, so the log-prob of a trajectory is the sum over the
    drawn tokens, edited away or not.

    At temperature 0 it equals SGLang's JointThreshold token for token, except where that one would write the mask
    token. Training takes ``edit_threshold`` 0.9 unless it is set: at low thresholds the edits undo what sampling
    explored.
    """

    options: ClassVar[dict[str, Any]] = {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edit_steps": 16}
    rl_options: ClassVar[dict[str, Any]] = {"edit_threshold": 0.9}
    edits = True

    def __init__(
        self, mask_id: int, threshold: float = 0.5, edit_threshold: float = 0.0, max_post_edit_steps: int = 16
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} is not in (0, 1]; LLaDA2.1 uses 0.5 to 0.7")
        if not 0 <= edit_threshold <= 1:
            raise ValueError(f"edit_threshold={edit_threshold} is not in [0, 1]; use 0.9 or more for RL")
        if max_post_edit_steps < 0:
            raise ValueError(f"max_post_edit_steps={max_post_edit_steps} is negative; 0 switches post-edits off")
        self.mask_id = mask_id
        self.threshold = threshold
        self.edit_threshold = edit_threshold
        self.max_post_edit_steps = max_post_edit_steps

    def max_steps(self, block_size: int) -> int:
        return block_size + self.max_post_edit_steps + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        hidden = blocks.ids == self.mask_id
        complete = ~hidden.any(1)
        counter = blocks.counter + complete.long()
        exhausted = complete & (counter > self.max_post_edit_steps)
        chosen = above_or_top(confidence, self.threshold)
        result = draw_and_reveal(blocks, logits, self.mask_id, chosen, confidence)
        editable = ~hidden & ~blocks.given & ~(exhausted | result.failed)[:, None]
        edited = self._edits(blocks.ids, logits, editable)
        result.ids = torch.where(editable, edited, result.ids)
        result.done = (result.ids == blocks.ids).all(1) & complete
        result.counter = torch.where(result.done, _FINISHED, counter)
        return result

    def _edits(self, ids: Tensor, logits: Tensor, editable: Tensor) -> Tensor:
        """The block (int64 [n, B]) with every editable token replaced that the model is sure to replace."""
        row, column = editable.nonzero(as_tuple=True)
        result = ids.clone()
        for part in torch.arange(len(row), device=row.device).split(ROWS_PER_CHUNK):
            r, c = row[part], column[part]
            scores = logits[r, c].float()
            token = scores.argmax(-1)
            probability = scores.softmax(-1).gather(-1, token[:, None])[:, 0]
            sure = (probability > self.edit_threshold) & (token != self.mask_id)
            result[r, c] = torch.where(sure, token, ids[r, c])
        return result


def above_or_top(confidence: Tensor, threshold: float) -> Tensor:
    """Hidden positions above the threshold, or the one that ``topk`` returns, as SGLang's JointThreshold picks it.

    ``topk`` and ``argmax`` may break ties differently.
    """
    chosen = confidence > threshold
    top = torch.zeros_like(chosen).scatter_(1, confidence.topk(1, dim=1).indices, True)
    return torch.where(chosen.any(1, keepdim=True), chosen, top) & (confidence > -torch.inf)
