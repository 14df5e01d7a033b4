"""States in which the tokens of a response are scored, and how the scores add up.

Every likelihood is a weighted sum of log-probs: each of its states is a slice (``dllm.replay``), each hidden
position of a state is a target with a weight, and the value of a token is the weighted sum over its targets.
The estimators differ in nothing but slices and weights, so they share packing, attention and head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dllm.attention import pack_samples
from dllm.replay import PackedBatch, SampleSlices, Slice
from dllm.trace import RolloutTrace


@dataclass
class States:
    """The states of one sample and the weights of their targets.

    Attributes:
        sample: clean tokens and slices, as the replay packs them.
        weights: float32 [T], one per target, slice after slice in the order of each slice's ``columns``.
    """

    sample: SampleSlices
    weights: np.ndarray

    def __post_init__(self) -> None:
        targets = sum(len(piece.columns) for piece in self.sample.slices)
        assert len(self.weights) == targets, f"{len(self.weights)} weights for {targets} targets"


class Likelihood(Protocol):
    """A way to score a response: a frozen dataclass of its options.

    ``states`` takes nothing from a trace but prompt, tokens and block size, except for ``exact``, which needs the
    reveal steps. With the default generator the masks depend on the sample alone (``content_generator``).
    """

    def states(self, trace: RolloutTrace, mask_id: int, generator: np.random.Generator | None = None) -> States: ...


class Block(NamedTuple):
    """One block that holds tokens of the response.

    Attributes:
        start: index of its first position in the whole sequence.
        ids: int64 [B], final tokens.
        free: int64 [L], columns that the response filled: tokens of the prompt that share the block are given, and
            positions that still hold the mask were never filled.
    """

    start: int
    ids: np.ndarray
    free: np.ndarray


def response_blocks(trace: RolloutTrace, mask_id: int) -> Iterator[Block]:
    """Blocks of the absolute grid with at least one token of the response, in order."""
    size = trace.block_size
    ids = sequence_ids(trace)
    for start in range(trace.first_block * size, len(ids), size):
        final = ids[start : start + size]
        given = np.arange(start, start + size) < trace.prompt_len
        free = np.flatnonzero(~given & (final != mask_id))
        if len(free):
            yield Block(start, final, free)


def sequence_ids(trace: RolloutTrace) -> np.ndarray:
    """Prompt and replay tokens: int64 [P + R]."""
    return np.concatenate([trace.prompt_ids, trace.replay_ids]).astype(np.int64)


def hidden_slice(block: Block, hidden: np.ndarray, trace: RolloutTrace, mask_id: int, step: int) -> Slice:
    """The state of ``block`` with the columns ``hidden`` (int64 [k], of the free ones) masked, all of them targets."""
    ids = block.ids.copy()
    ids[hidden] = mask_id
    return Slice(
        ids=ids,
        start=block.start,
        columns=hidden,
        tokens=block.ids[hidden],
        token_index=hidden + block.start - trace.prompt_len,
        step=step,
    )


def collect(trace: RolloutTrace, scored: Sequence[tuple[Slice, float]], clean: np.ndarray | None = None) -> States:
    """States whose slices have one weight each for all of their targets.

    Args:
        clean: int64 [P + R], what the later blocks see; None takes the sequence itself.
    """
    ids = sequence_ids(trace) if clean is None else clean
    slices = [piece for piece, _ in scored]
    weights = [np.full(len(piece.columns), weight, np.float32) for piece, weight in scored]
    sample = SampleSlices(clean=ids[: max(0, len(ids) - trace.block_size)], slices=slices)
    return States(sample, np.concatenate([np.zeros(0, np.float32), *weights]))


def content_generator(trace: RolloutTrace, purpose: str) -> np.random.Generator:
    """Random numbers that depend on the tokens of the sample and nothing else.

    Old and new policy then share their masks: with masks of their own, the noise of the two estimates would not
    cancel in a ratio, and single-sample ratios reach 1e5 (StableDRL).
    """
    content = np.concatenate([[trace.prompt_len], sequence_ids(trace)]).astype("<i8").tobytes()
    digest = hashlib.blake2b(content, digest_size=16, person=purpose.encode()[:16]).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def pack_states(
    states: Sequence[States], block_size: int, device: torch.device | str, owners: Sequence[int] | None = None
) -> tuple[PackedBatch, Tensor]:
    """All states in one batch on ``device``, and the weight of each of its targets (float32 [T]).

    Args:
        owners: sample that each element belongs to, if some are pieces of one sample (``split``); None: its own.
    """
    batch = pack_samples([s.sample for s in states], block_size, device)
    # Packing reorders samples, never the targets within one.
    order = batch.target_sample.argsort(stable=True)
    flat = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(s.weights for s in states)])).to(device)
    weights = torch.empty_like(flat).index_copy_(0, order, flat)
    if owners is not None:
        batch = replace(batch, target_sample=torch.tensor(list(owners), device=device)[batch.target_sample])
    return batch, weights


def _token_of(batch: PackedBatch, lengths: Sequence[int]) -> tuple[Tensor, int]:
    """Index of each target's token among the tokens of all samples: int64 [T], and how many tokens there are."""
    offsets = torch.tensor([0, *lengths], device=batch.target_sample.device).cumsum(0)
    return offsets[batch.target_sample] + batch.target_index, int(offsets[-1])


