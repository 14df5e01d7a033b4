"""Typed settings that this project adds to verl's config: the groups ``dllm`` and ``recipe``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dllm.config import ConfigError
from dllm.likelihood import make_likelihood


@dataclass
class DllmSettings:
    """Group ``dllm``: decoding and likelihood."""

    algorithm: str = "SelectThenSample"
    """Decoder: a name of ``dllm.decoding.DECODERS`` or ``package.module:Class``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the decoder, e.g. ``{threshold: 0.95}``; one that is null is the decoder's own."""
    likelihood: str = "exact"
    """Likelihood used in training: a name of ``dllm.likelihood.LIKELIHOODS``."""
    likelihood_options: dict[str, Any] = field(default_factory=dict)
    """Options of the likelihood, e.g. ``+dllm.likelihood_options.samples=4`` (elbo) or ``.keep=0.5`` (exact)."""
    max_logprob_diff: float | None = None
    """Stop the run if 0.1 % of a step's tokens differ by more than this (nats) between engine and trainer."""
    measure_every: int = 5
    """Measure schedule and router flips at every so many steps, the first included; 0 never does."""
    measure_states: int = 64
    """Schedule flips: at most so many states of a micro-batch; each costs the LM head of one block."""
    measure_routing: int = 0
    """Router flips: the engine records the experts of one of so many responses; 0 of none."""
    train_mixed: bool = False
    """Train also on responses that weights of several versions have decoded."""


@dataclass
class RecipeSettings:
    """Group ``recipe``: where a run goes and what it starts."""

    run: str | None = None
    """Name of the run; without one a time stamp."""
    dry_run: bool = False
    """Print the resolved config and the preflight verdict, start nothing."""
    output_dir: str = "outputs/grpo_llada2"
    """Parent directory of the runs."""
    cache_dir: str = "outputs/cache"
    """Prompts built from task generators, reused by later runs."""
    seed: int = 0
    """Seed of prompts, sampling noise and the data order."""
    wandb_samples: int = 8
    """Rows per step of the table of rollouts in Weights & Biases; 0 writes none."""
    save_debug_rollouts: str | None = None
    """Directory for the rollouts of every step as parquet, beside the run's own JSON lines."""
    load_debug_rollouts: str | None = None
    """Directory of saved rollouts (parquet or JSON lines) to train from without an engine."""


def typed(config: DictConfig) -> tuple[DllmSettings, RecipeSettings]:
    """The two groups, checked.

    Raises:
        ConfigError: a value has the wrong type, or a choice does not exist.
    """
    groups = []
    for name, schema in (("dllm", DllmSettings), ("recipe", RecipeSettings)):
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema), config[name])
            groups.append(OmegaConf.to_object(merged))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{name}.{getattr(error, 'full_key', '') or '?'}: {reason}") from error
    dllm, recipe = groups
    dllm.options = {key: value for key, value in dllm.options.items() if value is not None}
    make_likelihood(dllm.likelihood, dllm.likelihood_options)
    for key in ("measure_every", "measure_states", "measure_routing"):
        if getattr(dllm, key) < 0:
            raise ConfigError(f"dllm.{key}={getattr(dllm, key)} is negative; use 0 to measure no flips")
    return dllm, recipe
