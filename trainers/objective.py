"""Which policy loss goes with which likelihood. Knows verl's losses by name only, so it is cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dllm.config import ConfigError
from dllm.likelihood import Likelihood


@dataclass(frozen=True)
class LossKind:
    """What a loss is a function of.

    Attributes:
        level: "token", "step" (denoise step of a block) or "sequence".
        summable: it is a sum over states with verl's importance weights as factors, so states may be sub-sampled.
        likelihoods: those it needs; None takes any.
        constant: it divides by ``actor.loss_scale_factor``.
    """

    level: str
    summable: bool = False
    likelihoods: tuple[str, ...] | None = None
    constant: bool = False


OWN_LOSSES: Mapping[str, LossKind] = {
    "dapo_constant": LossKind("token", summable=True, constant=True),
    "step_ratio": LossKind("step", summable=True, likelihoods=("exact",), constant=True),
    "ebpo": LossKind("sequence"),
    "espo": LossKind("sequence"),
    "spg": LossKind("sequence", likelihoods=("elbo",), constant=True),
}
"""Losses of ``trainers.losses``."""

VERL_LOSSES: Mapping[str, LossKind] = {
    "vanilla": LossKind("token", summable=True),
    "cispo": LossKind("token", summable=True),
    "gpg": LossKind("token", summable=True),
    "sapo": LossKind("token", summable=True),
    "dro": LossKind("token", summable=True),
    "dppo_tv": LossKind("token"),
    "dppo_kl": LossKind("token"),
    "clip_cov": LossKind("token"),
    "kl_cov": LossKind("token"),
    "bypass_mode": LossKind("token"),
    "gspo": LossKind("sequence"),
    "geo_mean": LossKind("sequence"),
}
"""Losses of verl 0.9.1."""

LOSSES = {**OWN_LOSSES, **VERL_LOSSES}


def check_objective(
    name: str,
    likelihood: Likelihood,
    actor: Any,
    rollout_correction: Mapping[str, Any] | None,
    own_losses: bool = False,
) -> None:
    """Refuse a pair of likelihood and loss whose gradient would mean nothing.

    Args:
        name: ``dllm.likelihood``.
        likelihood: what ``make_likelihood`` built from it.
        actor: ``actor_rollout_ref.actor``, verl's ActorConfig or its YAML.
        rollout_correction: ``algorithm.rollout_correction``.
        own_losses: losses of a third party are registered, so an unknown name is not refused.

    Raises:
        ConfigError: the message names the key, its value and the remedy.
    """
    loss_mode = actor.policy_loss.loss_mode
    if name != "exact":
        _check_no_correction(name, rollout_correction or {})
    check_subsampling(likelihood, actor)
    if loss_mode not in LOSSES:
        if own_losses:
            return
        raise ConfigError(f"{LOSS_MODE}={loss_mode!r} does not exist; use one of {sorted(LOSSES)}")
    kind = LOSSES[loss_mode]
    if kind.likelihoods is not None and name not in kind.likelihoods:
        raise ConfigError(
            f"{LOSS_MODE}={loss_mode} needs dllm.likelihood={kind.likelihoods[0]}, not {name}: {_WHY[loss_mode]}"
        )
    if kind.constant and not actor.loss_scale_factor:
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_scale_factor={actor.loss_scale_factor} leaves loss_mode={loss_mode} without "
            "its constant denominator; set it to data.max_response_length"
        )


LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"

_WHY = {
    "step_ratio": "its ratios belong to the denoise steps of the decoder",
    "spg": "it mixes the evidence bounds from below and above",
}


def check_subsampling(likelihood: Likelihood, actor: Any) -> None:
    """Refuse sub-sampled states under a loss that is no sum over them, or whose terms do not get the weights.

    Raises:
        ConfigError: see above.
    """
    keep = getattr(likelihood, "keep", 1.0)
    if keep == 1.0:
        return
    loss_mode = actor.policy_loss.loss_mode
    if loss_mode not in LOSSES or not LOSSES[loss_mode].summable:
        summable = sorted(loss for loss, kind in LOSSES.items() if kind.summable)
        raise ConfigError(
            f"dllm.likelihood_options.keep={keep} sub-samples states, which biases loss_mode={loss_mode}: it is not a "
            f"sum over states; set keep to 1 or use one of {summable}"
        )
    for key, off in (("entropy_coeff", 0), ("use_kl_loss", False)):
        if (value := actor.get(key, off)) != off:
            raise ConfigError(
                f"actor_rollout_ref.actor.{key}={value} adds a term that sub-sampling (dllm.likelihood_options.keep="
                f"{keep}) does not weigh; set keep to 1 or {key} to {str(off).lower()}"
            )


def _check_no_correction(name: str, correction: Mapping[str, Any]) -> None:
    """The engine's log-probs are those of single draws; other likelihoods give numbers on another scale."""
    for key, off in (("rollout_is", None), ("rollout_rs", None), ("bypass_mode", False)):
        if (value := correction.get(key, off)) != off:
            raise ConfigError(
                f"algorithm.rollout_correction.{key}={value} compares the engine's log-probs with values of "
                f"dllm.likelihood={name}, which are not log-probs of its draws; set it to "
                f"{'null' if off is None else 'false'}"
            )
