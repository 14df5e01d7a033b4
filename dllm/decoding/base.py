"""The decoder contract: one denoise step over a batch of blocks.

A decoder is written once and runs in the engine plugin, in the reference decoder and in the tests. It sees
logits and returns which positions it revealed with which tokens; loops, KV caches and logs are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from dllm.decoding.confidence import ROWS_PER_CHUNK
from dllm.decoding.sampling import SamplingBatch, draw, sampling_logprobs


@dataclass
class BlockBatch:
    """n blocks before a denoise step.

    Attributes:
        ids: int64 [n, B], mask id where a position is still hidden.
        given: bool [n, B], positions that were tokens when the block started (the tail of a prompt).
        start: int64 [n], index of the block's first position in the whole sequence.
        step: int64 [n], denoise steps the block has had so far.
        counter: int64 [n], a number the decoder may keep per block; 0 at its start.
        sampling: parameters of the n requests.
    """

    ids: Tensor
    given: Tensor
    start: Tensor
    step: Tensor
    counter: Tensor
    sampling: SamplingBatch


@dataclass
class Reveal:
    """What one denoise step did to n blocks.

    Attributes:
        ids: int64 [n, B], the blocks after the step. A position that was not hidden and changed was edited.
        revealed: bool [n, B], positions whose token was drawn at this step.
        logprob: float32 [n, B], log-prob of the drawn token under the distribution it was drawn from.
        logprob_raw: float32 [n, B], the same at temperature 1 without filters.
        confidence: float32 [n, B], largest probability at temperature 1 over the whole vocabulary.
        done: bool [n], the block was complete *before* this step, so that the forward pass that produced the
            logits has written its final keys and values. Such a block is left as it is.
        failed: bool [n], the logits of a hidden position were NaN or infinite.
        counter: int64 [n], new value of ``BlockBatch.counter``.
        select_logprob: float32 [n] or None, log-prob of the choice of positions where it is random (0 where not).

    ``logprob``, ``logprob_raw`` and ``confidence`` mean something only where ``revealed``.
    """

    ids: Tensor
    revealed: Tensor
    logprob: Tensor
    logprob_raw: Tensor
    confidence: Tensor
    done: Tensor
    failed: Tensor
    counter: Tensor
    select_logprob: Tensor | None = None


@runtime_checkable
class Decoder(Protocol):
    """One decoding algorithm.

    ``options`` lists the YAML keys the class takes with their defaults; ``__init__`` receives ``mask_id``
    and those keys. ``max_steps`` bounds the denoise steps of one block, the final commit forward included.

    Attributes that a decoder may have beside them:
        edits: True if it replaces tokens that are no longer hidden. Without it such a step fails the request.
        selection: its ``SelectionRule``, if the choice of positions depends on the draws (``Reveal.select_logprob``).
        greedy: True if it ignores the request's sampling parameters and takes the argmax.
        rl_options: defaults of options that training replaces, unless they are set.
    """

    options: ClassVar[dict[str, Any]]
    mask_id: int

    def max_steps(self, block_size: int) -> int: ...

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        """Advance n blocks by one step; ``logits`` is float [n, B, V]."""
        ...


def draw_at(blocks: BlockBatch, logits: Tensor, where: Tensor, mask_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token at every selected position.

    Args:
        where: bool [n, B], m positions in total.

    Returns:
        tokens int64 [m], their log-probs float32 [m] and their raw log-probs float32 [m], row-major order.
    """
    token, logp, raw = draw_everywhere(blocks, logits, where, mask_id)
    greedy = blocks.sampling.greedy[where.nonzero(as_tuple=True)[0]]
    return token, torch.where(greedy, torch.zeros_like(logp), logp), raw


def draw_everywhere(blocks: BlockBatch, logits: Tensor, where: Tensor, mask_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Like ``draw_at``, but the log-prob of a greedy row is that of its argmax at temperature 1."""
    row, column = where.nonzero(as_tuple=True)
    parts = [
        _draw(blocks, logits, row[part], column[part], mask_id)
        for part in torch.arange(len(row), device=row.device).split(ROWS_PER_CHUNK)
    ]
    token, logp, raw = (torch.cat(values) for values in zip(*parts, strict=True))
    return token, logp, raw


def _draw(
    blocks: BlockBatch, logits: Tensor, row: Tensor, column: Tensor, mask_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    sampling = blocks.sampling.rows(row)
    scores = logits[row, column]
    logp = sampling_logprobs(scores, sampling, mask_id)
    token = draw(logp, sampling, blocks.start[row] + column, blocks.step[row])
    plain = logp if sampling.raw else sampling_logprobs(scores, sampling, mask_id, raw=True)
    return token, logp.gather(-1, token[:, None])[:, 0], plain.gather(-1, token[:, None])[:, 0]
