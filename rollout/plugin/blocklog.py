"""Device-side log of the blocks in flight, and the host-side record of a finished one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dllm.decoding import Reveal


@dataclass
class BlockRecord:
    """Everything one finished block logged; arrays cover the whole block, the prompt's tail included.

    Attributes:
        given: number of leading positions that came from the prompt.
        steps: denoise steps (the commit forward is not one).
        reveal_step, logprob, logprob_raw, confidence: [B].
        weight_version: weights the block was decoded with.
        failure: why the block is broken (a key of ``rollout.plugin.finish.FAILURES``); the arrays mean nothing then.
        select_logprob: one number per step, where the choice of positions was random.
        selection: the decoder's ``SelectionRule`` as a dictionary, if it has one.
        edits: (step, column, old id, new id).
        routing: int64 [B, routers], experts at the reveal (``rollout.plugin.routing``); None unless asked for.
    """

    given: int
    steps: int
    reveal_step: np.ndarray
    logprob: np.ndarray
    logprob_raw: np.ndarray
    confidence: np.ndarray
    weight_version: str
    failure: str | None = None
    select_logprob: list[float] = field(default_factory=list)
    selection: dict[str, float] | None = None
    edits: list[tuple[int, int, int, int]] = field(default_factory=list)
    routing: np.ndarray | None = None


class BlockLog:
    """Per-token logs of all running requests, one table row per slot of SGLang's request pool.

    A request keeps its slot while a block is unfinished, so the slot is a stable key. Rows stay on the device
    until their block is done: a step costs a few small scatters and no transfer.
    """

    FLOATS = ("logprob", "logprob_raw", "confidence")

    def __init__(self, slots: int, block_size: int, device: torch.device | str) -> None:
        self.values = torch.zeros(len(self.FLOATS), slots, block_size, device=device)
        self.reveal_step = torch.full((slots, block_size), -1, dtype=torch.int64, device=device)
        self.given = torch.zeros(slots, block_size, dtype=torch.bool, device=device)
        self.step = torch.zeros(slots, dtype=torch.int64, device=device)
        self.counter = torch.zeros(slots, dtype=torch.int64, device=device)

    @property
    def slots(self) -> int:
        return len(self.step)

    def start(self, slot: Tensor, hidden: Tensor) -> None:
        """Forget what the slots (int64 [k]) logged before; ``hidden`` is bool [k, B]."""
        self.values[:, slot] = 0
        self.reveal_step[slot] = -1
        self.given[slot] = ~hidden
        self.step[slot] = 0
        self.counter[slot] = 0

    def add(self, slot: Tensor, result: Reveal) -> None:
        """Log one denoise step of the blocks in ``slot`` (int64 [n])."""
        shown = result.revealed
        for index, name in enumerate(self.FLOATS):
            self.values[index, slot] = torch.where(shown, getattr(result, name), self.values[index, slot])
        step = self.step[slot]
        self.reveal_step[slot] = torch.where(shown, step[:, None], self.reveal_step[slot])
        self.step[slot] = step + (~result.done).long()
        self.counter[slot] = result.counter

    def collect(self, slot: Tensor, weight_version: str) -> list[BlockRecord]:
        """Records of the finished blocks in ``slot`` (int64 [k]), in one transfer."""
        floats = self.values[:, slot].permute(1, 0, 2)
        integers = (self.reveal_step[slot], self.given[slot], self.step[slot][:, None].expand(-1, floats.shape[-1]))
        whole = torch.cat([floats, *(column[:, None].float() for column in integers)], 1).cpu()
        return [
            BlockRecord(
                given=int(row[4].sum()),
                steps=int(row[5, 0]),
                reveal_step=row[3].astype(np.int64),
                logprob=row[0],
                logprob_raw=row[1],
                confidence=row[2],
                weight_version=weight_version,
            )
            for row in whole.numpy()
        ]
