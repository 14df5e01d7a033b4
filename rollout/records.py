"""Rollout samples: from the engine's answer to a line in a file and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from dllm.decoding import SamplingParams, SelectionRule
from dllm.trace import PER_TOKEN, RolloutTrace, TraceError
from rollout.params import StopRules

_PREFIX = "dllm_"
VERSIONS = ("version_at_admission", "version_at_completion")


class RolloutError(RuntimeError):
    """The engine failed a request; the message carries its reason."""


@dataclass
class RolloutSample:
    """One response.

    Attributes:
        trace: tokens and their log, the rest of the terminal block included.
        text: visible tokens decoded, without special tokens.
        finish_reason: "stop", "length" or "abort".
        max_new_tokens: limit the request asked for.
        seed: seed of its noise, None if the engine chose it.
        routing: int64 [R, routers], which experts each router chose for a token at its reveal, a set of them as one
            number (``dllm.routing``); None unless the request asked for it.
        stop_rules: what could end it before its limit; None if nobody said.
        version_at_admission, version_at_completion: label of the engine's weights when the request was taken and when
            its answer left; None if nobody looked.
    """

    trace: RolloutTrace
    text: str
    finish_reason: str
    max_new_tokens: int
    seed: int | None = None
    routing: np.ndarray | None = None
    stop_rules: StopRules | None = None
    version_at_admission: str | None = None
    version_at_completion: str | None = None

    @property
    def weight_version(self) -> str:
        """Weights of the last block; ``trace.weight_versions`` has one entry per block."""
        return self.trace.weight_versions[-1] if self.trace.weight_versions else ""

    def to_line(self) -> dict[str, Any]:
        """JSON object of one line of a rollout file."""
        line = self.trace.to_line()
        line["text"] = self.text
        line["finish_reason"] = self.finish_reason
        line["weight_version"] = self.weight_version
        line["sampling_params"] |= {"max_new_tokens": self.max_new_tokens, "seed": self.seed}
        if self.stop_rules is not None:
            line["sampling_params"] |= self.stop_rules.to_dict()
        if self.routing is not None:
            line["routing"] = self.routing.tolist()
        for name in VERSIONS:
            if (value := getattr(self, name)) is not None:
                line[f"weight_{name}"] = value
        return line

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> RolloutSample:
        """Inverse of ``to_line``.

        Raises:
            TraceError: a key is missing or of another type, or the trace contradicts itself.
        """
        trace = RolloutTrace.from_line(line)
        sampling = line["sampling_params"]
        try:
            return cls(
                trace,
                str(line["text"]),
                str(line["finish_reason"]),
                int(sampling["max_new_tokens"]),
                sampling["seed"],
                np.asarray(line["routing"], dtype=np.int64) if line.get("routing") else None,
                StopRules.from_dict(sampling),
                **{name: line.get(f"weight_{name}") for name in VERSIONS},
            )
        except KeyError as error:
            raise TraceError(f"rollout line has no {error}; it was not written by this package's engine") from error


def join_samples(first: RolloutSample, then: RolloutSample, text: str | None = None) -> RolloutSample:
    """One response from two parts of it: ``then`` was decoded behind the prompt and the tokens of ``first``.

    Args:
        first: ends on a block boundary, without a stop.
        text: of the whole response; the two texts joined if None.

    Raises:
        TraceError: ``then`` does not begin where ``first`` ends.
    """
    one, two = first.trace, then.trace
    if one.visible != len(one.replay_ids) or not np.array_equal(
        two.prompt_ids, np.concatenate([one.prompt_ids, one.replay_ids])
    ):
        raise TraceError("the second part of a response does not begin where the first one ends")
    joined: dict[str, Any] = {name: np.concatenate([getattr(one, name), getattr(two, name)]) for name in PER_TOKEN}
    if one.select_logprobs is not None or two.select_logprobs is not None:
        parts = [t.select_logprobs or [[] for _ in t.steps_per_block] for t in (one, two)]
        joined["select_logprobs"] = parts[0] + parts[1]
    trace = replace(
        two,
        prompt_ids=one.prompt_ids,
        replay_ids=np.concatenate([one.replay_ids, two.replay_ids]),
        visible=one.visible + two.visible,
        steps_per_block=one.steps_per_block + two.steps_per_block,
        weight_versions=one.weight_versions + two.weight_versions,
        edits=one.edits + two.edits,
        selection=two.selection or one.selection,
        **joined,
    )
    routing = [part.routing for part in (first, then) if part.routing is not None]
    return replace(
        then,
        trace=trace,
        text=first.text + then.text if text is None else text,
        max_new_tokens=one.visible + then.max_new_tokens,
        routing=np.concatenate(routing) if routing else None,
        version_at_admission=first.version_at_admission or then.version_at_admission,
    )


def edits_of(blocks: Sequence[Mapping[str, Any]], first: int, block_size: int) -> list[tuple[int, int, int, int, int]]:
    """(block, step, position, token before, token after) of every edit in summaries of blocks from the ``first`` on."""
    return [
        (first + index, step, (first + index) * block_size + column, old, new)
        for index, block in enumerate(blocks)
        for step, column, old, new in block.get("edits", [])
    ]


def sample_from_response(
    response: Mapping[str, Any],
    prompt_ids: Sequence[int],
    block_size: int,
    sampling: SamplingParams,
    max_new_tokens: int,
    seed: int | None = None,
) -> RolloutSample:
    """Build a sample from SGLang's answer to a generate request.

    Raises:
        RolloutError: the engine ended the request with an error (for instance ``nan_logits``), or the answer
            carries no log because the engine runs without this package's plugin.
    """
    meta = response["meta_info"]
    reason = meta.get("finish_reason") or {"type": "abort"}
    if reason["type"] == "abort" and reason.get("err_type") not in (None, "Aborted"):
        raise RolloutError(str(reason.get("message") or reason["err_type"]))
    visible_ids = list(response["output_ids"])
    blocks = [block for block in meta.get(_PREFIX + "block", []) if block is not None]
    if visible_ids and not blocks:
        raise RolloutError(
            "the engine returned tokens without a reveal log; install this package into its environment and use one "
            "of its decoders (--dllm-algorithm SelectThenSample)"
        )
    tail = blocks[-1].get("tail") if blocks else None
    tail = tail or {"ids": [], **{name: [] for name in PER_TOKEN}}
    values = {name: list(meta.get(_PREFIX + name, [])) + list(tail[name]) for name in PER_TOKEN}
    select = [block.get("select_logprob", []) for block in blocks]
    edits = edits_of(blocks, len(prompt_ids) // block_size, block_size)
    trace = RolloutTrace(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        replay_ids=np.asarray(visible_ids + list(tail["ids"]), dtype=np.int32),
        visible=len(visible_ids),
        reveal_step=np.asarray(values["reveal_step"], dtype=np.float64).astype(np.int16),
        logprob=np.asarray(values["logprob"], dtype=np.float32),
        logprob_raw=np.asarray(values["logprob_raw"], dtype=np.float32),
        confidence=np.asarray(values["confidence"], dtype=np.float32),
        steps_per_block=[int(block["steps"]) for block in blocks],
        weight_versions=[str(block["weight_version"]) for block in blocks],
        block_size=block_size,
        sampling=sampling,
        select_logprobs=select if any(select) else None,
        edits=edits,
        selection=SelectionRule.from_dict(next((block["selection"] for block in blocks if "selection" in block), None)),
    )
    if reason["type"] != "abort":
        trace.validate()
    routing = [row for block in blocks for row in block.get("routing", ())]
    return RolloutSample(
        trace,
        response.get("text") or "",
        reason["type"],
        max_new_tokens,
        seed,
        np.asarray(routing, dtype=np.int64) if routing else None,
    )


def check_trainable(trace: RolloutTrace) -> None:
    """Refuse a rollout whose log-prob a trainer cannot recompute.

    Raises:
        RolloutError: the choice of positions was random, and the decoder does not say by which rule.
    """
    if trace.select_logprobs is not None and trace.selection is None:
        raise RolloutError(
            "the decoder logs select_logprob, the log-prob of a random choice of positions, without a rule to "
            "recompute it by; set selection = SelectionRule(threshold, tokens_per_step) on the decoder if it follows "
            "that rule, or choose positions without randomness"
        )


TRAINER_KEYS = (
    "step",
    "uid",
    "reward",
    "ground_truth",
    "input",
    "output",
    "gts",
    "score",
    "acc",
    "malformed",
    "router_tie",
    "trainer_logprob",
    "trainer_likelihood",
    "schedule_flip",
    "router_flip",
)
"""What a training run adds to a sample's line; ``input``, ``output``, ``gts`` and ``score`` are verl's own names."""


def engine_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line as the engine made it: without what a training run added."""
    return {name: value for name, value in line.items() if name not in TRAINER_KEYS}


