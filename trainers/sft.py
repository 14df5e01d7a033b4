"""Supervised fine-tuning of a block-diffusion model: masked cross-entropy over noisy blocks.

The layout is the one of the replay (``dllm.replay``): a clean copy of the sequence and, for every block of the
response, noisy copies that see themselves and the clean tokens of earlier blocks. The loss is the negative
ELBO of the linear schedule (Arriola et al., "Block Diffusion", ICLR 2025, section 3): cross-entropy at the masked
positions, weighted by 1 / t, where t is the probability with which the copy's positions were masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.attention import attention_for, pack_samples
from dllm.config import BlockDiffusionConfig
from dllm.models.base import BlockDiffusionLM
from dllm.models.llada2 import SigmoidRouter
from dllm.replay import PackedBatch, SampleSlices, Slice


@dataclass(frozen=True)
class Example:
    """A prompt (token ids up to the assistant's turn) and its answer (ids up to the end of the turn)."""

    prompt: list[int]
    answer: list[int]


@dataclass
class NoiseSchedule:
    """How blocks are masked.

    Attributes:
        low, high: t is uniform between them. Below 1 / B hardly a position is masked; clipping from below trades
            the exact bound for less variance (Block Diffusion, section 5).
        copies: noisy copies per block, with t stratified over the copies.
    """

    low: float = 0.5
    high: float = 1.0
    copies: int = 1

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Masking probabilities float64 [copies], one from each of ``copies`` equal parts of the range."""
        part = (np.arange(self.copies) + generator.random(self.copies)) / self.copies
        return self.low + (self.high - self.low) * part


def complete_response(example: Example, block_size: int, eos_id: int) -> list[int]:
    """The answer, at least one stop token, and stop tokens to the end of the block."""
    length = len(example.prompt) + len(example.answer) + 1
    return example.answer + [eos_id] * (1 + -length % block_size)


def noisy_sample(
    example: Example,
    noise: NoiseSchedule,
    generator: np.random.Generator,
    *,
    block_size: int,
    mask_id: int,
    eos_id: int,
) -> tuple[SampleSlices, list[float]]:
    """Clean tokens and noisy blocks of one example, with the weight of every masked position.

    Positions of the response are masked independently with probability t, at least one in a block. Tokens of the
    prompt that share the first block stay as they are.

    Returns:
        The slices and, in their order, one weight per target: 1 / (t * positions of the response * copies), so
        that the loss is a mean over positions.
    """
    response = complete_response(example, block_size, eos_id)
    prompt_len = len(example.prompt)
    ids = np.asarray(example.prompt + response, dtype=np.int64)
    slices, weights = [], []
    for start in range(prompt_len // block_size * block_size, len(ids), block_size):
        final = ids[start : start + block_size]
        open_from = max(0, prompt_len - start)
        for step, t in enumerate(noise.draw(generator)):
            masked = generator.random(block_size) < t
            masked[:open_from] = False
            if not masked.any():
                masked[generator.integers(open_from, block_size)] = True
            columns = np.flatnonzero(masked)
            slices.append(
                Slice(
                    ids=np.where(masked, mask_id, final),
                    start=start,
                    columns=columns,
                    tokens=final[columns],
                    token_index=columns + start - prompt_len,
                    step=step,
                )
            )
            weights += [1.0 / (t * len(response) * noise.copies)] * len(columns)
    return SampleSlices(clean=ids[:-block_size], slices=slices), weights


def pack_examples(
    examples: Sequence[Example],
    noise: NoiseSchedule,
    generator: np.random.Generator,
    *,
    block_size: int,
    mask_id: int,
    eos_id: int,
    device: torch.device | str = "cpu",
) -> tuple[PackedBatch, Tensor]:
    """One training batch and the weight of each of its targets (float32 [T], summing to about 1)."""
    noisy = [noisy_sample(e, noise, generator, block_size=block_size, mask_id=mask_id, eos_id=eos_id) for e in examples]
    samples, weights = zip(*noisy, strict=True)
    batch = pack_samples(samples, block_size, device)
    order = dict.fromkeys(batch.target_sample.tolist())
    flat = torch.tensor([w for i in order for w in weights[i]], dtype=torch.float32, device=device)
    return batch, flat / len(examples)


def sft_loss(model: BlockDiffusionLM, batch: PackedBatch, weights: Tensor) -> Tensor:
    """Weighted cross-entropy of the masked positions over the whole vocabulary, in fp32: a scalar.

    The mask token stays in the softmax here: training it away is what makes the decoder's confidence, which
    includes it, meaningful.
    """

    def head(hidden: Tensor, lm_head: nn.Linear) -> Tensor:
        logits = lm_head(hidden[batch.target_row, batch.target_column]).float()
        return F.cross_entropy(logits, batch.target_token, reduction="none") @ weights

    return model(batch.input_ids, batch.position, attention_for(batch), head)


@dataclass
class SFTSettings:
    """Optimisation of a supervised fine-tuning.

    Attributes:
        batch_size: examples per step.
        steps: length of the schedule; a run may stop before its end.
        learning_rate: at the peak of a cosine with a linear warm-up.
        final_lr_fraction: what is left of it at the end.
        max_grad_norm: clip gradients to this norm.
        expert_bias_rate: see ``ExpertBalancer``; 0 leaves the biases alone.
    """

    batch_size: int = 128
    steps: int = 4000
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    final_lr_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    expert_bias_rate: float = 1e-3
    noise: NoiseSchedule = field(default_factory=NoiseSchedule)


class ExpertBalancer:
    """Keeps experts equally loaded by moving ``expert_bias``, without a loss term.

    After every step the bias of an expert rises by ``rate`` if it had less than the mean load and falls
    otherwise (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1).
    """

    def __init__(self, model: BlockDiffusionLM, rate: float) -> None:
        self.rate = rate
        self.loads: dict[SigmoidRouter, Tensor] = {}
        routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
        self._handles = [router.register_forward_hook(self._count) for router in routers]

    def _count(self, router: SigmoidRouter, _: tuple, output: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            counts = torch.bincount(output[0].reshape(-1), minlength=len(router.expert_bias))
            self.loads[router] = self.loads.get(router, 0) + counts

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the loads counted since the last call."""
        for router, load in self.loads.items():
            load = load.float()
            router.expert_bias += self.rate * torch.sign(load.mean() - load)
        self.loads.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def learning_rate(settings: SFTSettings, step: int) -> float:
    """Linear over the warm-up, then a cosine down to ``final_lr_fraction`` of the peak; ``step`` counts from 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    floor = settings.final_lr_fraction
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def batches(examples: Sequence[Example], size: int, generator: np.random.Generator) -> Iterator[list[Example]]:
    """Batches for ever, every example once per pass in a new order; a pass may end within a batch."""
    order: list[int] = []
    while True:
        while len(order) < size:
            order += generator.permutation(len(examples)).tolist()
        yield [examples[i] for i in order[:size]]
        order = order[size:]


def train_steps(
    model: BlockDiffusionLM,
    examples: Sequence[Example],
    block_diffusion: BlockDiffusionConfig,
    settings: SFTSettings,
    seed: int,
) -> Iterator[tuple[int, float]]:
    """Fine-tune ``model`` in place; yields (steps done, loss of the last one) after every update.

    The caller evaluates, saves and stops. Given the seed, data order and noise are fixed.
    """
    device = next(model.parameters()).device
    generator = np.random.default_rng(seed)
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=settings.weight_decay)
    balancer = ExpertBalancer(model, settings.expert_bias_rate)
    stream = batches(examples, settings.batch_size, generator)
    try:
        for step in range(settings.steps):
            batch, weights = pack_examples(
                next(stream),
                settings.noise,
                generator,
                block_size=block_diffusion.block_size,
                mask_id=block_diffusion.mask_id,
                eos_id=block_diffusion.eos_ids[0],
                device=device,
            )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            loss = sft_loss(model, batch, weights)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            balancer.step()
            yield step + 1, float(loss.detach())
    finally:
        balancer.close()
