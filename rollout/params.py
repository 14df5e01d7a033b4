"""How to generate: decoding of one request, its limits, and the seeds of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from dllm.config import ConfigError
from dllm.decoding import SamplingParams

RESUMED = "dllm_resumed"
"""Key of SGLang's ``custom_params``: so many tokens at the end of the prompt are part of the response, where a stop
string may begin."""


@dataclass(frozen=True)
class StopRules:
    """What ends a response before its limit; the names are SGLang's.

    Attributes:
        ignore_eos: do not stop at stop ids.
        stop: stop strings.
        stop_token_ids: further stop ids.
    """

    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As in ``sampling_params`` of a rollout line."""
        return {"ignore_eos": self.ignore_eos, "stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> StopRules | None:
        """Inverse of ``to_dict``; None if they are not among the keys."""
        if not {"ignore_eos", "stop", "stop_token_ids"} <= given.keys():
            return None
        strings, ids = (tuple(given[name] or ()) for name in ("stop", "stop_token_ids"))
        return cls(bool(given["ignore_eos"]), strings, ids)


@dataclass
class GenerateParams:
    """How to generate: decoding of one request plus its limits.

    Attributes:
        sampling: temperature and filters.
        max_new_tokens: visible tokens at most; the last block is finished anyway.
        ignore_eos: do not stop at stop ids.
        stop: stop strings.
        stop_token_ids: further stop ids.
        routing: log the experts of every token; the engine must run with ``enable_return_routed_experts``.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    routing: bool = False

    @property
    def stop_rules(self) -> StopRules:
        return StopRules(self.ignore_eos, tuple(self.stop), tuple(self.stop_token_ids))

    def to_sglang(self, seed: int | None) -> dict[str, Any]:
        """SGLang's sampling parameters of a request with this seed."""
        params: dict[str, Any] = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "min_p": self.sampling.min_p,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        if self.stop:
            params["stop"] = list(self.stop)
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if seed is not None:
            params["sampling_seed"] = seed
        return params


def greedy(params: GenerateParams) -> GenerateParams:
    """The same request decoded greedily."""
    return replace(params, sampling=replace(params.sampling, temperature=0.0))


def content_seed(base: int, prompt_ids: Sequence[int], sample: int) -> int:
    """Seed of the ``sample``-th response to a prompt: depends on nothing but the prompt itself and ``base``."""
    text = f"{base}:{sample}:" + ",".join(map(str, prompt_ids))
    return xxhash.xxh3_64_intdigest(text.encode()) & (1 << 63) - 1


def content_seeds(base: int, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """``content_seed`` of ``n`` samples of every prompt; equal prompts count as further samples of one prompt."""
    seen: dict[tuple[int, ...], int] = {}
    seeds = []
    for prompt in prompts:
        first = seen.get(key := tuple(prompt), 0)
        seen[key] = first + n
        seeds.append([content_seed(base, prompt, first + j) for j in range(n)])
    return seeds


def check_prompt(prompt_ids: Sequence[int], mask_id: int, vocab_size: int) -> None:
    """Refuse a prompt the model cannot take.

    Raises:
        ConfigError: it is empty, holds the mask token, or an id outside the vocabulary.
    """
    if not len(prompt_ids):
        raise ConfigError("prompt is empty; give it at least one token")
    if mask_id in prompt_ids:
        raise ConfigError(f"prompt holds the mask token {mask_id}, which stands for a hidden position; remove it")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise ConfigError(f"prompt has ids outside the vocabulary of {vocab_size}; check the tokenizer")
