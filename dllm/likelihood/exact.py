"""Exact log-probs of a trace: replay every state and read the drawn tokens' log-probs off the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dllm.attention import Attention, attention_for, pack_samples
from dllm.decoding.sample_then_select import losing_logprob
from dllm.decoding.sampling import SamplingBatch, SamplingParams, drawn_logprob, sampling_logprobs
from dllm.models.base import BlockDiffusionLM
from dllm.replay import CLEAN, PackedBatch, build_slices
from dllm.trace import RolloutTrace

CHUNK_BYTES = 256 << 20
"""fp32 logits of one chunk; 427 rows of LLaDA2's vocabulary."""


class TargetValues(NamedTuple):
    """Values of a packed batch with T targets and C states of a random choice of positions.

    A tuple, because FSDP finds the outputs of a forward pass by walking tuples, lists and dicts.

    Attributes:
        logprob: float32 [T].
        entropy: float32 [T], empty if not asked for.
        select: float32 [C], log-prob of the choice of positions of each state of ``PackedBatch.rest``.
    """

    logprob: Tensor
    entropy: Tensor
    select: Tensor


def _values(
    hidden: Tensor, head: nn.Linear, token: Tensor, sampling: SamplingBatch, mask_id: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    logp = sampling_logprobs(head(hidden), sampling, mask_id, keep=token)
    drawn = drawn_logprob(logp, sampling, token)
    if not entropy:
        return drawn, drawn.new_zeros(0)
    return drawn, -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def _losing(
    hidden: Tensor,
    head: nn.Linear,
    position: Tensor,
    bound: Tensor,
    worst: Tensor,
    inclusive: Tensor,
    sampling: SamplingBatch,
    mask_id: int,
) -> tuple[Tensor]:
    logp = sampling_logprobs(head(hidden), sampling, mask_id)
    return (losing_logprob(logp, position, bound, worst, inclusive, lost=True),)


def in_chunks(
    function: Callable, hidden: Tensor, head: nn.Linear, *columns: Any, constants: tuple = ()
) -> list[Tensor]:
    """``function(hidden, head, *columns, *constants)`` over pieces of the rows of ``hidden`` and ``columns``.

    Logits exist for one piece at a time; with gradients on, a piece is recomputed in backward.
    """
    count, chunk_rows = len(hidden), max(1, CHUNK_BYTES // (4 * head.out_features))
    chunks = []
    for start in range(0, max(1, count), chunk_rows):
        index = torch.arange(start, min(start + chunk_rows, count), device=hidden.device)
        parts = [c.rows(index) if isinstance(c, SamplingBatch) else c[index] for c in columns]
        arguments = (hidden[index], head, *parts, *constants)
        if torch.is_grad_enabled() and count > chunk_rows:
            chunks.append(torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False))
        else:
            chunks.append(function(*arguments))
    return [torch.cat(column) for column in zip(*chunks, strict=True)]


def target_head(
    batch: PackedBatch, sampling: SamplingBatch, mask_id: int, entropy: bool = False
) -> Callable[[Tensor, nn.Linear], TargetValues]:
    """Head for ``BlockDiffusionLM.forward`` that scores the targets of ``batch``, and its rest.

    Args:
        sampling: parameters of the samples (row i belongs to sample i).
    """

    def head(hidden: Tensor, lm_head: nn.Linear) -> TargetValues:
        picked = hidden[batch.target_row, batch.target_column]
        per_target = sampling.rows(batch.target_sample)
        constants = (mask_id, entropy)
        logprob, entropies = in_chunks(_values, picked, lm_head, batch.target_token, per_target, constants=constants)
        return TargetValues(logprob, entropies, _select(batch, sampling, mask_id, hidden, lm_head, logprob))

    return head


def _select(
    batch: PackedBatch, sampling: SamplingBatch, mask_id: int, hidden: Tensor, lm_head: nn.Linear, logprob: Tensor
) -> Tensor:
    """Log-prob of the choice of positions of every state of ``batch.rest``: float32 [C].

    Where the best few were kept, the others lost to the worst of them; its probability is the model's own, taken as a
    constant: it moves only at the jumps of a step function.
    """
    rest = batch.rest
    if rest is None:
        return logprob.new_zeros(0)
    kept = logprob.detach()[rest.kept].exp()
    worst_kept = kept.new_full(rest.threshold.shape, torch.inf).scatter_reduce(0, rest.kept_choice, kept, "amin")
    target = rest.kept
    position = batch.position[batch.target_row[target], batch.target_column[target]]
    last = torch.where(kept == worst_kept[rest.kept_choice], position, -1)
    worst = torch.full_like(rest.first, -1).scatter_reduce(0, rest.kept_choice, last, "amax")
    reached = rest.threshold > 0
    bound = torch.where(reached, rest.threshold, worst_kept)
    (losing,) = in_chunks(
        _losing,
        hidden[rest.row, rest.column],
        lm_head,
        batch.position[rest.row, rest.column],
        bound[rest.choice],
        worst[rest.choice],
        reached[rest.choice],
        sampling.rows(batch.target_sample[rest.first[rest.choice]]),
        constants=(mask_id,),
    )
    return torch.zeros_like(bound).index_add(0, rest.choice, losing)


def select_logprobs(batch: PackedBatch, values: TargetValues) -> Tensor:
    """float32 [T]: log-prob of a state's choice of positions at the first target of the state, 0 elsewhere."""
    if batch.rest is None:
        return torch.zeros_like(values.logprob)
    return torch.zeros_like(values.logprob).index_add(0, batch.rest.first, values.select)


def action_logprobs(batch: PackedBatch, values: TargetValues) -> Tensor:
    """float32 [T], whose sum over the targets of a sample is the log-prob of its trajectory.

    The log-prob of the choice of positions rides on the first token of its step (``RolloutTrace.action_logprob``).
    """
    return values.logprob if batch.rest is None else values.logprob + select_logprobs(batch, values)


def replay_logprobs(
    model: BlockDiffusionLM,
    traces: Sequence[RolloutTrace],
    mask_id: int,
    *,
    sampling: Sequence[SamplingParams] | None = None,
    device: torch.device | str = "cpu",
    attention: Callable[[PackedBatch], Attention] = attention_for,
) -> list[Tensor]:
    """Log-prob of every drawn token of every trace under ``model``.

    Args:
        sampling: how the tokens were drawn; None takes each trace's own parameters.

    Returns:
        One float32 [R] per trace, 0 where a token was never drawn; with ``trace.selection``, the log-probs of the
        choices of positions included (``action_logprobs``).
    """
    batch = pack_traces(traces, mask_id, device)
    params = SamplingBatch.from_params(list(sampling or [t.sampling for t in traces]), [0] * len(traces), device)
    values = model(batch.input_ids, batch.position, attention(batch), target_head(batch, params, mask_id))
    return scatter_targets(batch, action_logprobs(batch, values), [len(t.replay_ids) for t in traces])


def pack_traces(traces: Sequence[RolloutTrace], mask_id: int, device: torch.device | str) -> PackedBatch:
    """The states of all traces in one batch on ``device``."""
    return pack_samples([build_slices(trace, mask_id) for trace in traces], traces[0].block_size, device)


def scatter_targets(batch: PackedBatch, values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Values [T] of the targets as one tensor per sample, in replay order; 0 where there was no target."""
    offsets = torch.tensor([0, *lengths], device=values.device).cumsum(0)
    flat = values.new_zeros(int(offsets[-1]))
    flat = flat.index_put((offsets[batch.target_sample] + batch.target_index,), values)
    return list(flat.split(list(lengths)))


def router_tie_targets(batch: PackedBatch, gap: Tensor, threshold: float = 1e-5) -> Tensor:
    """Which targets depend on a router tie.

    A target depends on every token of its slice and, through keys and values, on all clean tokens of earlier
    blocks of its sample. So do the other positions of its slice, whose log-prob a first target may carry.

    Args:
        gap: float [rows * L], smallest selection gap of each token (``BlockDiffusionLM.router_gap``).

    Returns:
        bool [T].
    """
    tied = (gap.view_as(batch.doc) < threshold) & (batch.doc >= 0)
    clean = batch.slice_id == CLEAN
    result = torch.zeros(len(batch.target_row), dtype=torch.bool, device=gap.device)
    if not bool(tied.any()):
        return result
    slices = set(batch.slice_id[tied & ~clean].tolist())
    first_block: dict[int, int] = {}
    for doc, block in zip(batch.doc[tied & clean].tolist(), batch.block[tied & clean].tolist(), strict=True):
        first_block[doc] = min(block, first_block.get(doc, block))
    row, column = batch.target_row, batch.target_column
    for index, (slice_id, doc, block) in enumerate(
        zip(
            batch.slice_id[row, column].tolist(),
            batch.doc[row, column].tolist(),
            batch.block[row, column].tolist(),
            strict=True,
        )
    ):
        result[index] = slice_id in slices or first_block.get(doc, block) < block
    return result
