"""Numbers of a training step that verl does not know: decoding, diversity, and engine against trainer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dllm.trace import RolloutTrace

Line = Mapping[str, Any]
"""One line of a rollout file (see ``rollout.records``), with ``uid``, ``reward`` and the trainer's log-probs."""


def replay_field(line: Line, name: str) -> list:
    """A per-token field over the whole replay: visible tokens, then the rest of the terminal block."""
    return list(line[name]) + list(line["tail"][name])


def engine_logprobs(line: Line) -> Sequence[float]:
    """The engine's log-probs of the replay tokens as the trainer has them: with those of the choice of positions, where
    it was random (``RolloutTrace.action_logprob``)."""
    if "select_logprob" not in line:
        return replay_field(line, "logprob")
    return RolloutTrace.from_line(line).action_logprob.tolist()


def logprob_differences(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """|engine - trainer| log-prob of every drawn token, and whether it depends on a router tie.

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
        diffs.append(np.abs(engine - np.asarray(line["trainer_logprob"], dtype=np.float64))[drawn])
        ties.append(np.asarray(line["router_tie"], dtype=bool)[drawn])
    return np.concatenate(diffs), np.concatenate(ties)


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


def group_diversity(lines: Sequence[Line]) -> float:
    """Distinct visible responses per prompt group, mean over the groups."""
    groups: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for line in lines:
        groups[line["uid"]].add(tuple(line["output_ids"]))
    return float(np.mean([len(group) for group in groups.values()])) if groups else 0.0


def step_metrics(lines: Sequence[Line]) -> dict[str, float]:
    """Metrics of one step's rollouts under their published names (``dllm/*``, ``rollout/*``, ``rollout_corr/*``)."""
    steps = [s for line in lines for s in line["steps_per_block"]]
    confidence = np.concatenate([np.asarray(line["confidence"], dtype=np.float64) for line in lines])
    lengths = np.asarray([len(line["output_ids"]) for line in lines])
    tokens = sum(len(replay_field(line, "reveal_step")) for line in lines)
    diffs, ties = logprob_differences(lines)
    versions = [int(line["weight_version"]) for line in lines if str(line["weight_version"]).isdigit()]
    metrics = {
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
    metrics.update({f"rollout_corr/logprob_abs_diff/{k}": v for k, v in difference_summary(diffs, ties).items()})
    return metrics
