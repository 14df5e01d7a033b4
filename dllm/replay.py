"""Rebuild the states a response was decoded in, and pack them into one forward pass.

Layout of a sample with prompt length P, N = P + R tokens and block size B: a clean copy of the first N - B
tokens, then one *slice* of B tokens for every (block, step) that revealed something. A slice sees itself and
the clean tokens of earlier blocks, as the engine's block did; clean tokens see clean tokens up to the end of
their own block. Cost: N - B + B * (number of slices) tokens. The mask generalises the one of BD3-LM (Arriola
et al., "Block Diffusion", ICLR 2025, section 3) from one noisy copy per block to several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm.trace import RolloutTrace

CLEAN = -1
PADDING = -1
SLICES_PER_ROW = 8


@dataclass
class Rest:
    """Positions of a state that drew a token and did not keep it (``dllm.decoding.sample_then_select``).

    Attributes:
        columns: int64 [r], positions within the block.
        threshold: what the draws that were kept are above; 0 where the best few were kept instead.
    """

    columns: np.ndarray
    threshold: float


@dataclass
class Slice:
    """One intermediate state of one block.

    Attributes:
        ids: int64 [B], the block as the model saw it.
        start: index of the block's first position in the whole sequence.
        columns: int64 [k], positions within the block whose token is a target.
        tokens: int64 [k], the tokens drawn there.
        token_index: int64 [k], index of each target among the sample's replay tokens.
        step: denoise step within the block.
        rest: the other hidden positions, where the choice of positions was random.
    """

    ids: np.ndarray
    start: int
    columns: np.ndarray
    tokens: np.ndarray
    token_index: np.ndarray
    step: int
    rest: Rest | None = None


@dataclass
class SampleSlices:
    """A clean prefix and the slices behind it.

    Attributes:
        clean: int64 [N - B].
        slices: of one sample ordered by block and step, or of several samples one after the other.
        owners: index of the sample each slice belongs to, where several share the prefix.
    """

    clean: np.ndarray
    slices: list[Slice]
    owners: list[int] | None = None

    @property
    def packed_length(self) -> int:
        return len(self.clean) + sum(len(s.ids) for s in self.slices)


def build_slices(trace: RolloutTrace, mask_id: int) -> SampleSlices:
    """The states of ``trace``, one slice for every (block, step) at which a token was drawn.

    Every drawn token is a target exactly once, edited later or not. Tokens with reveal step -1 stay masked in every
    state. Steps that only edit have no slice: their edits are part of the next state.
    """
    size, prompt_len = trace.block_size, trace.prompt_len
    ids = np.concatenate([trace.prompt_ids, trace.replay_ids]).astype(np.int64)
    drawn_ids = np.concatenate([trace.prompt_ids, trace.drawn_ids]).astype(np.int64)
    step_of = np.concatenate([np.full(prompt_len, -2, dtype=np.int64), trace.reveal_step.astype(np.int64)])
    logprob = np.concatenate([np.zeros(prompt_len, np.float32), trace.logprob])
    slices = []
    for block in range(trace.first_block, len(ids) // size):
        rows = slice(block * size, (block + 1) * size)
        steps, drawn = step_of[rows], drawn_ids[rows]
        edits = [edit for edit in trace.edits if edit[0] == block]
        for step in sorted(set(steps[steps >= 0].tolist())):
            state = drawn.copy()
            for _, edited, position, _, new in edits:
                if edited < step:
                    state[position - block * size] = new
            hidden = (steps >= step) | (steps == -1)
            columns = np.flatnonzero(steps == step)
            slices.append(
                Slice(
                    ids=np.where(hidden, mask_id, state),
                    start=block * size,
                    columns=columns,
                    tokens=drawn[columns],
                    token_index=columns + block * size - prompt_len,
                    step=step,
                    rest=_rest(trace, hidden, columns, logprob[rows]),
                )
            )
    return SampleSlices(clean=ids[: max(0, len(ids) - size)], slices=slices)


def _rest(trace: RolloutTrace, hidden: np.ndarray, kept: np.ndarray, logprob: np.ndarray) -> Rest | None:
    """The positions that lost at one step; None where the choice was certain."""
    if trace.selection is None or trace.sampling.greedy:
        return None
    worst = float(np.exp(logprob[kept].min()))
    reached = trace.selection.reached(len(kept), int(hidden.sum()), worst)
    others = hidden.copy()
    others[kept] = False
    return Rest(np.flatnonzero(others), trace.selection.threshold if reached else 0.0)


def share_prefixes(samples: Sequence[SampleSlices], slices_per_row: int = SLICES_PER_ROW) -> list[SampleSlices]:
    """Let samples with equal clean tokens share one copy of them.

    A slice sees its own tokens and clean tokens of earlier blocks, nothing else, so slices of many samples may stand
    behind one prefix. The samples of a prompt's group do while they are in the same block: for short answers about
    half of the forward pass is saved.

    Args:
        slices_per_row: at most this many slices share a copy; longer rows save more clean tokens and cost more
            attention (on a CPU the sum is smallest about here).
    """
    merged: list[SampleSlices] = []
    open_row: dict[bytes, SampleSlices] = {}
    for index, sample in enumerate(samples):
        key, owners = sample.clean.tobytes(), [index] * len(sample.slices)
        row = open_row.get(key)
        if row is None or len(row.slices) + len(sample.slices) > slices_per_row:
            open_row[key] = SampleSlices(sample.clean, list(sample.slices), owners)
            merged.append(open_row[key])
        else:
            assert row.owners is not None
            row.slices.extend(sample.slices)
            row.owners.extend(owners)
    return merged


@dataclass
class PackedRest:
    """The ``Rest`` of C states of a packed batch; a state with none of its own is left out.

    Attributes:
        row, column: int64 [r], where the hidden states of the positions are.
        choice: int64 [r], index of the state each belongs to.
        kept: int64 [k], the targets of these states.
        kept_choice: int64 [k], index of the state each of them belongs to.
        first: int64 [C], first target of each state.
        threshold: float32 [C], as in ``Rest``.
    """

    row: Tensor
    column: Tensor
    choice: Tensor
    kept: Tensor
    kept_choice: Tensor
    first: Tensor
    threshold: Tensor

    @classmethod
    def collect(cls, slices: Sequence[tuple[int, int, int, Slice]]) -> PackedRest | None:
        """From (row, first column, index of the first target, slice) of every slice of a batch."""
        chosen = [(*place, place[-1].rest) for place in slices if place[-1].rest is not None]
        if not chosen:
            return None
        rests = [rest for *_, rest in chosen if rest is not None]
        sizes, kept = [len(rest.columns) for rest in rests], [len(piece.columns) for *_, piece, _ in chosen]
        first = np.asarray([target for _, _, target, _, _ in chosen])
        states = np.arange(len(chosen))
        return cls(
            row=_int64(np.repeat([row for row, *_ in chosen], sizes)),
            column=_int64(np.concatenate([begin + r.columns for (_, begin, *_), r in zip(chosen, rests, strict=True)])),
            choice=_int64(np.repeat(states, sizes)),
            kept=_int64(np.concatenate([f + np.arange(k) for f, k in zip(first, kept, strict=True)])),
            kept_choice=_int64(np.repeat(states, kept)),
            first=_int64(first),
            threshold=torch.tensor([rest.threshold for rest in rests], dtype=torch.float32),
        )


@dataclass
class PackedBatch:
    """Samples packed into rows of equal length.

    Attributes:
        input_ids, position: int64 [rows, length].
        doc: int64 [rows, length], index of the packed ``SampleSlices``; ``PADDING`` behind the last one.
        block: int64 [rows, length], position // block size.
        slice_id: int64 [rows, length], unique per slice; ``CLEAN`` for clean tokens and padding.
        target_row, target_column: int64 [T], where the hidden states of the targets are.
        target_token: int64 [T].
        target_sample, target_index: int64 [T], sample and replay token of each target.
        rest: positions to score beside the targets, where the choice of positions was random; None without any.
    """

    input_ids: Tensor
    position: Tensor
    doc: Tensor
    block: Tensor
    slice_id: Tensor
    target_row: Tensor
    target_column: Tensor
    target_token: Tensor
    target_sample: Tensor
    target_index: Tensor
    rest: PackedRest | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        return _moved(self, device)

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.input_ids.numel()


def _moved(value: Any, device: torch.device | str) -> Any:
    if value is None or isinstance(value, Tensor):
        return value if value is None else value.to(device)
    return type(value)(**{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})


def _int64(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def assign_rows(lengths: Sequence[int], row_length: int | None) -> list[list[int]]:
    """Which samples share a row: first-fit decreasing into rows of ``row_length``, or one sample per row.

    A sample longer than ``row_length`` gets a row of its own.
    """
    if row_length is None:
        return [[i] for i in range(len(lengths))]
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row, space in enumerate(free):
            if lengths[index] <= space:
                rows[row].append(index)
                free[row] -= lengths[index]
                break
        else:
            rows.append([index])
            free.append(max(0, row_length - lengths[index]))
    return rows


def pack(
    samples: Sequence[SampleSlices], block_size: int, row_length: int | None = None, multiple: int = 1
) -> PackedBatch:
    """Pack samples into rows.

    Args:
        row_length: tokens per row to aim for; None gives every sample its own row (dense attention wants that,
            FlexAttention wants one long row).
        multiple: row lengths are rounded up to a multiple of this (128 for FlexAttention's tiles).
    """
    rows = assign_rows([s.packed_length for s in samples], row_length)
    length = max((sum(samples[i].packed_length for i in row) for row in rows), default=0)
    length = -(-length // multiple) * multiple
    shape = (len(rows), length)
    ids, position = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    doc = np.full(shape, PADDING, np.int64)
    slice_id = np.full(shape, CLEAN, np.int64)
    targets: list[tuple[np.ndarray, ...]] = []
    places: list[tuple[int, int, int, Slice]] = []
    count = 0
    for row, members in enumerate(rows):
        cursor = 0
        for sample in members:
            clean = samples[sample].clean
            end = cursor + len(clean)
            ids[row, cursor:end] = clean
            position[row, cursor:end] = np.arange(len(clean))
            owners = samples[sample].owners or [sample] * len(samples[sample].slices)
            for piece, owner in zip(samples[sample].slices, owners, strict=True):
                begin, end = end, end + block_size
                ids[row, begin:end] = piece.ids
                position[row, begin:end] = piece.start + np.arange(block_size)
                slice_id[row, begin:end] = len(places)
                places.append((row, begin, count, piece))
                size = len(piece.columns)
                count += size
                targets.append(
                    (np.full(size, row), begin + piece.columns, piece.tokens, np.full(size, owner), piece.token_index)
                )
            doc[row, cursor:end] = sample
            cursor = end
    joined = [np.concatenate(column) if targets else np.zeros(0, np.int64) for column in zip(*targets, strict=True)]
    target_row, target_column, token, owner_of, index = map(_int64, joined or [np.zeros(0, np.int64)] * 5)
    return PackedBatch(
        _int64(ids),
        _int64(position),
        _int64(doc),
        _int64(position // block_size),
        _int64(slice_id),
        target_row,
        target_column,
        token,
        owner_of,
        index,
        PackedRest.collect(places),
    )
