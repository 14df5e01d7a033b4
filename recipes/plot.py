"""Curves of a run.

python -m recipes.plot outputs/grpo_llada2/NAME
python -m recipes.plot outputs/grpo_llada2/{A,B,C} --compare accuracy.png    # held-out accuracy of several runs
python -m recipes.plot exact=A.json,B.json elbo=C.json --seeds seeds.png     # groups of summary.json, one run per seed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dllm.config import ConfigError
from recipes.console import validation_accuracy
from recipes.records import read_metrics
from trainers.scores import ScoreSummary

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"


def _figure(title: str, ylabel: str, xlabel: str = "training step") -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def plot_run(directory: Path) -> list[Path]:
    """Write ``plots/*.png`` of a run from its ``metrics.jsonl``; returns the files."""
    records = list(read_metrics(directory))
    steps = [r for r in records if r["kind"] == "step"]
    validations = [r for r in records if r["kind"] == "validation"]
    x = [r["step"] for r in steps]
    series = lambda key: [r.get(key, float("nan")) for r in steps]
    written = []

    figure, axes = _figure("Reward", "share of right answers")
    axes.plot(x, series("critic/rewards/mean"), color=ORANGE, label="train reward (temperature 1)")
    axes.plot(
        [r["step"] for r in validations],
        [validation_accuracy(r) for r in validations],
        color=BLUE,
        marker="o",
        label="held-out accuracy (greedy)",
    )
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, loc="lower right")
    written.append(_save(figure, directory / "plots" / "reward.png"))

    figure, axes = _figure("Response length", "visible tokens")
    axes.plot(x, series("dllm/visible_length/mean"), color=BLUE, label="mean")
    axes.plot(x, series("dllm/visible_length/max"), color=GREY, label="max")
    axes.legend(frameon=False)
    written.append(_save(figure, directory / "plots" / "response_length.png"))

    figure, axes = _figure("Confidence at the reveal", "largest probability")
    axes.plot(x, series("dllm/confidence/mean"), color=BLUE, label="mean")
    axes.plot(x, series("dllm/confidence/p05"), color=GREY, label="5th percentile")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    written.append(_save(figure, directory / "plots" / "confidence.png"))

    if not any("rollout_corr/logprob_abs_diff/mean" in r for r in steps):
        return written  # a likelihood that is not on the engine's scale
    figure, axes = _figure("Engine against trainer", "|log-prob difference| (nats)")
    for key, colour in (("mean", BLUE), ("p999", ORANGE), ("max", GREY)):
        axes.plot(x, series(f"rollout_corr/logprob_abs_diff/{key}"), color=colour, label=key.replace("p999", "p99.9"))
    axes.set_yscale("log")
    axes.legend(frameon=False)
    written.append(_save(figure, directory / "plots" / "logprob_difference.png"))
    return written


def plot_comparison(directories: Sequence[Path], path: Path) -> Path:
    """Held-out accuracy of several runs, and their training reward behind it, in one figure."""
    figure, axes = _figure("Held-out accuracy (greedy); thin: training reward", "share of right answers")
    for index, directory in enumerate(directories):
        records = list(read_metrics(directory))
        steps = [r for r in records if r["kind"] == "step"]
        held_out = [r for r in records if r["kind"] == "validation"]
        colour = f"C{index}"
        axes.plot(
            [r["step"] for r in steps], [r["critic/rewards/mean"] for r in steps], color=colour, lw=0.8, alpha=0.4
        )
        accuracies = [validation_accuracy(r) for r in held_out]
        axes.plot([r["step"] for r in held_out], accuracies, color=colour, marker="o", label=directory.name)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, loc="lower right")
    return _save(figure, path)


def plot_seeds(groups: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    """Held-out accuracy of groups of runs that differ in nothing but their seed.

    Args:
        groups: contents of ``summary.json`` by the name of a group. Runs are thin lines, their mean is a thick one.
    """
    figure, axes = _figure("Held-out accuracy (greedy); thick: mean over seeds", "share of right answers")
    for index, (name, summaries) in enumerate(groups.items()):
        curves = [{int(step): share for step, share in s["val_accuracy_curve"].items()} for s in summaries]
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), color=f"C{index}", lw=0.8, alpha=0.5)
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        means = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
        axes.plot(steps, means, color=f"C{index}", lw=2, marker="o", label=f"{name} ({len(curves)})")
    axes.legend(frameon=False, loc="lower right")
    return _save(figure, path)


def read_group(text: str) -> tuple[str, list[dict[str, Any]]]:
    """``NAME=FILE.json,FILE.json``: the name and the summaries.

    Raises:
        ConfigError: it is written differently, or a file is no summary with validations.
    """
    name, separator, files = text.partition("=")
    if not (name and separator and files):
        raise ConfigError(f"{text!r} names no group of runs; write NAME=FILE.json,FILE.json")
    summaries = []
    for file in files.split(","):
        try:
            summaries.append(json.loads(Path(file).read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{file!r} of group {name!r} cannot be read ({error}); pass a summary.json") from error
        if not summaries[-1].get("val_accuracy_curve"):
            raise ConfigError(f"{file!r} of group {name!r} has no validations; pass a summary.json with them")
    return name, summaries


def plot_accuracy(points: Sequence[tuple[str, float, ScoreSummary]], path: Path) -> Path:
    """Accuracy (95 % interval) against tokens per forward: one point per (label, tokens per forward, scores)."""
    figure, axes = _figure("Accuracy and speed", "accuracy (95 % interval)", "tokens per denoise forward")
    for index, (label, speed, s) in enumerate(points):
        bars = [[s.accuracy - s.accuracy_low], [s.accuracy_high - s.accuracy]]
        axes.errorbar([speed], [s.accuracy], yerr=bars, fmt="o", capsize=3, color=f"C{index % 10}", label=label)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.plot", description="Draw the curves of runs.")
    parser.add_argument("runs", nargs="+", help="directories of runs")
    parser.add_argument("--compare", metavar="FILE.png", help="draw all runs into one figure instead")
    parser.add_argument("--seeds", metavar="FILE.png", help="runs are NAME=SUMMARY.json,...: draw groups of seeds")
    args = parser.parse_args(argv)
    if args.seeds:
        try:
            groups = dict(map(read_group, args.runs))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(plot_seeds(groups, Path(args.seeds)))
        return 0
    directories = [Path(run) for run in args.runs]
    for directory in directories:
        if not (directory / "metrics.jsonl").is_file():
            print(f"error: {str(directory)!r} has no metrics.jsonl; pass the directory of a run", file=sys.stderr)
            return 2
    if args.compare:
        print(plot_comparison(directories, Path(args.compare)))
        return 0
    for directory in directories:
        for path in plot_run(directory):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
