"""What ``POST /rollout/generate`` takes: pydantic models whose errors name the field.

An answer has no model of its own: its samples are the lines of ``rollout.generate`` (``RolloutSample.to_line``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dllm.config import ConfigError
from dllm.noise import PROMPT_BITS, SAMPLE_BITS, STEP_BITS

STRUCTURED = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters of structured output: a grammar reads from left to right, a block does not."""

GREEDY_BELOW = 1e-6
"""Temperatures that SGLang takes for 0."""

MAX_SAMPLES = 1 << 14
"""Samples of one request: each is a request of the engine, and one client must not fill its queue for hours."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class RequestError(ConfigError):
    """A request that cannot be served as asked (HTTP 4xx).

    Attributes:
        field: path of the field, e.g. ``prompts.0.input_ids``.
        status: HTTP status.
    """

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.status = field, status

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "field": self.field, "type": "invalid_request_error"}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# What a sampling parameter may be, here and on SGLang's own endpoints (``rollout.plugin.requests``).
Temperature = Annotated[float, Field(ge=0, le=1e4)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=1 << 24)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


class SamplingRequest(_Strict):
    """Decoding of one request; the names are SGLang's."""

    temperature: Temperature = Field(1.0, description="0 is greedy")
    top_p: TopP = 1.0
    top_k: TopK = Field(-1, description="-1 is off")
    min_p: Share = 0.0
    max_new_tokens: Annotated[Count, Field(gt=0)] = Field(128, description="visible tokens at most")
    ignore_eos: bool = False
    stop: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field([], max_length=64)
    stop_token_ids: list[TokenId] = Field([], max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _no_grammar(cls, given: Any) -> Any:
        for name in STRUCTURED:
            if isinstance(given, dict) and given.get(name):
                raise ValueError(f"{name} is not supported for block diffusion; remove it and check the answer instead")
        return given

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, given: int) -> int:
        if given == 0:
            raise ValueError("0 keeps no token; use -1 to switch it off")
        return given

    @field_validator("temperature")
    @classmethod
    def _greedy(cls, given: float) -> float:
        return 0.0 if given < GREEDY_BELOW else given


class PromptRequest(_Strict):
    """One prompt group: exactly one of ``text``, ``messages``, ``input_ids``, ``resume``."""

    text: str | None = Field(None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, description="for the chat template")
    input_ids: list[TokenId] | None = Field(None, min_length=1)
    resume: list[dict[str, Any]] | None = Field(
        None, min_length=1, description="samples of an aborted group: each goes on where it stopped"
    )
    index: int | None = Field(
        None,
        ge=0,
        lt=1 << PROMPT_BITS,
        description="number of the prompt within the step; its place in the list if unset",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> PromptRequest:
        kinds = ("text", "messages", "input_ids", "resume")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)}; got {' and '.join(given) or 'none'}")
        return self


class RolloutRequest(_Strict):
    """``n`` responses to each of several prompts.

    With ``seed`` the seeds of the samples follow from (seed, step, prompt index, sample) and never meet within a run
    (``dllm.noise.sample_seed``); with ``step: null`` they follow from the prompt's ids instead, so that a prompt's
    responses do not depend on its place. Without ``seed`` the service draws one, and every sample says its own.
    """

    prompts: list[PromptRequest] = Field(min_length=1, max_length=1 << PROMPT_BITS)
    n: int = Field(1, ge=1, lt=1 << SAMPLE_BITS)
    sampling_params: SamplingRequest = SamplingRequest()
    step: int | None = Field(0, ge=0, lt=1 << STEP_BITS)
    seed: Seed | None = None
    stream: bool = Field(False, description="committed blocks as they come")
    routing: bool = Field(False, description="log the experts of every token (--enable-return-routed-experts)")
    deadline_s: float | None = Field(None, gt=0, description="seconds; ends at a block boundary as 'abort'")
    rid: str | None = Field(None, min_length=1, max_length=256, description="name for POST /rollout/abort")

    @model_validator(mode="after")
    def _distinct(self) -> RolloutRequest:
        indices = [i if p.index is None else p.index for i, p in enumerate(self.prompts)]
        if len(set(indices)) != len(indices):
            raise ValueError("prompts.index: two prompts have the same index and would share their noise")
        if self.n * len(self.prompts) > MAX_SAMPLES:
            raise ValueError(f"n: {len(self.prompts)} prompts with {self.n} samples each are more than {MAX_SAMPLES}")
        for i, prompt in enumerate(self.prompts):
            if prompt.resume is not None and len(prompt.resume) != self.n:
                raise ValueError(f"prompts.{i}.resume: has {len(prompt.resume)} samples; n is {self.n}")
        return self


class AbortRequest(_Strict):
    """The request to abort."""

    rid: str = Field(min_length=1, max_length=256)


def _path(location: Sequence[Any]) -> str:
    return ".".join(str(part) for part in location)


def parse(model: type[BaseModel], given: Any) -> Any:
    """An instance of ``model``.

    Raises:
        RequestError: the first field that is wrong, by its path.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        message, field = first["msg"].removeprefix("Value error, "), _path(first["loc"])
        if not field and (named := re.fullmatch(r"([a-z_.0-9]+): (.*)", message, re.DOTALL)):
            field, message = named.groups()  # a check of several fields
        raise RequestError(field or "body", message) from error
