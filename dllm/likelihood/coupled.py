"""Token log-probs of coupled-GRPO (DiffuCoder, arXiv 2506.20639): a fully masked state and a complementary pair.

A baseline: the value of a token is the mean of its log-prob in the fully masked block and its weighted log-prob in
that one of two complementary masks that hides it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dllm.config import ConfigError
from dllm.likelihood.states import States, collect, content_generator, hidden_slice, response_blocks
from dllm.trace import RolloutTrace


@dataclass(frozen=True)
class Coupled:
    """Three states per block.

    Attributes:
        low, high: the mask ratio t of a sample is uniform between them. As published, the two masks have the weights
            1 / t and 1 / (1 - t), so the weights of a token add up to 1.5 on average: values are proportional to
            log-probs, not on their scale.
    """

    low: float = 0.2
    high: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < 1:
            raise ConfigError(
                f"dllm.likelihood_options.low={self.low}, high={self.high} are not ordered within (0, 1); DiffuCoder "
                "uses 0.2 and 0.8"
            )

    def states(self, trace: RolloutTrace, mask_id: int, generator: np.random.Generator | None = None) -> States:
        """Per block the fully masked state, a random mask and its complement; empty ones are left out."""
        generator = generator or content_generator(trace, "coupled")
        ratio = generator.uniform(self.low, self.high)
        scored = []
        for block in response_blocks(trace, mask_id):
            chosen = generator.random(len(block.free)) < ratio
            for step, (hidden, weight) in enumerate(
                ((block.free, 0.5), (block.free[chosen], 0.5 / ratio), (block.free[~chosen], 0.5 / (1 - ratio)))
            ):
                if len(hidden):
                    scored.append((hidden_slice(block, hidden, trace, mask_id, step), weight))
        return collect(trace, scored)
