"""Slow and obvious decoder: the oracle of the tests, never a serving path.

No KV cache, no batching: every denoise step runs the whole sequence so far.
"""

from __future__ import annotations

import numpy as np
import torch

from dllm.attention import dense_attention
from dllm.decoding.base import BlockBatch, Decoder
from dllm.decoding.sampling import SamplingBatch, SamplingParams, effective_sampling
from dllm.models.base import BlockDiffusionLM
from dllm.replay import CLEAN, PackedBatch
from dllm.trace import RolloutTrace


def _clean_batch(ids: torch.Tensor, block_size: int) -> PackedBatch:
    position = torch.arange(len(ids))[None]
    nothing = torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        ids[None],
        position,
        torch.zeros_like(position),
        position // block_size,
        torch.full_like(position, CLEAN),
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
    )


@torch.no_grad()
def block_logits(model: BlockDiffusionLM, ids: torch.Tensor, block_size: int) -> torch.Tensor:
    """Logits float32 [B, V] of the last block of ``ids`` (int64 [N], N a multiple of the block size).

    Block-causal attention: a token sees all earlier blocks and its own block in both directions.
    """
    batch = _clean_batch(ids, block_size)
    return model(
        batch.input_ids,
        batch.position,
        dense_attention(batch),
        lambda hidden, head: head(hidden[0, -block_size:]).float(),
    )


def decode(
    model: BlockDiffusionLM,
    prompt_ids: list[int],
    decoder: Decoder,
    *,
    block_size: int,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    eos_ids: tuple[int, ...] = (),
    weight_version: str = "reference",
) -> RolloutTrace:
    """Decode one response block by block on the absolute grid.

    Stops at the first block that holds a stop id or reaches ``max_new_tokens``; the block is finished first.
    """
    params = effective_sampling(decoder, sampling or SamplingParams())
    batch_params = SamplingBatch.from_params([params], [seed])
    mask_id = decoder.mask_id
    ids = list(prompt_ids)
    log: dict[str, list[np.ndarray]] = {k: [] for k in ("reveal_step", "logprob", "logprob_raw", "confidence")}
    steps_per_block: list[int] = []
    edits: list[tuple[int, int, int, int, int]] = []
    select_logprobs: list[list[float]] = []
    prompt_len, visible = len(ids), None
    while visible is None:
        start = len(ids) // block_size * block_size
        block = torch.tensor(ids[start:] + [mask_id] * (start + block_size - len(ids)))
        given = block != mask_id
        state = BlockBatch(
            block[None], given[None], torch.tensor([start]), torch.tensor([0]), torch.tensor([0]), batch_params
        )
        reveal_step = torch.full((block_size,), -1, dtype=torch.int64)
        values = torch.zeros(3, block_size)
        selects: list[float] = []
        steps = 0
        for step in range(decoder.max_steps(block_size)):
            context = torch.cat([torch.tensor(ids[:start], dtype=torch.int64), state.ids[0]])
            result = decoder.step(state, block_logits(model, context, block_size)[None])
            if bool(result.failed[0]):
                raise FloatingPointError(f"NaN or infinite logits in the block at position {start}, step {step}")
            if bool(result.done[0]):
                break
            revealed = result.revealed[0]
            changed = (result.ids[0] != state.ids[0]) & (state.ids[0] != mask_id)
            for column in changed.nonzero()[:, 0].tolist():
                old, new = int(state.ids[0, column]), int(result.ids[0, column])
                edits.append((start // block_size, step, start + column, old, new))
            reveal_step[revealed] = step
            for row, name in enumerate(("logprob", "logprob_raw", "confidence")):
                values[row, revealed] = getattr(result, name)[0, revealed]
            steps = step + 1
            if result.select_logprob is not None:
                selects.append(float(result.select_logprob[0]))
            state = BlockBatch(
                result.ids, state.given, state.start, torch.tensor([step + 1]), result.counter, batch_params
            )
        fresh = ~given
        log["reveal_step"].append(reveal_step[fresh].numpy())
        for row, name in enumerate(("logprob", "logprob_raw", "confidence")):
            log[name].append(values[row, fresh].numpy())
        steps_per_block.append(steps)
        select_logprobs.append(selects)
        ids = ids[:start] + state.ids[0].tolist()
        visible = visible_length(ids[prompt_len:], eos_ids, max_new_tokens)
    return RolloutTrace(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        replay_ids=np.asarray(ids[prompt_len:], dtype=np.int32),
        visible=visible,
        reveal_step=np.concatenate(log["reveal_step"]).astype(np.int16),
        logprob=np.concatenate(log["logprob"]).astype(np.float32),
        logprob_raw=np.concatenate(log["logprob_raw"]).astype(np.float32),
        confidence=np.concatenate(log["confidence"]).astype(np.float32),
        steps_per_block=steps_per_block,
        weight_versions=[weight_version] * len(steps_per_block),
        block_size=block_size,
        sampling=params,
        select_logprobs=select_logprobs if any(select_logprobs) else None,
        edits=edits,
        selection=getattr(decoder, "selection", None),
    )


def visible_length(response: list[int], eos_ids: tuple[int, ...], max_new_tokens: int) -> int | None:
    """Where a response of complete blocks stops: behind the first stop id, at the limit, or not yet (None)."""
    for index, token in enumerate(response[:max_new_tokens]):
        if token in eos_ids:
            return index + 1
    return max_new_tokens if len(response) >= max_new_tokens else None
