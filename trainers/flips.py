"""Would the trainer have decided as the engine did? Measured on the states of a replay, inside its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dllm.decoding import BlockBatch, Decoder, SamplingBatch
from dllm.likelihood.exact import CHUNK_BYTES
from dllm.replay import PackedBatch
from dllm.routing import expert_set_hash
from dllm.trace import RolloutTrace

if TYPE_CHECKING:
    from dllm.models.base import BlockDiffusionLM

MEASURE = "dllm_measure_states"
"""Key of a batch's non-tensor data: measure flips, those of the schedule on at most so many states a micro-batch."""

NO_FLIPS = -1
"""Its value where nothing is measured; at 0 the routers are."""

Head = Callable[[Tensor, nn.Linear], Any]


@dataclass
class ScheduleProbe:
    """States of a packed batch on which the decoder runs once more.

    Attributes:
        decoder: chooses positions without randomness.
        row, column: int64 [n], where each state begins.
        blocks: the n states as the decoder takes them.
        revealed: bool [n, B], what the engine revealed there.
        target: int64 [t], targets that belong to a measured state.
        state: int64 [t], index of the state of each of them.
    """

    decoder: Decoder
    row: Tensor
    column: Tensor
    blocks: BlockBatch
    revealed: Tensor
    target: Tensor
    state: Tensor

    @torch.no_grad()
    def flips(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """bool [n]: the decoder reveals another set of positions on ``head(hidden)``, hidden [rows, L, H]."""
        count, size = self.revealed.shape
        per_chunk = max(1, CHUNK_BYTES // (4 * head.out_features * size))
        columns = self.column[:, None] + torch.arange(size, device=hidden.device)
        parts = []
        for start in range(0, count, per_chunk):
            index = torch.arange(start, min(start + per_chunk, count), device=hidden.device)
            logits = head(hidden[self.row[index][:, None], columns[index]])
            chosen = self.decoder.step(rows_of(self.blocks, index), logits).revealed
            parts.append((chosen != self.revealed[index]).any(1))
        return torch.cat(parts) if parts else self.revealed.new_zeros(0)

    def per_target(self, flips: Tensor, count: int) -> Tensor:
        """float32 [count]: 0 at a target whose state was not measured, 1 where nothing flipped, 2 where it did."""
        values = torch.zeros(count, device=flips.device)
        values[self.target] = 1.0 + flips[self.state].float()
        return values


def rows_of(blocks: BlockBatch, index: Tensor) -> BlockBatch:
    """The blocks with these indices (int64 [k])."""
    return BlockBatch(
        *(getattr(blocks, name)[index] for name in ("ids", "given", "start", "step", "counter")),
        sampling=blocks.sampling.rows(index),
    )


def schedule_probe(
    batch: PackedBatch, traces: Sequence[RolloutTrace], decoder: Decoder, sampling: SamplingBatch, limit: int
) -> ScheduleProbe | None:
    """At most ``limit`` states of an exact replay, evenly spread over the batch; None if there is nothing to measure.

    Nothing is measured either where the choice of positions is random: its probability is part of the log-prob.
    """
    size = traces[0].block_size
    if limit < 1 or getattr(decoder, "selection", None) is not None or not len(batch.target_row):
        return None
    slices, state = batch.slice_id[batch.target_row, batch.target_column].unique(return_inverse=True)
    first = torch.full_like(slices, len(state)).scatter_reduce(
        0, state, torch.arange(len(state), device=state.device), "amin"
    )
    chosen = np.unique(np.linspace(0, len(slices) - 1, min(limit, len(slices))).round().astype(np.int64))
    index = torch.from_numpy(chosen).to(state.device)
    renumbered = torch.full_like(slices, -1)
    renumbered[index] = torch.arange(len(index), device=index.device)
    target = (renumbered[state] >= 0).nonzero()[:, 0]
    measured = renumbered[state[target]]

    first = first[index]
    row = batch.target_row[first]
    column = batch.target_column[first] - batch.position[row, batch.target_column[first]] % size
    columns = column[:, None] + torch.arange(size, device=column.device)
    position = batch.position[row[:, None], columns]
    owner = batch.target_sample[first]
    prompt_len = torch.tensor([t.prompt_len for t in traces], device=owner.device)[owner]
    steps = [
        int(traces[o].reveal_step[i]) for o, i in zip(owner.tolist(), batch.target_index[first].tolist(), strict=True)
    ]
    revealed = torch.zeros(len(index), size, dtype=torch.bool, device=index.device)
    revealed[measured, batch.target_column[target] - column[measured]] = True
    blocks = BlockBatch(
        ids=batch.input_ids[row[:, None], columns],
        given=position < prompt_len[:, None],
        start=position[:, 0],
        step=torch.tensor(steps, device=index.device),
        counter=torch.zeros_like(index),
        sampling=sampling.rows(owner),
    )
    return ScheduleProbe(decoder, row, column, blocks, revealed, target, measured)


def with_flips(head: Head, probe: ScheduleProbe | None) -> Head:
    """A head that returns (what ``head`` returns, flips of the probe or None).

    Inside the model's forward pass, because under FSDP the LM head's weights exist only there.
    """
    return lambda hidden, lm_head: (head(hidden, lm_head), probe.flips(hidden, lm_head) if probe else None)


@contextmanager
def recorded_routing(model: BlockDiffusionLM, batch: PackedBatch, wanted: bool = True) -> Iterator[list[Tensor]]:
    """Record the experts of the targets during a forward pass over ``batch``.

    Yields:
        A list that afterwards holds one int64 [T] per router, in the order of the layers: ``expert_set_hash`` of the
        experts of every target's position. Empty if not ``wanted``.
    """
    flat = batch.target_row * batch.input_ids.shape[1] + batch.target_column
    hashes: list[Tensor] = []

    def record(_: nn.Module, __: tuple, output: tuple[Tensor, Tensor]) -> None:
        hashes.append(expert_set_hash(output[0][flat]))

    handles = [router.register_forward_hook(record) for router in model.routers()] if wanted else []
    try:
        yield hashes
    finally:
        for handle in handles:
            handle.remove()


def logged_routing(rows: Sequence[RolloutTrace | None], micro_batch: Any) -> list[np.ndarray | None]:
    """What the engine recorded for the replayed rows of a verl micro-batch (see ``rollout.verl.agent_loop``)."""
    if "dllm_routing" not in micro_batch:
        return [None for row in rows if row is not None]
    columns = zip(rows, micro_batch["dllm_routing"].unbind(), strict=True)
    return [
        flat[1:].view(len(row.replay_ids), int(flat[0])).cpu().numpy() if int(flat[0]) else None
        for row, flat in columns
        if row is not None
    ]


def router_flips(batch: PackedBatch, hashes: Sequence[Tensor], logged: Sequence[np.ndarray | None]) -> Tensor:
    """Share of routers that chose other experts than the engine did, per target.

    Args:
        hashes: of ``recorded_routing``.
        logged: per sample int64 [R, routers] of the engine, or None where it recorded nothing.

    Returns:
        float32 [T]: 0 where nothing was recorded, else 1 + share.

    Raises:
        ValueError: engine and trainer do not have the same number of routers.
    """
    values = torch.zeros(len(batch.target_row), device=batch.target_row.device)
    for sample, engine in enumerate(logged):
        if engine is None:
            continue
        if engine.shape[1] != len(hashes):
            raise ValueError(f"the engine recorded {engine.shape[1]} routers of a model that has {len(hashes)}")
        target = (batch.target_sample == sample).nonzero()[:, 0]
        ours = torch.stack([column[target] for column in hashes], 1)
        theirs = torch.from_numpy(engine).to(ours)[batch.target_index[target]]
        values[target] = 1.0 + (ours != theirs).float().mean(1)
    return values
