"""Mean-field log-probs: every token scored in its fully masked block (diffu-GRPO; d1, arXiv 2504.12216).

A baseline: the tokens of a block are scored as if one denoise step had drawn them all. Blocks still see the clean
tokens of earlier blocks, which the full-attention models of the paper do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dllm.config import ConfigError
from dllm.likelihood.states import States, collect, content_generator, hidden_slice, response_blocks, sequence_ids
from dllm.trace import RolloutTrace


@dataclass(frozen=True)
class OneStep:
    """One state per block.

    Attributes:
        prompt_mask: probability with which a token of the prompt is masked, in the clean copy and in the block that
            the prompt ends in; d1 uses 0.15 to vary the states of repeated updates.
    """

    prompt_mask: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_mask < 1:
            raise ConfigError(
                f"dllm.likelihood_options.prompt_mask={self.prompt_mask} is not in [0, 1); d1 uses 0.15, 0 leaves "
                "the prompt alone"
            )

    def states(self, trace: RolloutTrace, mask_id: int, generator: np.random.Generator | None = None) -> States:
        """One fully masked slice per block, all weights 1."""
        generator = generator or content_generator(trace, "one_step")
        clean = sequence_ids(trace)
        masked = np.flatnonzero(generator.random(trace.prompt_len) < self.prompt_mask)
        clean[masked] = mask_id
        scored = []
        for block in response_blocks(trace, mask_id):
            piece = hidden_slice(block, block.free, trace, mask_id, 0)
            shown = masked[masked >= block.start] - block.start
            piece.ids[shown[shown < trace.block_size]] = mask_id
            scored.append((piece, 1.0))
        return collect(trace, scored, clean)
