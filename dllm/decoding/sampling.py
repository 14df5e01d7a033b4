"""The distribution a token is drawn from, and the draw.

One formula for the engine, the reference decoder and the trainer: temperature, then top-k, top-p and min-p,
each on the renormalised rest, with the mask token excluded throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm.noise import uniform

NO_TOP_K = -1


def effective_sampling(decoder: object, requested: SamplingParams) -> SamplingParams:
    """How ``decoder`` (an instance or its class) draws the tokens of a request with these parameters."""
    return replace(requested, temperature=0.0) if getattr(decoder, "greedy", False) else requested


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. ``temperature == 0`` or ``top_k == 1`` means greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = NO_TOP_K
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative; use 0 for greedy decoding")
        if not math.isfinite(self.temperature):
            raise ValueError(f"temperature={self.temperature} is not finite; use 1 for the model's own distribution")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]; use 1 to switch it off")
        if self.top_k != NO_TOP_K and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} is not positive; use {NO_TOP_K} to switch it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is not in [0, 1]; use 0 to switch it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k != NO_TOP_K or self.min_p > 0)


@dataclass
class SamplingBatch:
    """Sampling parameters of n blocks, as tensors.

    Attributes:
        temperature, top_p, min_p: float32 [n]; temperature is 1 where ``greedy``.
        top_k: int64 [n], ``NO_TOP_K`` when off.
        greedy: bool [n].
        seed: int64 [n].
        any_filter: whether some row uses top-k, top-p or min-p (saves the sort otherwise).
        any_temperature: whether some row's temperature is not 1.
        all_greedy: whether every row is greedy (saves the draw).
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    greedy: Tensor
    seed: Tensor
    any_filter: bool
    any_temperature: bool
    all_greedy: bool

    @classmethod
    def from_params(
        cls, params: list[SamplingParams], seeds: list[int], device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Stack the parameters of n requests; ``seeds`` are their int64 seeds."""
        as_float = lambda values: torch.tensor(values, dtype=torch.float32, device=device)
        return cls(
            temperature=as_float([1.0 if p.greedy else p.temperature for p in params]),
            top_p=as_float([p.top_p for p in params]),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            min_p=as_float([p.min_p for p in params]),
            greedy=torch.tensor([p.greedy for p in params], dtype=torch.bool, device=device),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            any_filter=any(p.filtered for p in params),
            any_temperature=any(not p.greedy and p.temperature != 1 for p in params),
            all_greedy=all(p.greedy for p in params),
        )

    def rows(self, index: Tensor) -> SamplingBatch:
        """The parameters of rows ``index`` (int64 [m]), repeated as often as they occur."""
        return SamplingBatch(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.min_p[index],
            self.greedy[index],
            self.seed[index],
            self.any_filter,
            self.any_temperature,
            self.all_greedy,
        )

    def as_greedy(self) -> SamplingBatch:
        """The same requests decoded greedily."""
        return replace(
            self, greedy=torch.ones_like(self.greedy), any_filter=False, any_temperature=False, all_greedy=True
        )

    @property
    def raw(self) -> bool:
        """Whether every row samples from the model's own distribution (temperature 1, no filter)."""
        return not self.any_filter and not self.any_temperature


def _filter(logp: Tensor, sampling: SamplingBatch, keep: Tensor | None) -> Tensor:
    """Log-probs with everything outside top-k, top-p and min-p set to -inf (not renormalised)."""
    ordered, order = logp.sort(dim=-1, descending=True)
    rank = torch.arange(logp.shape[-1], device=logp.device)
    top_k = sampling.top_k.clamp(min=0)[:, None]
    drop = (rank >= top_k) & (sampling.top_k != NO_TOP_K)[:, None]

    probs = ordered.masked_fill(drop, -torch.inf).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    drop |= (mass_before >= sampling.top_p[:, None]) & (sampling.top_p < 1)[:, None]

    probs = ordered.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= probs < sampling.min_p[:, None] * probs[:, :1]

    dropped = torch.zeros_like(drop).scatter_(-1, order, drop)
    if keep is not None:
        dropped.scatter_(-1, keep[:, None], False)
    return logp.masked_fill(dropped, -torch.inf)


def sampling_logprobs(
    logits: Tensor, sampling: SamplingBatch, mask_id: int, keep: Tensor | None = None, *, raw: bool = False
) -> Tensor:
    """Log-probabilities of the distribution that is sampled from.

    Args:
        logits: [m, V], any float dtype; computed in fp32.
        sampling: parameters of the m rows. Greedy rows get their temperature-1 distribution without filters:
            there the draw is the argmax and its log-prob is 0 by definition (see ``drawn_logprob``).
        mask_id: excluded from the support.
        keep: int64 [m], tokens forced into the support. The trainer passes the token that was drawn, so that
            a rounding flip at the edge of the support gives a finite number.
        raw: ignore temperature and filters (still without the mask token).

    Returns:
        float32 [m, V], -inf outside the support.
    """
    scores = logits.float()
    if sampling.any_temperature and not raw:
        scores = scores / sampling.temperature[:, None]
    excluded = torch.arange(scores.shape[-1], device=scores.device) == mask_id
    logp = scores.masked_fill(excluded, -torch.inf).log_softmax(-1)
    if raw or not sampling.any_filter:
        return logp
    return torch.where(sampling.greedy[:, None], logp, _filter(logp, sampling, keep).log_softmax(-1))


def draw(logp: Tensor, sampling: SamplingBatch, position: Tensor, step: Tensor) -> Tensor:
    """Draw one token per row by inverting the fp64 cumulative distribution; greedy rows take the argmax.

    Args:
        logp: float32 [m, V], normalised, -inf outside the support.
        position, step: int64 [m], counters of the noise (see ``dllm.noise``).

    Returns:
        int64 [m]. A token of probability zero, the mask token among them, is never returned.
    """
    if sampling.all_greedy:
        return logp.argmax(-1)
    cumulative = logp.double().exp().cumsum(-1)
    threshold = uniform(sampling.seed, position, step)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # Rounding in the last place can push the threshold to the total itself: take the last possible token then.
    size = logp.shape[-1]
    last = size - 1 - (logp > -torch.inf).flip(-1).int().argmax(-1)
    token = torch.minimum(token, last)
    return torch.where(sampling.greedy, logp.argmax(-1), token)


def drawn_logprob(logp: Tensor, sampling: SamplingBatch, token: Tensor) -> Tensor:
    """Log-prob of ``token`` (int64 [m]) under ``logp``; 0 on greedy rows, where the draw is certain."""
    value = logp.gather(-1, token[:, None])[:, 0]
    return torch.where(sampling.greedy, torch.zeros_like(value), value)
