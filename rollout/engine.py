"""Start a local engine and generate in batches.

SGLang does the work; this module checks the settings first, gives every sample its own seed and turns answers
into ``RolloutSample``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash
import yaml

from dllm.config import ConfigError, load_hf_config
from dllm.decoding import SamplingParams, decoder_class
from dllm.decoding.sampling import effective_sampling
from rollout import preflight
from rollout.records import RolloutSample, sample_from_response

OnSample = Callable[[int, int, RolloutSample], None]


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

    def to_sglang(self, seed: int | None) -> dict[str, Any]:
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


def content_seed(base: int, prompt_ids: Sequence[int], sample: int) -> int:
    """Seed of the ``sample``-th response to a prompt: depends on nothing but the prompt itself and ``base``."""
    text = f"{base}:{sample}:" + ",".join(map(str, prompt_ids))
    return xxhash.xxh3_64_intdigest(text.encode()) & (1 << 63) - 1


def write_algorithm_config(options: Mapping[str, Any]) -> Path:
    """SGLang takes algorithm options from a file only: write them to one (removed by the caller)."""
    handle, name = tempfile.mkstemp(prefix="dllm_algorithm_", suffix=".yaml")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        yaml.safe_dump(dict(options), file)
    return Path(name)


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


class Engine:
    """A local SGLang engine with one of our decoders.

    Args:
        model_path: Hugging Face checkpoint directory.
        dllm_algorithm: decoder name, or ``package.module:Class``.
        options: options of the decoder, e.g. ``{"threshold": 0.9}``; they win over the YAML file.
        dllm_algorithm_config: YAML file with options.
        device: "cpu" or "cuda"; None takes a GPU if one is visible.
        flags: any other server argument of SGLang.

    Raises:
        ConfigError: the preflight refused; no process was started.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dllm_algorithm: str = "SelectThenSample",
        options: Mapping[str, Any] | None = None,
        dllm_algorithm_config: str | Path | None = None,
        device: str | None = None,
        dtype: str = "auto",
        **flags: Any,
    ) -> None:
        if device == "cpu":
            from rollout.plugin.cpu import cpu_environment

            os.environ.update(cpu_environment())
        merged = preflight.read_algorithm_config(dllm_algorithm, dllm_algorithm_config) | dict(options or {})
        self._config_file = write_algorithm_config(merged) if merged else None
        try:
            requested = {
                "model_path": str(model_path),
                "dllm_algorithm": dllm_algorithm,
                "dllm_algorithm_config": str(self._config_file) if self._config_file else None,
                "device": device,
                "dtype": dtype,
                **flags,
            }
            self.report = preflight.check_server(requested)
            self.vocab_size = int(load_hf_config(model_path)["vocab_size"])
            diffusion = self.report.block_diffusion
            assert diffusion is not None
            self.block_diffusion = diffusion
            # SGLang's own classes cannot be imported before its environment is set, and log nothing anyway.
            self.decoder = decoder_class(dllm_algorithm) if preflight.is_ours(dllm_algorithm) else None
            if self.report.effective["device"] == "cpu":
                from rollout.plugin.cpu import prepare_environment

                os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
                prepare_environment()
            import sglang

            settings = {name: value for name, value in self.report.effective.items() if value is not None}
            settings.setdefault("grammar_backend", "none")
            settings.setdefault("log_level", "error")
            self.sglang = sglang.Engine(**settings)
        except BaseException:
            self._remove_config_file()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerateParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        on_sample: OnSample | None = None,
    ) -> list[list[RolloutSample]]:
        """Generate ``n`` responses to every prompt.

        Args:
            prompts: token ids.
            seed: with a seed, a prompt's responses do not depend on the other prompts; equal prompts count as
                further samples of one prompt.
            on_sample: called as ``on_sample(prompt index, sample index, sample)`` when a response is complete.

        Raises:
            ConfigError: a prompt cannot be taken (before anything is generated).
            RolloutError: the engine failed a request.
        """
        params = params or GenerateParams()
        for prompt in prompts:
            check_prompt(prompt, self.block_diffusion.mask_id, self.vocab_size)
        seen: dict[tuple[int, ...], int] = {}
        jobs = []
        for index, prompt in enumerate(prompts):
            first = seen.get(key := tuple(prompt), 0)
            seen[key] = first + n
            jobs += [(index, j, None if seed is None else content_seed(seed, prompt, first + j)) for j in range(n)]
        return self.sglang.loop.run_until_complete(self._generate_all(prompts, jobs, params, n, on_sample))

    async def _generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        jobs: Sequence[tuple[int, int, int | None]],
        params: GenerateParams,
        n: int,
        on_sample: OnSample | None,
    ) -> list[list[RolloutSample]]:
        results: list[list[Any]] = [[None] * n for _ in prompts]

        async def run(prompt: int, sample: int, seed: int | None) -> None:
            response = await self.sglang.async_generate(
                input_ids=list(prompts[prompt]),
                sampling_params=params.to_sglang(seed),
                return_routed_experts=params.routing,
            )
            made = sample_from_response(
                response,
                prompts[prompt],
                self.block_diffusion.block_size,
                effective_sampling(self.decoder, params.sampling),
                params.max_new_tokens,
                seed,
            )
            results[prompt][sample] = made
            if on_sample is not None:
                on_sample(prompt, sample, made)

        await asyncio.gather(*(run(*job) for job in jobs))
        return results

    def close(self) -> None:
        """Stop the engine's processes."""
        self.sglang.shutdown()
        self._remove_config_file()

    def _remove_config_file(self) -> None:
        if self._config_file is not None:
            self._config_file.unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def greedy(params: GenerateParams) -> GenerateParams:
    """The same request decoded greedily."""
    return replace(params, sampling=replace(params.sampling, temperature=0.0))
