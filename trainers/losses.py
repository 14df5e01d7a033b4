"""Policy losses for block diffusion in verl's registry: ``actor.policy_loss.loss_mode``.

- ``dapo_constant``: ratio per token; sum / (samples * ``actor.loss_scale_factor``). The default.
- ``step_ratio``: ratio per denoise step of a block; sum / (samples * ``actor.loss_scale_factor``).
- ``ebpo``: ratio per response, exp(sum of differences); mean over samples.
- ``espo``: ratio per response, exp(mean of differences); mean over samples.
- ``spg``: no ratio, sandwiched bounds; sum / (samples * ``actor.loss_scale_factor``).

verl's own are used where they are right:
``gspo`` has the value and the gradient of GSPO's sequence ratio under ``loss_agg_mode=seq-mean-token-mean`` (under
others it weighs responses by their length). On exact log-probs its ratio is that of the whole response under the
schedule that was logged.
``cispo`` keeps the gradient of clipped tokens with the clipped ratio as a constant, as published; use
``loss_agg_mode=token-mean``.
``vanilla`` is not DAPO: it bounds the loss of negative advantages at ``clip_ratio_c`` (dual clip), and without
``loss_scale_factor`` its constant denominator is the longest response of the micro-batch, which is not constant.

Truncated importance sampling against the engine's log-probs is verl's ``algorithm.rollout_correction``: its weights,
and those of sub-sampled states, arrive as ``rollout_is_weights`` and multiply the loss of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.utils.padding import no_padding_2_padding

from dllm.config import ConfigError
from dllm.likelihood.elbo import sequence_log_ratio

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before they are exponentiated, as in verl."""


@dataclass
class LossInputs:
    """What verl does not pass to a policy loss.

    Attributes:
        step_id: int64 [n, R], denoise step of each token, different for every (block, step) of a response.
        negative: float [n, R], value of each token for a negative advantage (SPG), with gradient; None without ELBO.
    """

    step_id: Tensor
    negative: Tensor | None = None


_inputs: ContextVar[LossInputs | None] = ContextVar("loss_inputs", default=None)


@contextmanager
def loss_inputs(step_id: Tensor, negative: Tensor | None, micro_batch: Any) -> Iterator[None]:
    """Provide ``LossInputs`` to the losses called within; the tensors are jagged, in verl's log-prob layout."""
    padded = [None if t is None else no_padding_2_padding(t, micro_batch) for t in (step_id, negative)]
    token = _inputs.set(LossInputs(*padded))
    try:
        yield
    finally:
        _inputs.reset(token)


def _given(loss: str) -> LossInputs:
    inputs = _inputs.get()
    if inputs is None:
        raise RuntimeError(f"loss_mode={loss} runs within trainers.losses.loss_inputs (model_type=block_diffusion_lm)")
    return inputs


