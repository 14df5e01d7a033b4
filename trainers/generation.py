"""Batched decoding in plain torch: many prompts at once, for evaluation without an engine.

Every denoise step runs the whole sequence so far, without a KV cache. That is exact, short, and fast enough
for the small models it is used on; rollouts of a training run come from the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dllm.attention import attention_for, pack_samples
from dllm.config import ConfigError
from dllm.decoding.base import BlockBatch, Decoder
from dllm.decoding.sampling import SamplingBatch, SamplingParams
from dllm.models.base import BlockDiffusionLM
from dllm.reference import visible_length
from dllm.replay import SampleSlices, Slice
from dllm.trace import PER_TOKEN, RolloutTrace


@dataclass
class _Request:
    """A response under way: its tokens so far and, per finished block, what was logged."""

    prompt_len: int
    ids: list[int]
    log: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    visible: int | None = None


def _logits(model: BlockDiffusionLM, context: Tensor, blocks: Tensor) -> Tensor:
    """Logits float32 [n, B, V] of blocks (int64 [n, B]) behind complete blocks (int64 [n, C])."""
    n, size = blocks.shape
    device, start, columns = blocks.device, context.shape[1], np.arange(size)
    samples = [
        SampleSlices(clean, [Slice(block, start, columns, block, columns, 0)])
        for clean, block in zip(context.cpu().numpy(), blocks.cpu().numpy(), strict=True)
    ]
    batch = pack_samples(samples, size, device)
    picked = model(
        batch.input_ids,
        batch.position,
        attention_for(batch),
        lambda hidden, head: head(hidden[batch.target_row, batch.target_column]).float(),
    ).view(n, size, -1)
    return torch.empty_like(picked).index_copy_(0, batch.target_sample[::size], picked)


def _decode_blocks(
    model: BlockDiffusionLM, decoder: Decoder, context: Tensor, block: Tensor, sampling: SamplingBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """Denoise n blocks to the end.

    Returns:
        ids int64 [n, B], reveal step int64 [n, B] (-1 for given tokens), and float32 [3, n, B] with
        log-prob, raw log-prob and confidence.
    """
    n, size = block.shape
    ids, given = block.clone(), block != decoder.mask_id
    reveal_step = torch.full_like(ids, -1)
    values = torch.zeros(3, n, size, device=ids.device)
    counter = torch.zeros(n, dtype=torch.int64, device=ids.device)
    start = torch.full((n,), context.shape[1], dtype=torch.int64, device=ids.device)
    for step in range(decoder.max_steps(size)):
        rows = (ids == decoder.mask_id).any(1).nonzero()[:, 0]
        if not len(rows):
            break
        state = BlockBatch(
            ids[rows], given[rows], start[rows], torch.full_like(rows, step), counter[rows], sampling.rows(rows)
        )
        result = decoder.step(state, _logits(model, context[rows], ids[rows]))
        if bool(result.failed.any()):
            raise FloatingPointError(f"NaN or infinite logits in the blocks at position {int(start[0])}, step {step}")
        ids[rows], counter[rows] = result.ids, result.counter
        reveal_step[rows] = torch.where(result.revealed, step, reveal_step[rows])
        fresh = torch.stack([result.logprob, result.logprob_raw, result.confidence])
        values[:, rows] = torch.where(result.revealed, fresh, values[:, rows])
    return ids, reveal_step, values


@torch.no_grad()
def generate(
    model: BlockDiffusionLM,
    prompts: Sequence[Sequence[int]],
    decoder: Decoder,
    *,
    block_size: int,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    sampling: SamplingParams | None = None,
    seeds: Sequence[int] | None = None,
    batch_size: int = 256,
) -> list[RolloutTrace]:
    """Decode one response per prompt, those that are at the same block together.

    The result of a prompt depends on its tokens and its seed alone, and equals ``dllm.reference.decode`` up
    to rounding. Decoders that edit tokens or choose positions at random are not supported.

    Args:
        sampling: for all prompts; None samples at temperature 1.
        seeds: one per prompt; 0 for all if None.
        batch_size: blocks per forward pass.

    Raises:
        ConfigError: the decoder edits tokens or chooses positions at random.
        FloatingPointError: the model returned NaN or infinite logits.
    """
    if getattr(decoder, "edits", False) or getattr(decoder, "selection", None) is not None:
        raise ConfigError(
            f"{type(decoder).__name__} edits tokens or chooses positions at random, which evaluation without an engine "
            "does not log; use SelectThenSample"
        )
    device = next(model.parameters()).device
    params = sampling or SamplingParams()
    seeds = list(seeds) if seeds is not None else [0] * len(prompts)
    requests = [_Request(len(prompt), list(prompt)) for prompt in prompts]
    pending = list(range(len(requests)))
    while pending:
        first = min(len(requests[i].ids) // block_size for i in pending)
        current = [i for i in pending if len(requests[i].ids) // block_size == first][:batch_size]
        start = first * block_size
        rows = [requests[i].ids + [decoder.mask_id] * (start + block_size - len(requests[i].ids)) for i in current]
        whole = torch.tensor(rows, device=device)
        batch = SamplingBatch.from_params([params] * len(current), [seeds[i] for i in current], device)
        ids, reveal_step, values = _decode_blocks(model, decoder, whole[:, :start], whole[:, start:], batch)
        for row, index in enumerate(current):
            request = requests[index]
            fresh = (whole[row, start:] == decoder.mask_id).cpu().numpy()
            columns = (reveal_step[row], *values[:, row])
            request.log.append(tuple(column.cpu().numpy()[fresh] for column in columns))
            request.steps.append(int(reveal_step[row].max()) + 1)
            request.ids = request.ids[:start] + ids[row].tolist()
            request.visible = visible_length(request.ids[request.prompt_len :], eos_ids, max_new_tokens)
        pending = [i for i in pending if requests[i].visible is None]
    return [_trace(request, block_size, params) for request in requests]


def _trace(request: _Request, block_size: int, params: SamplingParams) -> RolloutTrace:
    columns = dict(zip(PER_TOKEN, map(np.concatenate, zip(*request.log, strict=True)), strict=True))
    return RolloutTrace(
        prompt_ids=np.asarray(request.ids[: request.prompt_len], dtype=np.int32),
        replay_ids=np.asarray(request.ids[request.prompt_len :], dtype=np.int32),
        visible=int(request.visible or 0),
        reveal_step=columns.pop("reveal_step").astype(np.int16),
        **{name: column.astype(np.float32) for name, column in columns.items()},
        steps_per_block=request.steps,
        weight_versions=["trainer"] * len(request.steps),
        block_size=block_size,
        sampling=params,
    )
