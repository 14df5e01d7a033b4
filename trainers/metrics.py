"""Numbers of a training step that verl does not know: decoding, diversity, and engine against trainer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dllm.trace import RolloutTrace
from trainers.schedule import Threshold, edit_metrics, flip_metrics, replay_field, threshold_metrics
from trainers.scores import summarise_scores

Line = Mapping[str, Any]
"""One line of a rollout file (see ``rollout.records``), with ``uid``, ``reward`` and the trainer's log-probs."""


def engine_logprobs(line: Line) -> Sequence[float]:
    """The engine's log-probs of the replay tokens as the trainer has them: with those of the choice of positions, where
    it was random (``RolloutTrace.action_logprob``)."""
    if "select_logprob" not in line:
        return replay_field(line, "logprob")
    return RolloutTrace.from_line(line).action_logprob.tolist()


def signed_differences(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """Trainer's minus engine's log-prob of every drawn token, and whether it depends on a router tie.

    Lines without ``trainer_logprob`` are left out: only the exact likelihood is on the engine's scale.

    Returns:
        float64 [N], bool [N].
    """
    diffs, ties = [np.zeros(0)], [np.zeros(0, bool)]
    for line in lines:
        if "trainer_logprob" not in line:
            continue
        drawn = np.asarray(replay_field(line, "reveal_step")) >= 0
        engine = np.asarray(engine_logprobs(line), dtype=np.float64)
        diffs.append((np.asarray(line["trainer_logprob"], dtype=np.float64) - engine)[drawn])
        ties.append(np.asarray(line["router_tie"], dtype=bool)[drawn])
    return np.concatenate(diffs), np.concatenate(ties)


def logprob_differences(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """``signed_differences`` without their sign."""
    diffs, ties = signed_differences(lines)
    return np.abs(diffs), ties


def difference_summary(diffs: np.ndarray, ties: np.ndarray) -> dict[str, float]:
    """Mean, quantiles and maxima; ``max_without_ties`` leaves out tokens that depend on a router tie."""
    if not len(diffs):
        return {}
    clean = diffs[~ties]
    return {
        "mean": float(diffs.mean()),
        "p99": float(np.quantile(diffs, 0.99)),
        "p999": float(np.quantile(diffs, 0.999)),
        "max_without_ties": float(clean.max()) if len(clean) else 0.0,
        "max": float(diffs.max()),
    }


def gate_excess(metrics: Mapping[str, float], limit: float | None) -> float | None:
    """The p99.9 of a step's log-prob differences if it is above ``dllm.max_logprob_diff``, NaN included; else None."""
    worst = metrics.get("rollout_corr/logprob_abs_diff/p999")
    return None if limit is None or worst is None or worst <= limit else worst


def divergence_metrics(signed: np.ndarray) -> dict[str, float]:
    """How far the trainer's policy is from the one that decoded, over all drawn tokens.

    Args:
        signed: trainer's minus engine's log-prob, float64 [N].

    Returns:
        ``k3``, the estimate of KL(engine || trainer) in nats per token that is never negative and has a low variance
        (Schulman, "Approximating KL divergence", 2020): mean of exp(d) - 1 - d; and ``exp_mean_abs_diff``, the factor
        by which a token's probability is off in the geometric mean.
    """
    if not len(signed):
        return {}
    return {
        "rollout_corr/k3": float(np.mean(np.expm1(signed) - signed)),
        "rollout_corr/exp_mean_abs_diff": float(np.exp(np.abs(signed).mean())),
    }


def group_diversity(lines: Sequence[Line]) -> float:
    """Distinct visible responses per prompt group, mean over the groups."""
    groups: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for line in lines:
        groups[line["uid"]].add(tuple(line["output_ids"]))
    return float(np.mean([len(group) for group in groups.values()])) if groups else 0.0


def step_metrics(lines: Sequence[Line], threshold: Threshold | None = None) -> dict[str, float]:
    """Metrics of one step's rollouts under their published names (docs/metrics.md), before anything is corrected.

    Args:
        threshold: the decoder's, for the margins; None leaves them out.
    """
    steps = [s for line in lines for s in line["steps_per_block"]]
    confidence = np.concatenate([np.asarray(line["confidence"], dtype=np.float64) for line in lines])
    lengths = np.asarray([len(line["output_ids"]) for line in lines])
    tokens = sum(len(replay_field(line, "reveal_step")) for line in lines)
    signed, ties = signed_differences(lines)
    versions = [int(line["weight_version"]) for line in lines if str(line["weight_version"]).isdigit()]
    metrics = {
        "rollout/mixed": float(sum(bool(line.get("mixed")) for line in lines)),
        "dllm/tokens_per_forward": tokens / max(1, sum(steps)),
        "dllm/steps_per_block/mean": float(np.mean(steps)),
        "dllm/steps_per_block/p95": float(np.quantile(steps, 0.95)),
        "dllm/confidence/mean": float(confidence.mean()),
        "dllm/confidence/p05": float(np.quantile(confidence, 0.05)),
        "dllm/visible_length/mean": float(lengths.mean()),
        "dllm/visible_length/max": float(lengths.max()),
        "dllm/router_tie_tokens": float(ties.sum()),
        "rollout/group_diversity": group_diversity(lines),
        "rollout/length_limit_ratio": float(np.mean([line["finish_reason"] == "length" for line in lines])),
    }
    if versions:
        metrics["rollout/weight_version/min"] = float(min(versions))
        metrics["rollout/weight_version/max"] = float(max(versions))
    for name in ("acc", "malformed"):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            metrics[f"rollout/{name}"] = float(np.mean(values))
    differences = difference_summary(np.abs(signed), ties)
    metrics |= {f"rollout_corr/logprob_abs_diff/{name}": value for name, value in differences.items()}
    return (
        metrics
        | divergence_metrics(signed)
        | threshold_metrics(lines, threshold)
        | edit_metrics(lines)
        | flip_metrics(lines)
    )


def validation_metrics(prompts: Sequence[Hashable], rewards: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Held-out figures under their published names (``val/*``); none if a reward has no ``acc`` and ``malformed``.

    Args:
        prompts: what tells apart the prompts, one per answer.
        rewards: fields of the rewards, one value per answer.
    """
    fields = [list(rewards.get(name, ())) for name in ("acc", "malformed")]
    if not prompts or any(len(values) != len(prompts) or None in values for values in fields):
        return {}
    scores = [{"acc": acc, "malformed": malformed} for acc, malformed in zip(*fields, strict=True)]
    return {f"val/{name}": float(value) for name, value in asdict(summarise_scores(scores, prompts)).items()}


def reward_metrics(seconds: Sequence[float]) -> dict[str, float]:
    """How long a step's rewards took.

    Args:
        seconds: of every response, from its end to its reward; others are decoded meanwhile, so that ``max`` bounds
            what rewards add to the rollout.
    """
    if not seconds:
        return {}
    return {"rollout/reward_seconds/mean": float(np.mean(seconds)), "rollout/reward_seconds/max": float(max(seconds))}


def refresh_metrics(
    costs: Sequence[Mapping[str, float] | None], lines: Sequence[Mapping[str, Any]], step: int
) -> dict[str, float]:
    """``weight_sync/*`` of a step.

    Args:
        costs: of its refresh, one for each engine (``SyncReport.as_metrics``). Engines are refreshed at the same time:
            the slowest counts.
        lines: the step's samples.

    Returns:
        Seconds by stage, bytes to all engines, goodput of the slowest in 1e9 bytes a second, ``version`` that the
        engines hold now, and ``lag``: by how many versions the oldest block of the step's samples was behind the
        weights that the step began with (0 on-policy).
    """
    known = [cost for cost in costs if cost is not None]
    metrics: dict[str, float] = {}
    for name in known[0] if known else ():
        values = [cost[name] for cost in known]
        total = name.endswith(("bytes", "buckets", "resent", "strayed"))
        metrics[name] = sum(values) if total else min(values) if name.endswith("gbps") else max(values)
    versions = [v for line in lines for v in line.get("weight_versions", ())]
    numbers = [int(v) for v in versions if str(v).isdigit()]
    metrics["weight_sync/version"] = float(step)
    if numbers:
        metrics["weight_sync/lag"] = float(step - 1 - min(numbers))
    return metrics
