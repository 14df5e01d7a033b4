"""Draw a token at every hidden position, then keep the most probable draws.

What Hugging Face's LLaDA2 ``generate`` and JetEngine do. Which positions are kept depends on the draws, so the
probability of a step has a second factor: that of the positions *not* kept to have drawn something that loses. The sum
of the token log-probs alone is not a log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dllm.decoding.base import BlockBatch, Reveal, draw_everywhere
from dllm.decoding.confidence import ROWS_PER_CHUNK, best, failed_rows, masked_confidence
from dllm.decoding.sampling import sampling_logprobs
from dllm.decoding.select_then_sample import reveal


@dataclass(frozen=True)
class SelectionRule:
    """Keep draws of probability above ``threshold``; if they are fewer than ``tokens_per_step``, the best so many."""

    threshold: float
    tokens_per_step: int

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | None) -> SelectionRule | None:
        """The rule that ``dataclasses.asdict`` made ``given`` of; None of None."""
        return None if given is None else cls(float(given["threshold"]), int(given["tokens_per_step"]))

    def reached(self, kept: int, hidden: int, worst: float) -> bool:
        """Whether a step kept what was above the threshold (True) or the best few (False).

        Args:
            kept: positions kept.
            hidden: positions that were hidden.
            worst: smallest probability among the kept draws. Rounding at the very threshold cannot do harm: there
                the bound of both branches is the same.
        """
        return bool(np.float32(worst) > np.float32(self.threshold)) and kept >= min(self.tokens_per_step, hidden)


def losing_logprob(
    logp: Tensor, column: Tensor, bound: Tensor, worst: Tensor, inclusive: Tensor, *, lost: bool = False
) -> Tensor:
    """Log-probability that a position draws a token that is not kept.

    With the threshold: a token of probability up to it. Among the best few: one that ranks behind the worst kept
    draw, with ties going to the lower position. In the log domain, because 1 - (sum of the winners) loses all digits
    where the winners are nearly certain.

    Args:
        logp: float32 [r, V], distribution each position draws from.
        column: int64 [r], position within its block.
        bound: float32 [r], the threshold, or the probability of the worst kept draw.
        worst: int64 [r], position of the worst kept draw.
        inclusive: bool [r], True for the threshold: a token of exactly that probability is not kept.
        lost: each position is known to have lost. The trainer says so: rounding, or weights that have moved, may lift
            all of a position's tokens above the bound, and the least probable ones then count as losing all the same.

    Returns:
        float32 [r], -inf where every token would have been kept (never if ``lost``).
    """
    p = logp.exp()
    equal_loses = inclusive | (column > worst)
    loses = (p < bound[:, None]) | ((p == bound[:, None]) & equal_loses[:, None])
    if lost:
        support = logp > -torch.inf
        loses |= p == p.detach().masked_fill(~support, torch.inf).amin(-1, keepdim=True)
    return logp.masked_fill(~loses, -torch.inf).logsumexp(-1)


class SampleThenSelect:
    """Sample everywhere, keep what has a probability above ``threshold``, at least ``tokens_per_step``.

    Probabilities are those of the sampling distribution (temperature, top-k, top-p applied). A greedy request takes the
    argmax and its probability at temperature 1.
    """

    options: ClassVar[dict[str, Any]] = {"threshold": 0.95, "tokens_per_step": 1}

    def __init__(self, mask_id: int, threshold: float = 0.95, tokens_per_step: int = 1) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} is not in (0, 1]; LLaDA2 uses 0.95")
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={tokens_per_step} is not positive; LLaDA2 uses 1")
        self.mask_id = mask_id
        self.selection = SelectionRule(threshold, tokens_per_step)

    def max_steps(self, block_size: int) -> int:
        return block_size + 1

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)
        failed = failed_rows(confidence)
        hidden = (confidence > -torch.inf) & ~failed[:, None]
        token, drawn, logprob_raw = draw_everywhere(blocks, logits, hidden, self.mask_id)
        probability = torch.full(hidden.shape, -torch.inf, device=logits.device).masked_scatter(hidden, drawn.exp())
        above = probability > self.selection.threshold
        few = best(probability, self.selection.tokens_per_step)
        reached = above.sum(1) >= few.sum(1)
        chosen = torch.where(reached[:, None], above, few)
        kept = chosen[hidden]
        certain = blocks.sampling.greedy[hidden.nonzero(as_tuple=True)[0]]
        logprob = torch.where(certain, 0.0, drawn)
        result = reveal(blocks, self.mask_id, chosen, token[kept], logprob[kept], logprob_raw[kept], confidence, failed)
        result.select_logprob = self._select_logprob(blocks, logits, hidden & ~chosen, chosen, probability, reached)
        return result

    def _select_logprob(
        self, blocks: BlockBatch, logits: Tensor, rest: Tensor, chosen: Tensor, probability: Tensor, reached: Tensor
    ) -> Tensor:
        """float32 [n]: log of the product of ``losing_logprob`` over the positions not kept; 0 for greedy requests."""
        kept = torch.where(chosen, probability, torch.inf)
        size = kept.shape[1]
        # The worst kept draw is the least probable one, of equals the last.
        worst = size - 1 - kept.flip(1).argmin(1)
        bound = torch.where(reached, self.selection.threshold, kept.gather(1, worst[:, None])[:, 0])
        total = torch.zeros(len(kept), dtype=torch.float32, device=kept.device)
        row, column = rest.nonzero(as_tuple=True)
        for part in torch.arange(len(row), device=row.device).split(ROWS_PER_CHUNK):
            r, c = row[part], column[part]
            logp = sampling_logprobs(logits[r, c], blocks.sampling.rows(r), self.mask_id)
            total.index_add_(0, r, losing_logprob(logp, c, bound[r], worst[r], reached[r]))
        return torch.where(blocks.sampling.greedy, 0.0, total.clamp(max=0.0))
