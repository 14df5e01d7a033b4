"""What block diffusion cannot serve as asked is refused on every endpoint, with HTTP 400 and the field's name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dllm.config import ConfigError
from rollout.params import RESUMED, check_prompt
from rollout.protocol import STRUCTURED, Count, RequestError, Seed, Share, Temperature, TokenId, TopK, TopP, parse

Penalty = Annotated[float, Field(ge=-2, le=2)]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, Field(max_length=1000), AfterValidator(_compiles)]


class StockSampling(BaseModel):
    """SGLang's sampling parameters. It checks few types itself, and a wrong one can end its scheduler."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=4096)] | None = None
    stop: str | list[str] | None = None
    stop_regex: Pattern | list[Pattern] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=2)] | None = None


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_new_tokens": (0, None),
    "logit_bias": (None,),
    "custom_params": (None,),
}
"""Sampling parameters that SGLang's block-diffusion engine ignores, and their values that change nothing."""


@cache
def known_parameters() -> tuple[str, ...]:
    """Names of SGLang's sampling parameters."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    return tuple(SamplingParams.__struct_fields__[: SamplingParams.__struct_fields__.index("stop_strs")])


def check_sampling(params: Mapping[str, Any]) -> None:
    """Refuse sampling parameters of a wrong type or without an effect.

    Raises:
        ValueError: the message names the parameter.
    """
    if unknown := sorted(set(params).difference(known_parameters())):
        raise ValueError(f"sampling_params.{unknown[0]}: there is no such parameter; SGLang has {known_parameters()}")
    try:
        parse(StockSampling, params)
    except RequestError as error:
        raise ValueError(f"sampling_params.{error}") from error
    for name in STRUCTURED:
        if params.get(name):
            raise ValueError(
                f"sampling_params.{name}: structured output is not supported for block diffusion: a grammar reads from "
                "left to right, a block does not; remove it and check the answer instead"
            )
    for name, harmless in NEUTRAL.items():
        given = params.get(name)
        if (
            name in params
            and given not in harmless
            and given != {}
            and not (name == "custom_params" and resumes(given))
        ):
            raise ValueError(f"sampling_params.{name}: {given!r} would be ignored by block diffusion; remove it")


def resumes(given: Any) -> bool:
    """Whether these parameters are the note of the rollout service on a response that goes on, and no more."""
    return isinstance(given, dict) and given.keys() == {RESUMED} and type(given[RESUMED]) is int and given[RESUMED] >= 0


def check_request(manager: Any, request: Any) -> None:
    """Refuse what does not need the prompt's tokens to be seen.

    Raises:
        ValueError: the message names the field.
    """
    if manager.server_args.dllm_algorithm is None:
        return
    given = getattr(request, "sampling_params", None) or {}
    for params in given if isinstance(given, list) else [given]:
        check_sampling(params or {})
    logprobs = getattr(request, "return_logprob", None)
    if any(logprobs) if isinstance(logprobs, list) else logprobs:
        raise ValueError("return_logprob: SGLang has none for block diffusion; meta_info.dllm_logprob is always there")


def _before_generate(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Runs before SGLang counts samples, which a wrong type would already break."""
    check_request(manager, request)
    rid = getattr(request, "rid", None)
    for name in rid if isinstance(rid, list) else [rid]:
        if name is not None and name in manager.rid_to_state:
            raise ValueError(f"rid: a request {name!r} is running; wait for its end or use another")


def _before_stream(manager: Any, request: Any) -> None:
    """Refuse a stream before its first byte, while the status can still say so."""
    from fastapi import HTTPException

    try:
        check_request(manager, request)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def _after_validation(result: Any, manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    if manager.server_args.dllm_algorithm is None or input_ids is None:
        return
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

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}.generate_request", _before_generate, HookType.BEFORE)
    HookRegistry.register(f"{manager}.create_abort_task", _before_stream, HookType.BEFORE)
    HookRegistry.register(f"{manager}._validate_one_request", _after_validation, HookType.AFTER)
