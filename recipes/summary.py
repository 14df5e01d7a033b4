"""``summary.json`` of a run, computed from what the run wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.console import validation_accuracy
from recipes.host import host_report, package_versions
from recipes.plot import plot_run
from recipes.records import read_metrics, read_rollouts
from trainers.metrics import difference_summary, group_diversity, logprob_differences, replay_field

if TYPE_CHECKING:
    from recipes.compose import ResolvedRun


PARTS = {
    "rollout": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "advantages": "timing_s/adv",
    "update": "timing_s/update_actor",
    "weight refresh": "timing_s/update_weights",
    "step": "timing_s/step",
}
"""Parts of a step and verl's names for them; the rewards are within the rollout."""

REWARD = "rollout/reward_seconds/max"


def step_seconds(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of a step by part, without the first step of a run, which compiles and warms up.

    Args:
        records: of ``metrics.jsonl``.

    Returns:
        ``PARTS``; "reward", the slowest response's, which may overlap with decoding; "other", what is left of the step.
        Validations and checkpoints are not part of a step. Empty without a step.
    """
    steps = [r for r in records if r["kind"] == "step"]
    steps = steps[1:] or steps
    if not steps:
        return {}
    mean = lambda key: float(np.mean([float(r.get(key, 0.0)) for r in steps]))
    seconds = {name: mean(key) for name, key in PARTS.items()}
    if any(REWARD in r for r in steps):
        seconds["reward"] = mean(REWARD)
    parts = sum(seconds[name] for name in PARTS if name != "step")
    return {name: round(value, 4) for name, value in (seconds | {"other": seconds["step"] - parts}).items()}


def step_table(seconds: Mapping[str, float]) -> list[str]:
    """Lines that show where the time of a step goes."""
    total = seconds.get("step", 0.0)
    if total <= 0:
        return []
    rows = [("rollout", "rollout"), ("reward", "  of it at most: rewards"), *((n, n) for n in [*PARTS, "other"][1:])]
    shown = [(label, seconds[name]) for name, label in rows if name in seconds and name != "step"]
    return [
        "seconds of a step (mean without the first):",
        *(f"  {label:<26}{value:8.2f}  {100 * value / total:5.1f} %" for label, value in [*shown, ("step", total)]),
    ]


def summarise(directory: Path) -> dict[str, Any]:
    """What the files of a run say: accuracies, log-prob differences over all tokens of all steps, versions."""
    records = list(read_metrics(directory))
    validations = [r for r in records if r["kind"] == "validation"]
    diffs, ties, versions = [np.zeros(0)], [np.zeros(0, bool)], set()
    tokens = forwards = 0
    diversity_first = None
    for _, lines in read_rollouts(directory):
        d, t = logprob_differences(lines)
        diffs.append(d)
        ties.append(t)
        versions.update(str(v) for line in lines for v in line["weight_versions"])
        tokens += sum(step >= 0 for line in lines for step in replay_field(line, "reveal_step"))
        forwards += sum(s for line in lines for s in line["steps_per_block"])
        if diversity_first is None:
            diversity_first = group_diversity(lines)
    all_diffs, all_ties = np.concatenate(diffs), np.concatenate(ties)
    differences = difference_summary(all_diffs, all_ties)
    accuracies = [validation_accuracy(r) for r in validations]
    return {
        "val_accuracy_before": accuracies[0] if accuracies else None,
        "val_accuracy_after": accuracies[-1] if accuracies else None,
        "val_accuracy_curve": {str(r["step"]): a for r, a in zip(validations, accuracies, strict=True)},
        "malformed_before": validation_accuracy(validations[0], "malformed") if validations else None,
        "malformed_after": validation_accuracy(validations[-1], "malformed") if validations else None,
        "step_seconds": step_seconds(records),
        "steps": max((r["step"] for r in records if r["kind"] == "step"), default=0),
        **{f"logprob_abs_diff_{name}": value for name, value in differences.items()},
        "logprob_tokens": len(all_diffs),
        "logprob_tokens_above_1e-4": int((all_diffs > 1e-4).sum()),
        "router_tie_tokens": int(all_ties.sum()),
        "group_diversity_mean_first_step": diversity_first,
        "weight_versions": sorted(versions, key=lambda v: (len(v), v)),
        "tokens_per_forward": tokens / max(1, forwards),
    }


def count_prompts(files: str | Sequence[str]) -> int:
    """Rows of a parquet file, or of several."""
    import pyarrow.parquet

    return sum(pyarrow.parquet.ParquetFile(f).metadata.num_rows for f in ([files] if isinstance(files, str) else files))


def finish_run(run: ResolvedRun, seconds: dict[str, float], wall_s: float) -> dict[str, Any]:
    """Write ``summary.json`` and the plots of a finished run."""
    summary = summarise(run.directory)
    summary |= {
        "val_prompts": count_prompts(run.config.data.val_files),
        "wall_s": round(wall_s, 1),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "device": run.hardware,
        "host": host_report(),
        "seed": run.recipe.seed,
        "learning_rate": run.config.actor_rollout_ref.actor.optim.lr,
        "versions": package_versions(),
    }
    (run.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot_run(run.directory)
    return summary
