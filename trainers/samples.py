"""A table of rollouts for Weights & Biases: what the policy says, beside what it gets for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    "step",
    "prompt",
    "response",
    "ground_truth",
    "reward",
    "tokens",
    "steps",
    "confidence",
    "finish_reason",
    "weight_version",
)
"""Columns of the table; ``steps`` are denoise steps, ``confidence`` is the mean over visible tokens."""


def chosen(lines: Sequence[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]]:
    """At most ``limit`` lines, evenly spread over the step, so that they are of many prompts."""
    count = min(limit, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def sample_rows(lines: Sequence[Mapping[str, Any]], limit: int) -> list[list[Any]]:
    """Rows of the table, in the order of ``COLUMNS``."""
    return [
        [
            line["step"],
            line["input"],
            line["output"],
            str(line["ground_truth"]),
            line["reward"],
            len(line["output_ids"]),
            sum(line["steps_per_block"]),
            sum(line["confidence"]) / max(1, len(line["confidence"])),
            line["finish_reason"],
            str(line["weight_version"]),
        ]
        for line in chosen(lines, limit)
    ]


def log_samples(tracking: Any, lines: Sequence[Mapping[str, Any]], limit: int, step: int) -> None:
    """Log the table ``rollouts`` of a step, if verl's ``Tracking`` logs to Weights & Biases."""
    wandb = tracking.logger.get("wandb")
    if wandb is not None and limit > 0 and lines:
        wandb.log({"rollouts": wandb.Table(columns=list(COLUMNS), data=sample_rows(lines, limit))}, step=step)