def _clipped(log_ratio: Tensor, advantage: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss with separate bounds (DAPO, arXiv 2503.14476, clip-higher), and where it is clipped."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def _constant_mean(token_loss: Tensor, mask: Tensor, config: Any) -> Tensor:
    """Sum over tokens, divided by (samples of the update * ``loss_scale_factor``): Dr.GRPO, arXiv 2503.20783.

    A mean over tokens or rows would weigh tokens by what else was drawn in their batch.
    """
    if not config.loss_scale_factor:
        raise ConfigError(
            f"actor.loss_scale_factor={config.loss_scale_factor} leaves this loss without its constant denominator; "
            "set it to data.max_response_length"
        )
    info = {**config.global_batch_info, "loss_scale_factor": config.loss_scale_factor}
    return agg_loss(token_loss, mask, "seq-mean-token-sum-norm", **info)


def _masked_mean(values: Tensor, mask: Tensor) -> float:
    return float((values * mask).sum() / mask.sum().clamp(min=1))


def _metrics(old: Tensor, new: Tensor, mask: Tensor, clipped: Tensor | None = None) -> dict[str, float]:
    metrics = {"actor/ppo_kl": _masked_mean((old - new).detach(), mask)}
    if clipped is not None:
        metrics["actor/pg_clipfrac"] = _masked_mean(clipped.float(), mask)
    return metrics


def _weighted(loss: Tensor, weights: Tensor | None) -> Tensor:
    return loss if weights is None else loss * weights


@register_policy_loss("dapo_constant")
def dapo_constant(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Token ratios with DAPO's clip and Dr.GRPO's constant denominator.

    Args of all losses here are verl's: float [n, R] tensors, ``config`` the ActorConfig; ``loss_agg_mode`` is not
    used, each loss has its own denominator.

    Raises:
        ConfigError: ``actor.loss_scale_factor`` is not set.
    """
    loss, clipped = _clipped(log_prob - old_log_prob, advantages, config)
    loss = _constant_mean(_weighted(loss, rollout_is_weights), response_mask, config)
    return loss, _metrics(old_log_prob, log_prob, response_mask, clipped)


def step_sums(values: Tensor, step_id: Tensor) -> Tensor:
    """Sum of ``values`` over the tokens with the same id in the same row, at each of them: float [n, R]."""
    totals = values.new_zeros(len(values), int(step_id.max()) + 1).scatter_add(1, step_id, values)
    return totals.gather(1, step_id)


@register_policy_loss("step_ratio")
def step_ratio(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """One ratio per denoise step: the true action ratio, a product over the tokens drawn together.

    A step counts once, spread evenly over its tokens, so at ratio 1 the gradient is that of the token loss. Weights
    of a step are the mean over its tokens.
    """
    mask = response_mask.to(log_prob.dtype)
    step_id = _given("step_ratio").step_id
    log_ratio = step_sums((log_prob - old_log_prob) * mask, step_id)
    loss, clipped = _clipped(log_ratio, advantages, config)
    tokens = step_sums(mask, step_id).clamp(min=1)
    loss = _constant_mean(_weighted(loss / tokens, rollout_is_weights), response_mask, config)
    return loss, _metrics(old_log_prob, log_prob, response_mask, clipped)


def _sequence_loss(
    per_token: bool,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """One clipped ratio per response, mean over the responses; weights of a response are the mean over its tokens."""
    mask = response_mask.to(log_prob.dtype)
    tokens = mask.sum(-1, keepdim=True).clamp(min=1)
    advantage = (advantages * mask).sum(-1, keepdim=True) / tokens
    log_ratio = sequence_log_ratio(log_prob, old_log_prob, mask, per_token)[:, None]
    loss, clipped = _clipped(log_ratio, advantage, config)
    spread = _weighted((loss / tokens).expand_as(log_prob), weights)
    loss = agg_loss(spread, response_mask, "seq-mean-token-sum", **config.global_batch_info)
    return loss, _metrics(old_log_prob, log_prob, response_mask, clipped.expand_as(log_prob))


@register_policy_loss("ebpo")
def ebpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PPO clip on exp(ELBO - old ELBO) of the whole response (EBPO, LLaDA2.1 report)."""
    return _sequence_loss(False, old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights)


@register_policy_loss("espo")
def espo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PPO clip on exp((ELBO - old ELBO) / tokens) (ESPO, arXiv 2512.03759)."""
    return _sequence_loss(True, old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights)


@register_policy_loss("spg")
def spg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """REINFORCE on evidence bounds: the lower one up where the advantage is positive, ``LossInputs.negative`` (a
    mixture with the upper one) down where it is negative (SPG, arXiv 2510.09541)."""
    negative = _given("spg").negative
    if negative is None:
        raise RuntimeError("loss_mode=spg needs the upper bound of dllm.likelihood=elbo")
    value = torch.where(advantages < 0, negative, log_prob)
    loss = _constant_mean(_weighted(-advantages * value, rollout_is_weights), response_mask, config)
    return loss, _metrics(old_log_prob, log_prob, response_mask)
