"""Choose positions by a token-independent statistic, then draw tokens there.

The default of RL: positions are a deterministic function of weights and state, so the sum of the logged token
log-probs *is* the trajectory log-prob, and every final sequence has exactly one trajectory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal, draw_at
from dllm.decoding.confidence import above_threshold_or_best, failed_rows, masked_confidence


class SelectThenSample:
    """Reveal what is above ``threshold``, else the most confident position; sample tokens there only.

    At temperature 0 it equals SGLang's LowConfidence token for token, except where that one would write the
    mask token itself.
    """

    options: ClassVar[dict[str, Any]] = {"threshold": 0.95}

    def __init__(self, mask_id: int, threshold: float = 0.95) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} is not in (0, 1]; LLaDA2 uses 0.95")
        self.mask_id = mask_id
        self.threshold = threshold

    def max_steps(self, block_size: int) -> int:
        return block_size + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        chosen = above_threshold_or_best(confidence, self.threshold)
        return draw_and_reveal(blocks, logits, self.mask_id, chosen, confidence)


class LowConfidence(SelectThenSample):
    """SGLang's LowConfidence: the same schedule with the argmax at every revealed position.

    Deterministic whatever the request's temperature; logged log-probs are 0.
    """

    greedy = True

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        return super().step(replace(blocks, sampling=blocks.sampling.as_greedy()), logits)


def draw_and_reveal(blocks: BlockBatch, logits: Tensor, mask_id: int, chosen: Tensor, confidence: Tensor) -> Reveal:
    """Draw tokens at ``chosen`` (bool [n, B]), which does not depend on the draws; rows that failed are left alone.

    Args:
        confidence: float32 [n, B], see ``masked_confidence``.
    """
    failed = failed_rows(confidence)
    chosen = chosen & ~failed[:, None]
    return reveal(blocks, mask_id, chosen, *draw_at(blocks, logits, chosen, mask_id), confidence, failed)


def reveal(
    blocks: BlockBatch,
    mask_id: int,
    chosen: Tensor,
    token: Tensor,
    logprob: Tensor,
    logprob_raw: Tensor,
    confidence: Tensor,
    failed: Tensor,
) -> Reveal:
    """Assemble a ``Reveal`` from the m drawn tokens at ``chosen`` (bool [n, B])."""

    def scatter(values: Tensor) -> Tensor:
        return torch.zeros(chosen.shape, dtype=torch.float32, device=values.device).masked_scatter(chosen, values)

    return Reveal(
        ids=blocks.ids.masked_scatter(chosen, token),
        revealed=chosen,
        logprob=scatter(logprob),
        logprob_raw=scatter(logprob_raw),
        confidence=confidence,
        done=~(blocks.ids == mask_id).any(1),
        failed=failed,
        counter=blocks.counter,
    )
