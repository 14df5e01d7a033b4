"""A line of a rollout file as the page wants it: a checked trace, numbers short enough to embed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dllm.trace import RolloutTrace, TraceError

SCORES = ("acc", "malformed")


def rounded(values: Iterable[float], digits: int) -> list[float | int | None]:
    """``values`` with ``digits`` significant digits; None for what is not finite, which JSON cannot say."""
    short: list[float | int | None] = []
    for value in values:
        if not math.isfinite(value):
            short.append(None)
            continue
        number = float(f"{value:.{digits}g}")
        short.append(int(number) if number.is_integer() else number)
    return short


def trainer_fields(line: Mapping[str, Any], trace: RolloutTrace) -> dict[str, Any]:
    """The trainer's number of every replay token, and how far it is from the engine's where both are log-probs.

    The difference is taken here, in float64, because it is often smaller than the digits the page carries.

    Raises:
        TraceError: there are not as many numbers as tokens.
    """
    made: dict[str, Any] = {}
    for name in ("trainer_logprob", "trainer_likelihood"):
        if line.get(name) is None:
            continue
        values = np.asarray(line[name], dtype=np.float64)
        if values.shape != trace.logprob.shape:
            raise TraceError(f"{name} has {values.size} entries for {trace.logprob.size} replay tokens")
        made["trainer"] = rounded(values, 6)
        if name == "trainer_logprob":  # another likelihood is not on the engine's scale
            made["difference"] = rounded(values - trace.action_logprob.astype(np.float64), 3)
    if len(ties := line.get("router_tie") or []) == len(trace.logprob):
        made["ties"] = [index for index, tie in enumerate(ties) if tie]
    return made


def view(line: Mapping[str, Any], step: int | None, with_text: bool) -> dict[str, Any]:
    """The JSON object of one sample, without its prompt and group.

    Args:
        line: one line of a rollout file, of a training run or of ``rollout.generate``.
        step: training step, if the file's name says it.
        with_text: keep the decoded text, for a page without a tokenizer.

    Raises:
        TraceError: the line is no rollout, or its log contradicts itself.
        TypeError, ValueError: a field is not of its type.
    """
    trace = RolloutTrace.from_line(line)
    sampling, text = line["sampling_params"], line.get("text")
    made: dict[str, Any] = {
        "step": step if step is not None else line.get("step"),
        "block_size": trace.block_size,
        "ids": trace.replay_ids.tolist(),
        "visible": trace.visible,
        "reveal": trace.reveal_step.tolist(),
        "logprob": rounded(trace.logprob.tolist(), 6),
        "confidence": rounded(trace.confidence.tolist(), 5),
        "steps": trace.steps_per_block,
        "versions": trace.weight_versions,
        "sampling": {name: value for name, value in sampling.items() if value not in (None, []) and name != "seed"},
        "finish": line.get("finish_reason"),
        **trainer_fields(line, trace),
    }
    if not np.array_equal(trace.logprob, trace.logprob_raw, equal_nan=True):
        made["raw"] = rounded(trace.logprob_raw.tolist(), 6)
    if trace.edits:
        made["edits"] = [list(edit) for edit in trace.edits]
    if trace.select_logprobs is not None:
        made["select"] = [rounded(values, 6) for values in trace.select_logprobs]
    if sampling.get("seed") is not None:
        made["seed"] = str(sampling["seed"])  # above 2**53, so a number would lose digits in a browser
    if line.get("reward") is not None:
        made["reward"] = rounded([line["reward"]], 6)[0]
    if line.get("ground_truth") is not None:
        made["truth"] = str(line["ground_truth"])
    made |= {name: line[name] for name in SCORES if line.get(name) is not None}
    if with_text and text:
        made["text"] = text
    return made
