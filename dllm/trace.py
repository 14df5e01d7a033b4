"""What one response logged while it was decoded: enough to rebuild every intermediate state.

The terminal block is kept whole. Text, reward and visible ids stop at the stop token or the length limit, but
the tokens behind it were sampled too and were context of later reveals, so a replay needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dllm.decoding.sample_then_select import SelectionRule
from dllm.decoding.sampling import SamplingParams

PER_TOKEN = ("reveal_step", "logprob", "logprob_raw", "confidence")


class TraceError(ValueError):
    """A trace that contradicts itself or its geometry; the message says where."""


TORN = "torn:"
"""Beginning of the version of weights that are themselves a mixture: ``torn:<old>-><new>``."""


def is_mixed(versions: Sequence[str]) -> bool:
    """Whether blocks with these versions are of more than one set of weights: no one policy has decoded them."""
    return len(set(versions)) > 1 or any(version.startswith(TORN) for version in versions)


@dataclass
class RolloutTrace:
    """One decoded response.

    With P prompt tokens and R replayed tokens, ``(P + R) % block_size == 0``, or R = 0 if it was aborted in time.

    Attributes:
        prompt_ids: int32 [P].
        replay_ids: int32 [R], visible tokens and the rest of the terminal block.
        visible: number of leading replay tokens that are the response (text, reward).
        reveal_step: int16 [R], step within the block at which each token was drawn; -1 if never.
        logprob: float32 [R], of the token that was drawn, under the distribution sampled from.
        logprob_raw: float32 [R], at temperature 1 without filters.
        confidence: float32 [R], largest probability at the step of the reveal.
        steps_per_block: denoise steps of each block that holds replay tokens.
        weight_versions: version of the weights each of those blocks was decoded with.
        block_size: tokens per block on the absolute grid.
        sampling: how the tokens were drawn.
        select_logprobs: per block a list with one number per step, if the choice of positions was random.
        edits: (block, step, position, old id, new id) of every edited token, in order, position in the whole sequence.
        selection: the rule behind ``select_logprobs``; without it they cannot be recomputed under other weights.
    """

    prompt_ids: np.ndarray
    replay_ids: np.ndarray
    visible: int
    reveal_step: np.ndarray
    logprob: np.ndarray
    logprob_raw: np.ndarray
    confidence: np.ndarray
    steps_per_block: list[int]
    weight_versions: list[str]
    block_size: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    select_logprobs: list[list[float]] | None = None
    edits: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    selection: SelectionRule | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def first_block(self) -> int:
        """Absolute index of the first block with a generated token."""
        return self.prompt_len // self.block_size

    @property
    def mixed(self) -> bool:
        """See ``is_mixed``."""
        return is_mixed(self.weight_versions)

    @property
    def forward_passes(self) -> int:
        """Denoise forwards plus one commit forward per block."""
        return sum(self.steps_per_block) + len(self.steps_per_block)

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens (the terminal tail included) per denoise forward."""
        return len(self.replay_ids) / max(1, sum(self.steps_per_block))

    @property
    def drawn_ids(self) -> np.ndarray:
        """int32 [R], the token that was drawn at each position; ``replay_ids`` are what edits made of them."""
        ids = self.replay_ids.copy()
        for _, _, position, old, _ in reversed(self.edits):
            ids[position - self.prompt_len] = old
        return ids

    @property
    def select_logprob(self) -> np.ndarray:
        """float32 [R]: ``select_logprobs`` of each step at the first token it drew, 0 elsewhere."""
        values = np.zeros(len(self.replay_ids), np.float32)
        for index, per_step in enumerate(self.select_logprobs or []):
            rows = self.block_slice(index)
            for step, value in enumerate(per_step):
                drawn = np.flatnonzero(self.reveal_step[rows] == step)
                values[rows.start + drawn[:1]] = value
        return values

    @property
    def action_logprob(self) -> np.ndarray:
        """float32 [R], ``logprob + select_logprob``: its sum is the log-prob of the trajectory."""
        return self.logprob + self.select_logprob

    def validate(self) -> None:
        """Check the invariants of an honest log.

        Raises:
            TraceError: lengths disagree, the grid is broken, a step within a block did nothing, or the edits do not
                lead from the drawn tokens to the final ones.
        """
        n = len(self.replay_ids)
        for name in PER_TOKEN:
            if len(getattr(self, name)) != n:
                raise TraceError(f"{name} has {len(getattr(self, name))} entries for {n} replay tokens")
        if n and (self.prompt_len + n) % self.block_size:
            raise TraceError(
                f"prompt of {self.prompt_len} and {n} replay tokens do not end on the grid of block size "
                f"{self.block_size}: the rest of the terminal block is missing"
            )
        if not 0 <= self.visible <= n:
            raise TraceError(f"visible length {self.visible} is outside the {n} replay tokens")
        blocks = (self.prompt_len + n) // self.block_size - self.first_block if n else 0
        for name in ("steps_per_block", "weight_versions"):
            if len(getattr(self, name)) != blocks:
                raise TraceError(f"{name} has {len(getattr(self, name))} entries for {blocks} blocks")
        self._check_edits()
        self._check_steps(blocks)
        if not np.isfinite(self.logprob).all() or (self.logprob > 0).any():
            raise TraceError("logprob has entries that are not finite or above 0")
        self._check_selection(blocks)

    def _check_steps(self, blocks: int) -> None:
        """Every step draws or edits something; blocks with tokens that were never drawn are excused from gaps."""
        edited: list[set[int]] = [set() for _ in range(blocks)]
        for block, step, *_ in self.edits:
            edited[block - self.first_block].add(step)
        for index, count in enumerate(self.steps_per_block):
            steps = self.reveal_step[self.block_slice(index)]
            seen = sorted({int(step) for step in steps if step >= 0} | edited[index])
            if seen and seen[-1] >= count:
                raise TraceError(f"block {index}: step {seen[-1]} is not among its {count} steps")
            if -1 not in steps and seen != list(range(count)):
                raise TraceError(f"block {index}: reveal steps {seen} are not 0..{count - 1} without a gap")

    def _check_edits(self) -> None:
        """Each edit replaces what is there at its step, and the last one at a position leaves the final token."""
        for edit in self.edits:
            block, _, position, _, _ = edit
            if not 0 <= position - self.prompt_len < len(self.replay_ids) or position // self.block_size != block:
                raise TraceError(f"edit {edit}: position {position} is no generated token of block {block}")
        current, last = self.drawn_ids, self.reveal_step.astype(np.int64)
        before = (-1, -1)
        for edit in self.edits:
            block, step, position, old, new = edit
            index = position - self.prompt_len
            if (block, step) < before:
                raise TraceError(f"edit {edit} comes after one of block {before[0]}, step {before[1]}: out of order")
            if self.reveal_step[index] < 0 or step <= last[index]:
                raise TraceError(f"edit {edit}: position {position} was drawn or edited at step {last[index]}")
            if current[index] != old or old == new:
                raise TraceError(f"edit {edit}: the token there was {current[index]}")
            current[index], last[index], before = new, step, (block, step)
        if wrong := np.flatnonzero(current != self.replay_ids).tolist():
            position = wrong[0] + self.prompt_len
            raise TraceError(f"edits leave {current[wrong[0]]} at position {position}, not {self.replay_ids[wrong[0]]}")

    def _check_selection(self, blocks: int) -> None:
        if self.select_logprobs is None:
            if self.selection is not None:
                raise TraceError("selection has no select_logprob beside it")
            return
        if len(self.select_logprobs) != blocks:
            raise TraceError(f"select_logprob has {len(self.select_logprobs)} entries for {blocks} blocks")
        for index, (values, steps) in enumerate(zip(self.select_logprobs, self.steps_per_block, strict=True)):
            if len(values) != steps:
                raise TraceError(f"block {index}: select_logprob has {len(values)} entries for {steps} steps")
            if not all(-np.inf < value <= 1e-5 for value in values):
                raise TraceError(f"block {index}: select_logprob has entries that are not finite or above 0")

    def block_slice(self, index: int) -> slice:
        """Replay tokens of the ``index``-th generated block (0 is the block the prompt ends in)."""
        start = (self.first_block + index) * self.block_size - self.prompt_len
        return slice(max(0, start), start + self.block_size)

    def to_line(self) -> dict[str, Any]:
        """The JSON object of this trace in a rollout file (see ``rollout.records`` for the other keys)."""
        shown, rest = slice(0, self.visible), slice(self.visible, None)

        def fields(part: slice) -> dict[str, list]:
            return {name: getattr(self, name)[part].tolist() for name in PER_TOKEN}

        line: dict[str, Any] = {
            "input_ids": self.prompt_ids.tolist(),
            "output_ids": self.replay_ids[shown].tolist(),
            **fields(shown),
            "tail": {"ids": self.replay_ids[rest].tolist(), **fields(rest)},
            "steps_per_block": list(self.steps_per_block),
            "weight_versions": list(self.weight_versions),
            "block_size": self.block_size,
            "sampling_params": {
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "top_k": self.sampling.top_k,
                "min_p": self.sampling.min_p,
            },
        }
        if self.select_logprobs is not None:
            line["select_logprob"] = self.select_logprobs
        if self.selection is not None:
            line["selection"] = asdict(self.selection)
        if self.mixed:
            line["mixed"] = True
        if self.edits:
            line["edits"] = [list(edit) for edit in self.edits]
        return line

    @classmethod
    def from_line(cls, line: Mapping[str, Any], block_size: int | None = None) -> RolloutTrace:
        """Read a trace back from ``to_line``; ``block_size`` is needed if the line does not carry it.

        Raises:
            TraceError: a key is missing or the trace contradicts itself.
        """
        try:
            tail = line["tail"]
            sampling = line["sampling_params"]
            size = block_size if block_size is not None else int(line["block_size"])

            def joined(name: str, dtype: type) -> np.ndarray:
                return np.asarray(list(line[name]) + list(tail[name]), dtype=dtype)

            output_ids = list(line["output_ids"])
            steps = joined("reveal_step", np.int16)
            trace = cls(
                prompt_ids=np.asarray(line["input_ids"], dtype=np.int32),
                replay_ids=np.asarray(output_ids + list(tail["ids"]), dtype=np.int32),
                visible=len(output_ids),
                reveal_step=steps,
                logprob=joined("logprob", np.float32),
                logprob_raw=joined("logprob_raw" if "logprob_raw" in line else "logprob", np.float32),
                confidence=joined("confidence", np.float32),
                steps_per_block=[int(n) for n in line["steps_per_block"]],
                weight_versions=_versions(line),
                block_size=size,
                sampling=SamplingParams(
                    **{k: sampling[k] for k in ("temperature", "top_p", "top_k", "min_p") if k in sampling}
                ),
                select_logprobs=line.get("select_logprob"),
                edits=[tuple(edit) for edit in line.get("edits", [])],
                selection=SelectionRule.from_dict(line.get("selection")),
            )
        except KeyError as error:
            raise TraceError(f"rollout line has no {error}; it was not written by this package's engine") from error
        trace.validate()
        return trace


def _versions(line: Mapping[str, Any]) -> list[str]:
    if "weight_versions" in line:
        return [str(v) for v in line["weight_versions"]]
    return [str(line.get("weight_version", ""))] * len(line["steps_per_block"])
