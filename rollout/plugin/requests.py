"""What block diffusion cannot serve as asked is refused on every endpoint, with HTTP 400 and the field's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dllm.config import ConfigError
from rollout.params import check_prompt
from rollout.protocol import STRUCTURED

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_new_tokens": (0, None),
    "logit_bias": (None,),
    "custom_params": (None,),
}
"""Sampling parameters that SGLang's block-diffusion engine ignores, and their values that change nothing."""


def check_sampling(params: Mapping[str, Any]) -> None:
    """Refuse sampling parameters without an effect.

    Raises:
        ValueError: the message names the parameter.
    """
    for name in STRUCTURED:
        if params.get(name):
            raise ValueError(
                f"sampling_params.{name}: structured output is not supported for block diffusion: a grammar reads from "
                "left to right, a block does not; remove it and check the answer instead"
            )
    for name, harmless in NEUTRAL.items():
        if name in params and params[name] not in harmless and params[name] != {}:
            raise ValueError(f"sampling_params.{name}: {params[name]!r} would be ignored by block diffusion; remove it")


def _validate(original: Any, manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    original(manager, request, input_ids)
    if manager.server_args.dllm_algorithm is None:
        return
    check_sampling(request.sampling_params or {})
    if input_ids is not None:
        try:
            check_prompt(input_ids, _mask_id(manager), manager.model_config.vocab_size)
        except ConfigError as error:
            raise ValueError(f"input_ids: {error}") from error


def _mask_id(manager: Any) -> int:
    found = getattr(manager, "_dllm_mask_id", None)
    if found is None:
        from rollout.plugin.settings import _resolve

        found = manager._dllm_mask_id = _resolve(manager.server_args.model_path, None).mask_id
    return found


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", _validate, HookType.AROUND
    )
