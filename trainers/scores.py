"""Held-out accuracy: how answers are scored and summed up, in warm starts, in validation and in evaluation alike."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.rewards import compute_score

Score = Mapping[str, float]
"""``acc`` and ``malformed`` of one answer (see ``trainers.rewards.compute_score``)."""

Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class ScoreSummary:
    """What the answers to m prompts, n each, are worth.

    Attributes:
        accuracy: share of right answers.
        accuracy_low, accuracy_high: 95 % interval of the accuracy over prompts. Answers to one prompt are not
            independent, so n of them count as one prompt: for n > 1 the interval is on the safe side.
        malformed: share of answers that are not in the task's format.
        pass_at_n: share of prompts with at least one right answer.
        prompts, answers: how many there were.
    """

    accuracy: float
    accuracy_low: float
    accuracy_high: float
    malformed: float
    pass_at_n: float
    prompts: int
    answers: int


def wilson_interval(share: float, count: int, z: float = Z95) -> tuple[float, float]:
    """Interval of a proportion (Wilson, "Probable inference, the law of succession, and statistical inference", 1927).

    Unlike the normal approximation it stays within 0 and 1, and has a width where ``share`` is 0 or 1.

    Args:
        share: observed proportion.
        count: independent observations, at least 1.
        z: quantile of the normal distribution.
    """
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"no interval for a share of {share} of {count} observations")
    spread = z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    # At the ends the bound is the share itself, up to rounding.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def score_answer(row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score of one answer to a row of a parquet file in verl's format."""
    return compute_score(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])


def summarise_scores(scores: Sequence[Score], prompts: Sequence[Hashable]) -> ScoreSummary:
    """Sum up scored answers.

    Args:
        scores: one per answer.
        prompts: what tells apart the prompts, one per answer.

    Raises:
        ValueError: there are no answers.
    """
    if not scores:
        raise ValueError("there are no answers to sum up")
    right: dict[Hashable, bool] = {}
    for score, prompt in zip(scores, prompts, strict=True):
        right[prompt] = right.get(prompt, False) or score["acc"] == 1.0
    accuracy = sum(score["acc"] for score in scores) / len(scores)
    low, high = wilson_interval(accuracy, len(right))
    return ScoreSummary(
        accuracy=accuracy,
        accuracy_low=low,
        accuracy_high=high,
        malformed=sum(score["malformed"] for score in scores) / len(scores),
        pass_at_n=sum(right.values()) / len(right),
        prompts=len(right),
        answers=len(scores),
    )