def write_line(file: TextIO, line: Mapping[str, Any]) -> None:
    """Append one JSON line and flush it, so that a killed run keeps what it has."""
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def write_parquet(path: str | Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines as a parquet file with their keys as columns; the file appears whole or not at all.

    A key that a line lacks, or that is None, is null. A file takes about a third of the space of JSON lines.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for line in lines for name in line)
    table = pa.Table.from_pylist([{name: line.get(name) for name in names} for line in lines])
    part = Path(f"{path}.part")
    pq.write_table(table, part, compression="zstd")
    part.replace(path)


def read_parquet(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of ``write_parquet``, without keys that are null.

    Raises:
        FileNotFoundError: no such file.
        TraceError: not a parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise TraceError(f"{path} is not a parquet file: {error}") from error
    for line in table.to_pylist():
        yield {name: value for name, value in line.items() if value is not None}


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Objects of a rollout or prompt file: JSON lines, or parquet by the suffix of its name.

    Raises:
        FileNotFoundError: no such file.
        TraceError: a line is not a JSON object; the message has its number. Or the file is not text.
    """
    if Path(path).suffix == ".parquet":
        yield from read_parquet(path)
        return
    number = 0
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                if not isinstance(line := json.loads(text), dict):
                    raise TraceError(f"{path} line {number} is not a JSON object")
                yield line
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        what = f"line {number} is not JSON" if isinstance(error, json.JSONDecodeError) else "is not text in UTF-8"
        raise TraceError(f"{path} {what}: {error}") from error


def read_traces(path: str | Path, block_size: int | None = None) -> list[RolloutTrace]:
    """Traces of a rollout file.

    Raises:
        TraceError: a line is malformed; the message has its number.
    """
    traces = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            traces.append(RolloutTrace.from_line(line, block_size))
        except TraceError as error:
            raise TraceError(f"{path} sample {number}: {error}") from error
    return traces


def tokens_per_forward(traces: Iterable[RolloutTrace]) -> float:
    """Generated tokens per denoise forward over several traces."""
    tokens = steps = 0
    for trace in traces:
        tokens += len(trace.replay_ids)
        steps += sum(trace.steps_per_block)
    return tokens / max(1, steps)
