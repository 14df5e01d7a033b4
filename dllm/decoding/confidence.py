"""Confidence of hidden positions and the rule that picks which of them to reveal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS_PER_CHUNK = 512
"""Rows of the vocabulary in one piece of work. A row of LLaDA2's is 0.6 MB in fp32, so a piece stays below 400 MB."""


def masked_statistic(ids: Tensor, logits: Tensor, mask_id: int, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    """A number for every hidden position.

    Args:
        ids: int64 [n, B].
        logits: float [n, B, V].
        statistic: of logits [m, V], float32 [m].

    Returns:
        float32 [n, B], -inf where a position is not hidden.
    """
    hidden = ids == mask_id
    values = [statistic(chunk) for chunk in logits[hidden].split(ROWS_PER_CHUNK)]
    result = torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=ids.device)
    if values:
        result[hidden] = torch.cat(values)
    return result


def masked_confidence(ids: Tensor, logits: Tensor, mask_id: int) -> Tensor:
    """Largest probability at every hidden position, at temperature 1 over the whole vocabulary.

    The mask token is part of this softmax, as in SGLang's LowConfidence: the schedule is a statistic of the
    model and must not depend on the sampling parameters.

    Returns:
        float32 [n, B], -inf where a position is not hidden, NaN where its logits are NaN or infinite.
    """
    return masked_statistic(ids, logits, mask_id, lambda rows: rows.float().softmax(-1).amax(-1))


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


def best(confidence: Tensor, count: int) -> Tensor:
    """The ``count`` most confident hidden positions (first of equals), or all there are: bool [n, B]."""
    order = confidence.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(1, order, True) & (confidence > -torch.inf)


def failed_rows(confidence: Tensor) -> Tensor:
    """bool [n]: some hidden position of the row has NaN confidence, that is NaN or infinite logits."""
    return confidence.isnan().any(1)