def token_sums(batch: PackedBatch, values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Sum of ``values`` ([T]) over the targets of every token: one tensor per sample, in replay order, 0 without any.

    Args:
        lengths: replay tokens of each sample.
    """
    token, count = _token_of(batch, lengths)
    return list(values.new_zeros(count).index_put((token,), values, accumulate=True).split(list(lengths)))


def target_shares(batch: PackedBatch, lengths: Sequence[int]) -> Tensor:
    """1 / number of targets of the token, per target: float32 [T]. Sums with these weights are means."""
    token, count = _token_of(batch, lengths)
    return 1.0 / torch.bincount(token, minlength=count)[token].float()


def token_power_means(
    batch: PackedBatch, logprob: Tensor, weights: Tensor, lengths: Sequence[int], power: float
) -> list[Tensor]:
    """log(sum of w p^power) / power over the targets of every token: one tensor per sample, 0 without any target."""
    token, count = _token_of(batch, lengths)
    terms = weights.log() + power * logprob
    top = terms.new_full((count,), -torch.inf).scatter_reduce(0, token, terms.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    total = terms.new_zeros(count).index_put((token,), (terms - top[token]).exp(), accumulate=True)
    scored = total > 0
    value = (torch.where(scored, total, 1.0).log() + top) / power
    return list(torch.where(scored, value, 0.0).split(list(lengths)))


def take(states: States, chosen: Sequence[int]) -> States:
    """The slices with these indices, with the clean tokens that they see."""
    ends = np.cumsum([len(piece.columns) for piece in states.sample.slices])
    weights = [states.weights[ends[i] - len(states.sample.slices[i].columns) : ends[i]] for i in chosen]
    slices = [states.sample.slices[i] for i in chosen]
    seen = max((piece.start for piece in slices), default=0)
    sample = SampleSlices(states.sample.clean[:seen], slices)
    return States(sample, np.concatenate([np.zeros(0, np.float32), *weights]))


def split(states: States, max_tokens: int) -> list[States]:
    """Pieces of at most ``max_tokens`` tokens for separate forward passes, each with the clean tokens it sees.

    Values and gradients of the pieces add up to those of the whole. A slice that does not fit with its clean tokens
    is a piece of its own.
    """
    pieces: list[list[int]] = []
    used = 0
    for index, piece in enumerate(states.sample.slices):
        alone = piece.start + len(piece.ids)
        if pieces and piece.start == states.sample.slices[pieces[-1][-1]].start:
            grown = used + len(piece.ids)
        else:
            grown = alone + len(piece.ids) * (len(pieces[-1]) if pieces else 0)
        if pieces and grown <= max_tokens:
            pieces[-1].append(index)
            used = grown
        else:
            pieces.append([index])
            used = alone
    return [take(states, chosen) for chosen in pieces]


def forward_tokens(states: Sequence[States], sequence_tokens: int) -> tuple[int, float]:
    """Cost of forward passes over ``states``, before equal prefixes are shared.

    Args:
        sequence_tokens: P + R, summed over the samples: what an autoregressive model would process.

    Returns:
        Tokens, and their multiple of ``sequence_tokens``.
    """
    tokens = sum(s.sample.packed_length for s in states)
    return tokens, tokens / sequence_tokens
