"""Which positions a step revealed, and how close that was: threshold margins, forced steps, edits, flips.

Two kinds of flips compare the trainer with the engine, where both see the same state: of the schedule (would the
decoder, run on the trainer's logits, have revealed the same positions?) and of the routers (did a mixture of experts
send the position to the same experts?). Both are measured on a sample (``trainers.flips``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dllm.decoding import decoder_class, make_decoder
from dllm.decoding.fast_dllm_v2 import FastDLLMv2
from dllm.decoding.joint_threshold import JointThreshold
from dllm.decoding.sample_then_select import SampleThenSelect
from dllm.decoding.select_then_sample import SelectThenSample

Line = Mapping[str, Any]

NOT_MEASURED = -1.0
"""Value of a token that is not in the sample."""


@dataclass(frozen=True)
class Threshold:
    """What a decoder compares at every hidden position.

    Attributes:
        value: positions above it are revealed.
        of_draw: compared is the probability of the drawn token, not the confidence.
    """

    value: float
    of_draw: bool = False


def threshold_of(algorithm: str, options: Mapping[str, Any]) -> Threshold | None:
    """Threshold of a decoder, if the statistic it is compared with is in the log; None otherwise."""
    cls = decoder_class(algorithm)
    if issubclass(cls, SampleThenSelect):
        return Threshold(make_decoder(algorithm, 0, options).selection.threshold, of_draw=True)
    if issubclass(cls, (SelectThenSample, JointThreshold, FastDLLMv2)):
        return Threshold(make_decoder(algorithm, 0, options).threshold)
    return None


def replay_field(line: Line, name: str) -> list:
    """A per-token field over the whole replay: visible tokens, then the rest of the terminal block."""
    return list(line[name]) + list(line["tail"][name])


def _statistic(line: Line, threshold: Threshold) -> np.ndarray:
    if not threshold.of_draw:
        return np.asarray(replay_field(line, "confidence"), np.float32)
    return np.exp(np.asarray(replay_field(line, "logprob"), np.float32))


def steps_of(line: Line) -> Iterator[np.ndarray]:
    """Indices of the replay tokens each denoise step drew; steps that drew nothing (edits alone) are left out."""
    step = np.asarray(replay_field(line, "reveal_step"))
    block = (len(line["input_ids"]) + np.arange(len(step))) // line["block_size"]
    drawn = np.flatnonzero(step >= 0)
    order = drawn[np.lexsort((step[drawn], block[drawn]))]
    keys = np.stack([block[order], step[order]])
    ends = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    yield from (part for part in np.split(order, ends) if len(part))


def threshold_metrics(lines: Sequence[Line], threshold: Threshold | None) -> dict[str, float]:
    """How far from the threshold the revealed positions were, and how often nothing was above it."""
    if threshold is None:
        return {}
    margins, forced = [np.zeros(0)], []
    for line in lines:
        if threshold.of_draw and line["sampling_params"]["temperature"] == 0:
            continue  # a greedy draw is logged with probability 1
        values = _statistic(line, threshold)
        for indices in steps_of(line):
            margins.append(np.abs(values[indices].astype(np.float64) - threshold.value))
            forced.append(not bool((values[indices] > np.float32(threshold.value)).any()))
    if not forced:
        return {}
    joined = np.concatenate(margins)
    return {
        "dllm/threshold_margin/mean": float(joined.mean()),
        "dllm/threshold_margin/p05": float(np.quantile(joined, 0.05)),
        "dllm/forced_top1_ratio": float(np.mean(forced)),
    }


def edit_metrics(lines: Sequence[Line]) -> dict[str, float]:
    """Edits per generated token."""
    tokens = sum(len(replay_field(line, "reveal_step")) for line in lines)
    return {"dllm/edit_rate": sum(len(line.get("edits") or ()) for line in lines) / max(1, tokens)}


def flip_metrics(lines: Sequence[Line]) -> dict[str, float]:
    """Rates of the sampled flips; nothing of a kind that was not measured at this step.

    ``schedule_flip`` of a line is 1 at every token of a state whose choice of positions flipped and 0 where it did not;
    ``router_flip`` is the share of the token's routers that chose other experts.
    """
    metrics: dict[str, float] = {}
    states = [
        float(line["schedule_flip"][indices[0]])
        for line in lines
        if "schedule_flip" in line
        for indices in steps_of(line)
    ]
    measured = [value for value in states if value != NOT_MEASURED]
    if measured:
        metrics["dllm/schedule_flip/ratio"] = float(np.mean(measured))
        metrics["dllm/schedule_flip/states"] = float(len(measured))
    shares = np.asarray([share for line in lines for share in line.get("router_flip", ())])
    shares = shares[shares != NOT_MEASURED]
    if len(shares):
        metrics["dllm/router_flip/ratio"] = float(shares.mean())
        metrics["dllm/router_flip/token_ratio"] = float((shares > 0).mean())
        metrics["dllm/router_flip/tokens"] = float(len(shares))
    return metrics
