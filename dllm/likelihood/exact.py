"""Exact log-probs of a trace: replay every state and read the drawn tokens' log-probs off the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dllm.attention import Attention, attention_for, pack_samples
from dllm.decoding.sampling import SamplingBatch, SamplingParams, drawn_logprob, sampling_logprobs
from dllm.models.llada2 import LLaDA2MoeModelLM
from dllm.replay import CLEAN, PackedBatch, build_slices
from dllm.trace import RolloutTrace

CHUNK_BYTES = 256 << 20
"""fp32 logits of one chunk; 427 rows of LLaDA2's vocabulary."""


class TargetValues(NamedTuple):
    """Per target of a packed batch: log-prob float32 [T] and entropy float32 [T] (empty if not asked for).

    A tuple, because FSDP finds the outputs of a forward pass by walking tuples, lists and dicts.
    """

    logprob: Tensor
    entropy: Tensor


def _values(
    hidden: Tensor, head: nn.Linear, token: Tensor, sampling: SamplingBatch, mask_id: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    logp = sampling_logprobs(head(hidden), sampling, mask_id, keep=token)
    drawn = drawn_logprob(logp, sampling, token)
    if not entropy:
        return drawn, drawn.new_zeros(0)
    return drawn, -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def target_head(
    batch: PackedBatch, sampling: SamplingBatch, mask_id: int, entropy: bool = False
) -> Callable[[Tensor, nn.Linear], TargetValues]:
    """Head for ``LLaDA2MoeModelLM.forward`` that scores the targets of ``batch``.

    Logits exist for the targets only and in chunks; with gradients on, a chunk is recomputed in backward.

    Args:
        sampling: parameters of the samples (row i belongs to sample i).
    """

    def head(hidden: Tensor, lm_head: nn.Linear) -> TargetValues:
        picked = hidden[batch.target_row, batch.target_column]
        per_target = sampling.rows(batch.target_sample)
        chunk_rows = max(1, CHUNK_BYTES // (4 * lm_head.out_features))
        chunks = []
        for start in range(0, max(1, len(picked)), chunk_rows):
            rows = slice(start, start + chunk_rows)
            index = torch.arange(start, min(start + chunk_rows, len(picked)), device=picked.device)
            arguments = (picked[rows], lm_head, batch.target_token[rows], per_target.rows(index), mask_id, entropy)
            if torch.is_grad_enabled() and len(picked) > chunk_rows:
                chunks.append(torch.utils.checkpoint.checkpoint(_values, *arguments, use_reentrant=False))
            else:
                chunks.append(_values(*arguments))
        logprob, entropies = (torch.cat(column) for column in zip(*chunks, strict=True))
        return TargetValues(logprob, entropies)

    return head


def replay_logprobs(
    model: LLaDA2MoeModelLM,
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
        One float32 [R] per trace, 0 where a token was never drawn.
    """
    batch = pack_traces(traces, mask_id, device)
    params = SamplingBatch.from_params(list(sampling or [t.sampling for t in traces]), [0] * len(traces), device)
    values = model(batch.input_ids, batch.position, attention(batch), target_head(batch, params, mask_id))
    return scatter_targets(batch, values.logprob, [len(t.replay_ids) for t in traces])


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
    blocks of its sample.

    Args:
        gap: float [rows * L], smallest selection gap of each token (``LLaDA2MoeModelLM.router_gap``).

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
