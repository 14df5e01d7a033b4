"""The ELBO without noise: all states of a response scored once, so that an estimate is a look-up.

For small blocks only (2^L - 1 states of a block with L free positions): the truth that estimators are compared with.
"""

from __future__ import annotations

import numpy as np
import torch

from dllm.attention import attention_for
from dllm.decoding.sampling import SamplingBatch, SamplingParams
from dllm.likelihood.elbo import Elbo
from dllm.likelihood.exact import target_head
from dllm.likelihood.states import States, pack_states, split
from dllm.models.base import BlockDiffusionLM
from dllm.trace import RolloutTrace

Scores = dict[tuple[int, bytes], np.ndarray]
"""Log-probs float64 [k] of the hidden tokens of a state, by (start of the block, hidden columns)."""


@torch.no_grad()
def score_all_states(model: BlockDiffusionLM, trace: RolloutTrace, mask_id: int, max_tokens: int = 2048) -> Scores:
    """Every state of every block of a response, in forward passes of at most ``max_tokens`` tokens.

    Raises:
        ConfigError: a block has too many free positions.
    """
    scores: Scores = {}
    for piece in split(Elbo(noise="all").states(trace, mask_id), max_tokens):
        batch, _ = pack_states([piece], trace.block_size, "cpu")
        sampling = SamplingBatch.from_params([SamplingParams()], [0])
        values = model(batch.input_ids, batch.position, attention_for(batch), target_head(batch, sampling, mask_id))
        remaining = values.logprob.double().numpy()
        for part in piece.sample.slices:
            count = len(part.columns)
            scores[part.start, part.columns.tobytes()], remaining = remaining[:count], remaining[count:]
    return scores


def estimate(states: States, scores: Scores) -> float:
    """The weighted sum of the log-probs of ``states``: the value of the response."""
    pieces = [scores[part.start, part.columns.tobytes()] for part in states.sample.slices]
    return float(np.concatenate(pieces) @ states.weights.astype(np.float64))
