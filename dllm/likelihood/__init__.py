"""Likelihoods of decoded sequences under a model, by name: one file per estimator.

``exact`` is the likelihood of the decoder (``dllm.likelihood.exact``) and needs the rollout's log. The others are
what methods without such a log train on, kept as baselines and for data that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dllm.config import ConfigError
from dllm.likelihood.coupled import Coupled
from dllm.likelihood.elbo import Elbo
from dllm.likelihood.one_step import OneStep
from dllm.likelihood.states import Likelihood, States
from dllm.replay import build_slices
from dllm.trace import RolloutTrace


@dataclass(frozen=True)
class Exact:
    """Replay of every state in which a token was drawn.

    Attributes:
        keep: share of the states that an update scores (``dllm.likelihood.subsample``); 1 scores them all.
        keep_floor: smallest probability with which a state is kept.
    """

    keep: float = 1.0
    keep_floor: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"dllm.likelihood_options.keep={self.keep} is not in (0, 1]; use 1 to score every state")
        if not 0 < self.keep_floor <= self.keep:
            raise ConfigError(
                f"dllm.likelihood_options.keep_floor={self.keep_floor} is not in (0, keep={self.keep}]; a state that "
                "is never kept biases the gradient, one that is always kept needs no floor"
            )

    def states(self, trace: RolloutTrace, mask_id: int, generator: np.random.Generator | None = None) -> States:
        """One slice per denoise step, all weights 1; ``generator`` is not used."""
        sample = build_slices(trace, mask_id)
        targets = sum(len(piece.columns) for piece in sample.slices)
        return States(sample, np.ones(targets, np.float32))


LIKELIHOODS: Mapping[str, type] = {"exact": Exact, "elbo": Elbo, "one_step": OneStep, "coupled": Coupled}


def make_likelihood(name: str, options: Mapping[str, Any] | None = None) -> Likelihood:
    """The likelihood ``dllm.likelihood=name`` with ``dllm.likelihood_options``.

    Raises:
        ConfigError: unknown name or option, or a value of the wrong type or range.
    """
    if name not in LIKELIHOODS:
        raise ConfigError(f"dllm.likelihood={name!r} does not exist; use one of {sorted(LIKELIHOODS)}")
    defaults = {field.name: field.default for field in fields(LIKELIHOODS[name])}
    checked = {}
    for key, value in (options or {}).items():
        if key not in defaults:
            raise ConfigError(
                f"dllm.likelihood_options: {key!r} is not an option of {name}; valid keys are {sorted(defaults)}"
            )
        kind = type(defaults[key])
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"dllm.likelihood_options.{key}={value!r} has the wrong type; expected {kind.__name__}")
        checked[key] = value
    return LIKELIHOODS[name](**checked)


__all__ = ["LIKELIHOODS", "Coupled", "Elbo", "Exact", "Likelihood", "OneStep", "States", "make_likelihood"]
