"""Evidence lower bound of a response, block by block (the vectorised block likelihood of EBPO, LLaDA2.1 report).

For a block with L free positions and the tokens y of the response,

    ELBO = E_k E_m [ L / k * sum of log p(y_i | y masked on m, earlier blocks) over i in m ],

k uniform on 1..L and m a uniform subset of k free positions; blocks add up, and all states of a response go through
one packed forward pass. It bounds the any-order likelihood, which is not the likelihood of the decoder: two tokens
that are drawn at one step are independent there and need not be here.

The estimator needs final tokens only. Functions on top of it: sequence ratios (EBPO, ESPO) and the upper bound of SPG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from torch import Tensor

from dllm.config import ConfigError
from dllm.likelihood.states import (
    Block,
    States,
    collect,
    content_generator,
    hidden_slice,
    response_blocks,
    token_power_means,
)
from dllm.replay import PackedBatch
from dllm.trace import RolloutTrace

NOISE = ("stratified", "coupled", "iid", "all")

MAX_ENUMERATED = 12
"""Free positions of a block up to which ``noise=all`` may enumerate its 2^L - 1 states."""


@dataclass(frozen=True)
class Elbo:
    """Monte-Carlo estimate of the block ELBO.

    Attributes:
        samples: draws per block. A draw is one state, or a complementary pair under ``coupled``.
        noise: how the number k of masked positions is drawn.
            stratified: one k from each of ``samples`` equal parts of its range;
            coupled: pairs of a mask and its complement, and the fully masked block once (``coupled_masks``);
            iid: independent;
            all: no noise, every state with its exact weight; blocks of at most 12 free positions.
        beta, mix: power and share of SPG's upper bound for responses with a negative advantage (loss ``spg`` only).
    """

    samples: int = 2
    noise: str = "stratified"
    beta: float = 1.5
    mix: float = 0.5

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"dllm.likelihood_options.samples={self.samples} is below 1; use 2 or more")
        if self.noise not in NOISE:
            raise ConfigError(f"dllm.likelihood_options.noise={self.noise!r} does not exist; use one of {list(NOISE)}")
        if self.beta < 1:
            raise ConfigError(f"dllm.likelihood_options.beta={self.beta} is below 1; SPG uses 1.5")
        if not 0 <= self.mix <= 1:
            raise ConfigError(f"dllm.likelihood_options.mix={self.mix} is not in [0, 1]; SPG uses 0.5")

    def states(self, trace: RolloutTrace, mask_id: int, generator: np.random.Generator | None = None) -> States:
        """States and weights whose weighted log-probs have the ELBO as their mean.

        Raises:
            ConfigError: ``noise=all`` on a block with too many free positions.
        """
        generator = generator or content_generator(trace, "elbo")
        scored = []
        for block in response_blocks(trace, mask_id):
            for step, (hidden, weight) in enumerate(self.masks(block, generator)):
                scored.append((hidden_slice(block, hidden, trace, mask_id, step), weight))
        return collect(trace, scored)

    def masks(self, block: Block, generator: np.random.Generator) -> list[tuple[np.ndarray, float]]:
        """Masked columns (int64 [k]) and weight of every state of one block."""
        free, count = block.free, len(block.free)
        if self.noise == "all":
            return all_masks(free)
        if self.noise == "coupled":
            return coupled_masks(free, self.samples, generator)
        sizes = draw_sizes(1, count, self.samples, self.noise == "stratified", generator)
        return [(_subset(free, k, generator), count / (k * self.samples)) for k in sizes]


def draw_sizes(low: int, high: int, samples: int, stratified: bool, generator: np.random.Generator) -> list[int]:
    """``samples`` numbers, each uniform on low..high; stratified ones come from equal parts of the range."""
    uniform = generator.random(samples)
    if stratified:
        uniform = (np.arange(samples) + uniform) / samples
    return (low + (uniform * (high - low + 1)).astype(int)).tolist()


def _subset(free: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    return np.sort(generator.choice(free, k, replace=False))


def all_masks(free: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """Every state of a block: a mask of k of L positions has weight 1 / L * 1 / C(L, k) * L / k.

    Raises:
        ConfigError: more than ``MAX_ENUMERATED`` free positions.
    """
    count = len(free)
    if count > MAX_ENUMERATED:
        raise ConfigError(
            f"dllm.likelihood_options.noise='all' would enumerate 2^{count} states of a block with {count} free "
            f"positions; it is for blocks of at most {MAX_ENUMERATED}, use stratified or coupled"
        )
    return [
        (np.asarray(hidden), 1.0 / (k * comb(count, k)))
        for k in range(1, count + 1)
        for hidden in combinations(free.tolist(), k)
    ]


def coupled_masks(free: np.ndarray, samples: int, generator: np.random.Generator) -> list[tuple[np.ndarray, float]]:
    """Masks with their complements, unbiased: the fully masked state, which no pair contains, has its own term.

    With f(k) the sum of log-probs over a random mask of size k, scaled by L / k,

        ELBO = f(L) / L + (L - 1) / L * E [ (f(k) + f(L - k)) / 2 ],   k uniform on 1..L - 1,

    and f(1) where L = 1. A pair without the first term has another mean (-36.70 instead of -38.16 in the reference
    example), because k = L never occurs.
    """
    count = len(free)
    masks = [(free, 1.0 / count)]
    if count == 1:
        return masks
    for k in draw_sizes(1, count - 1, samples, True, generator):
        hidden = _subset(free, k, generator)
        rest = np.setdiff1d(free, hidden)
        for part in (hidden, rest):
            masks.append((part, (count - 1) / (2.0 * len(part) * samples)))
    return masks


def upper_bounds(
    batch: PackedBatch, logprob: Tensor, weights: Tensor, lengths: Sequence[int], beta: float
) -> list[Tensor]:
    """SPG's evidence upper bound, token by token: log(E [ w p^beta ]) / beta, estimated by the sampled states.

    A token that no sampled state masks contributes 0, to this bound as to the lower one (SPG, arXiv 2510.09541).
    With the exact weights (``noise=all``) it is never below the ELBO (Jensen).

    Returns:
        One float32 [R] per sample.
    """
    return token_power_means(batch, logprob, weights, lengths, beta)


def sandwich(lower: Tensor, upper: Tensor, advantage: Tensor, mix: float) -> Tensor:
    """SPG's value of a response: the lower bound where the advantage is positive; where it is negative,
    ``mix`` of the upper bound and the rest of the lower one. Pushing a lower bound down proves nothing.

    Shapes broadcast.
    """
    return lower + (advantage < 0) * mix * (upper - lower)


def sequence_log_ratio(new: Tensor, old: Tensor, mask: Tensor, per_token: bool) -> Tensor:
    """Log importance ratio of whole responses from per-token values.

    Args:
        new, old: float [n, R], contributions that add up to the log-likelihood of a response.
        mask: [n, R], tokens that count.
        per_token: divide by the number of tokens (ESPO, and GSPO for exact log-probs); EBPO does not.

    Returns:
        float [n].
    """
    mask = mask.to(new.dtype)
    total = ((new - old) * mask).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if per_token else total
