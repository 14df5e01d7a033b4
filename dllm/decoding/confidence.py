"""Confidence of hidden positions and the rule that picks which of them to reveal."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of one softmax. A row of LLaDA2's vocabulary is 0.6 MB in fp32, so a chunk stays below 400 MB.
_CHUNK = 512


def masked_confidence(ids: Tensor, logits: Tensor, mask_id: int) -> Tensor:
    """Largest probability at every hidden position, at temperature 1 over the whole vocabulary.

    The mask token is part of this softmax, as in SGLang's LowConfidence: the schedule is a statistic of the
    model and must not depend on the sampling parameters.

    Args:
        ids: int64 [n, B].
        logits: float [n, B, V].

    Returns:
        float32 [n, B], -inf where a position is not hidden, NaN where its logits are NaN or infinite.
    """
    hidden = ids == mask_id
    rows = logits[hidden]
    best = [chunk.float().softmax(-1).amax(-1) for chunk in rows.split(_CHUNK)]
    confidence = torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=ids.device)
    if best:
        confidence[hidden] = torch.cat(best)
    return confidence


def above_threshold_or_best(confidence: Tensor, threshold: float) -> Tensor:
    """Hidden positions above the threshold, or the single most confident one (first of equals).

    Args:
        confidence: float32 [n, B], -inf where a position is not hidden.

    Returns:
        bool [n, B]; all False in rows without a hidden position.
    """
    chosen = confidence > threshold
    best = torch.zeros_like(chosen).scatter_(1, confidence.argmax(1, keepdim=True), True)
    chosen = torch.where(chosen.any(1, keepdim=True), chosen, best)
    return chosen & (confidence > -torch.inf)


def failed_rows(confidence: Tensor) -> Tensor:
    """bool [n]: some hidden position of the row has NaN confidence, that is NaN or infinite logits."""
    return confidence.isnan().any(1)
