"""Accuracy of a model on rows of a task, decoded in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dllm.config import BlockDiffusionConfig
from dllm.decoding import SamplingParams, SelectThenSample
from dllm.models.base import BlockDiffusionLM
from dllm.noise import sample_seed
from trainers.generation import generate
from trainers.scores import ScoreSummary, score_answer, summarise_scores


@dataclass(frozen=True)
class Evaluation(ScoreSummary):
    """What n samples for each of m prompts showed.

    Attributes:
        distinct: different texts per prompt, mean.
        steps_per_block: denoise steps, mean.
        texts: the m * n answers, those of one prompt side by side.
    """

    distinct: float
    steps_per_block: float
    texts: list[str]


def evaluate(
    model: BlockDiffusionLM,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    decode: Callable[[list[int]], str],
    block_diffusion: BlockDiffusionConfig,
    *,
    temperature: float = 0.0,
    samples: int = 1,
    threshold: float = 0.95,
    max_new_tokens: int = 32,
    seed: int = 0,
) -> Evaluation:
    """Decode and score.

    Args:
        rows: rows of a parquet file in verl's format.
        prompts: token ids of each row's prompt.
        decode: ids to text, without special tokens.
        samples: responses per prompt; 1 is all there is at temperature 0.
    """
    traces = generate(
        model,
        [prompt for prompt in prompts for _ in range(samples)],
        SelectThenSample(block_diffusion.mask_id, threshold),
        block_size=block_diffusion.block_size,
        max_new_tokens=max_new_tokens,
        eos_ids=block_diffusion.eos_ids,
        sampling=SamplingParams(temperature=temperature),
        seeds=[sample_seed(seed, 0, row, sample) for row in range(len(prompts)) for sample in range(samples)],
    )
    texts = [decode(trace.replay_ids[: trace.visible].tolist()) for trace in traces]
    owners = [index for index in range(len(rows)) for _ in range(samples)]
    scores = [score_answer(rows[owner], text) for owner, text in zip(owners, texts, strict=True)]
    return Evaluation(
        **asdict(summarise_scores(scores, owners)),
        distinct=float(np.mean([len(set(texts[i : i + samples])) for i in range(0, len(texts), samples)])),
        steps_per_block=float(np.mean([steps for trace in traces for steps in trace.steps_per_block])),
        texts=texts,
    )
