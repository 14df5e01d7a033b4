"""From a checked ``RolloutRequest`` to jobs of the service, and from its events to the answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dllm.config import ConfigError
from dllm.decoding import SamplingParams
from dllm.decoding.sampling import effective_sampling
from dllm.noise import sample_seed
from dllm.trace import TraceError
from rollout.params import GenerateParams, check_prompt, content_seeds
from rollout.protocol import PromptRequest, RequestError, RolloutRequest
from rollout.records import RolloutError, RolloutSample
from rollout.service import Block, Event, Finished, Job


@dataclass(frozen=True)
class Model:
    """What a request is checked against.

    Attributes:
        context_length: tokens of prompt and response together.
        encode: text to ids.
        template: chat messages to ids.
        decoder: class of the engine's decoder, which says how it draws; None for SGLang's own.
        routing: whether the engine can log the experts of a token.
    """

    mask_id: int
    vocab_size: int
    block_size: int
    context_length: int
    encode: Callable[[str], list[int]]
    template: Callable[[Sequence[Mapping[str, Any]]], list[int]]
    decoder: type | None = None
    routing: bool = True


def jobs_of(request: RolloutRequest, model: Model) -> tuple[list[Job], GenerateParams]:
    """Jobs in the order of prompts and samples.

    Raises:
        RequestError: a prompt cannot be taken; the error names its field.
    """
    s = request.sampling_params
    params = params_of(request)
    if request.routing and not model.routing:
        raise RequestError("routing", "this server logs no experts; start it with --enable-return-routed-experts")
    for index, token in enumerate(s.stop_token_ids):
        if token >= model.vocab_size:
            raise RequestError(
                f"sampling_params.stop_token_ids.{index}", f"{token} is outside the vocabulary of {model.vocab_size}"
            )
    resumed = [_resumed(request, i, model) for i in range(len(request.prompts))]
    prompts = [
        part[0].trace.prompt_ids.tolist() if part else _ids(prompt, f"prompts.{i}", model)
        for i, (prompt, part) in enumerate(zip(request.prompts, resumed, strict=True))
    ]
    for i, ids in enumerate(prompts):
        total = len(ids) + s.max_new_tokens
        if total > model.context_length:
            raise RequestError(
                "sampling_params.max_new_tokens",
                f"{len(ids)} tokens of prompts.{i} and {s.max_new_tokens} new ones exceed the context length "
                f"{model.context_length} (--context-length)",
            )
    seeds = _seeds(request, prompts)
    jobs = []
    for i, ids in enumerate(prompts):
        for j in range(request.n):
            before = resumed[i][j] if resumed[i] else None
            jobs.append(Job(i, j, ids, seeds[i][j] if before is None else before.seed, before))
    return jobs, params


def params_of(request: RolloutRequest) -> GenerateParams:
    """How to generate, as the request asks."""
    s = request.sampling_params
    sampling = SamplingParams(s.temperature, s.top_p, s.top_k, s.min_p)
    return GenerateParams(sampling, s.max_new_tokens, s.ignore_eos, s.stop, s.stop_token_ids, request.routing)


def _ids(prompt: PromptRequest, field: str, model: Model) -> list[int]:
    name = next(name for name in ("text", "messages", "input_ids") if getattr(prompt, name) is not None)
    try:
        if prompt.text is not None:
            ids = model.encode(prompt.text)
        elif prompt.messages is not None:
            ids = model.template(prompt.messages)
        else:
            ids = list(prompt.input_ids or ())
        check_prompt(ids, model.mask_id, model.vocab_size)
    except RequestError:
        raise
    except ConfigError as error:
        raise RequestError(f"{field}.{name}", str(error)) from error
    except Exception as error:  # a chat template raises what its author chose
        raise RequestError(f"{field}.{name}", f"cannot be made into tokens: {error}") from error
    return ids


def _resumed(request: RolloutRequest, index: int, model: Model) -> list[RolloutSample]:
    lines, field = request.prompts[index].resume, f"prompts.{index}.resume"
    if lines is None:
        return []
    samples = []
    for j, line in enumerate(lines):
        try:
            sample = RolloutSample.from_line(line)
            check_sample(sample, model)
        except (TraceError, ConfigError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise RequestError(f"{field}.{j}", f"is no sample of this service: {error}") from error
        trace = sample.trace
        if trace.block_size != model.block_size:
            raise RequestError(f"{field}.{j}.block_size", f"is {trace.block_size}; the engine's is {model.block_size}")
        if sample.finish_reason == "abort":
            _check_goes_on(sample, params_of(request), model, f"{field}.{j}.sampling_params")
            if trace.visible != len(trace.replay_ids):
                raise RequestError(f"{field}.{j}.tail", "an aborted sample has none; this one was cut by hand")
            if trace.visible >= request.sampling_params.max_new_tokens:
                raise RequestError(
                    "sampling_params.max_new_tokens", f"{field}.{j} has {trace.visible} tokens already; ask for more"
                )
        if samples and not (trace.prompt_ids == samples[0].trace.prompt_ids).all():
            raise RequestError(f"{field}.{j}.input_ids", "differ from those of the group's first sample")
        samples.append(sample)
    return samples


def check_sample(sample: RolloutSample, model: Model) -> None:
    """Refuse a sample that this engine cannot have made.

    Raises:
        ConfigError: it names the part.
    """
    check_prompt(sample.trace.prompt_ids.tolist(), model.mask_id, model.vocab_size)
    ids = sample.trace.replay_ids
    if len(ids) and (ids.min() < 0 or ids.max() >= model.vocab_size or (ids == model.mask_id).any()):
        raise ConfigError(f"output_ids: must be ids of the vocabulary of {model.vocab_size} without the mask token")
    if sample.finish_reason not in ("stop", "length", "abort"):
        raise ConfigError(f"finish_reason: {sample.finish_reason!r} is none of stop, length, abort")
    if not isinstance(sample.text, str):
        raise ConfigError(f"text: {sample.text!r} is no text")
    seed = sample.seed
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
        raise ConfigError(f"sampling_params.seed: {seed!r} is no whole number of 0 to 2**63 - 1")


def _check_goes_on(sample: RolloutSample, params: GenerateParams, model: Model, field: str) -> None:
    """Refuse to go on with a response by other rules than it was begun with."""
    if sample.stop_rules is None:
        raise RequestError(field, "has no ignore_eos, stop and stop_token_ids; send the sample as it was answered")
    if len(sample.trace.replay_ids) and params.routing is not (sample.routing is not None):
        raise RequestError("routing", f"is {params.routing}; a response keeps what it began with")
    before = vars(sample.trace.sampling) | sample.stop_rules.to_dict()
    now = vars(effective_sampling(model.decoder, params.sampling)) | params.stop_rules.to_dict()
    for name, value in now.items():
        if before[name] != value:
            raise RequestError(
                f"{field}.{name}",
                f"is {before[name]!r}, the request's is {value!r}; a response keeps what it began with",
            )


def _seeds(request: RolloutRequest, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    base = secrets.randbits(62) if request.seed is None else request.seed
    if request.step is None:
        return content_seeds(base, prompts, request.n)
    indices = [i if p.index is None else p.index for i, p in enumerate(request.prompts)]
    return [[sample_seed(base, request.step, i, j) for j in range(request.n)] for i in indices]


def sample_line(result: RolloutSample | RolloutError) -> dict[str, Any]:
    """A sample of an answer: the line of ``rollout.generate``, or ``error`` where the engine failed it."""
    if isinstance(result, RolloutError):
        return {"error": {"message": str(result), "type": "rollout_error"}, "finish_reason": "error"}
    return result.to_line()


def event_line(event: Event) -> dict[str, Any]:
    """An event of a stream: the new tokens of a sample, or the complete sample."""
    place = {"prompt": event.prompt, "sample": event.sample}
    return place | (event.fields if isinstance(event, Block) else {"finished": sample_line(event.result)})


@dataclass
class Answer:
    """The body of an answer, filled sample by sample."""

    rid: str
    prompts: int
    n: int
    samples: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples = [[None] * self.n for _ in range(self.prompts)]

    def add(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.samples[event.prompt][event.sample] = sample_line(event.result)

    def body(self) -> dict[str, Any]:
        return {"rid": self.rid, "groups": [{"samples": group} for group in self.samples]}
