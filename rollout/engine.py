"""Start a local engine and generate in batches.

SGLang does the work; this module checks the settings first, gives every sample its own seed and turns answers
into ``RolloutSample``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dllm.config import load_hf_config, positive_int
from rollout import preflight
from rollout.jobs import OnSample, Prompt, chat_ids, collected, events_in, jobs_by_content, jobs_by_place
from rollout.params import GenerateParams, check_prompt, content_seed, greedy
from rollout.records import RolloutSample
from rollout.service import Event

__all__ = ["Engine", "GenerateParams", "check_prompt", "content_seed", "greedy", "write_algorithm_config"]


def write_algorithm_config(options: Mapping[str, Any]) -> Path:
    """SGLang takes algorithm options from a file only: write them to one (removed by the caller)."""
    handle, name = tempfile.mkstemp(prefix="dllm_algorithm_", suffix=".yaml")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        yaml.safe_dump(dict(options), file)
    return Path(name)


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
        ConfigError: the preflight refused, or SGLang's plugin does not work; no process was started.
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
            self.vocab_size = positive_int(load_hf_config(model_path), "vocab_size")
            diffusion = self.report.block_diffusion
            assert diffusion is not None
            self.block_diffusion = diffusion
            if self.report.effective["device"] == "cpu":
                from rollout.plugin.cpu import prepare_environment

                os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
                prepare_environment()
            from rollout.plugin.loading import require

            require()
            import sglang

            settings = {name: value for name, value in self.report.effective.items() if value is not None}
            settings.setdefault("grammar_backend", "none")
            settings.setdefault("log_level", "error")
            self.sglang = sglang.Engine(**settings)
            from rollout.plugin.backend import service_of

            self.service = service_of(self.sglang.tokenizer_manager)
        except BaseException:
            self._remove_config_file()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: GenerateParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        step: int | None = None,
        rid: str | None = None,
        deadline: float | None = None,
        on_sample: OnSample | None = None,
    ) -> list[list[RolloutSample]]:
        """Generate ``n`` responses to every prompt.

        Args:
            prompts: token ids, texts or chat messages.
            seed, step: with a step, seeds follow from (seed, step, prompt, sample) and never meet within a run; without
                one a prompt's responses depend on nothing but the prompt and ``seed``, and equal prompts count as
                further samples of one prompt. Without ``seed`` they are drawn.
            rid: name for ``abort``.
            deadline: seconds after which samples end at a block boundary with finish reason "abort".
            on_sample: called as ``on_sample(prompt index, sample index, sample)`` when a response is complete.

        Raises:
            ConfigError: a prompt cannot be taken (before anything is generated).
            RolloutError: the engine failed a request.
        """
        events = self._events(prompts, params, n, seed, step, rid, deadline, blocks=False)
        return collected(events, len(prompts), n, on_sample)

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: GenerateParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        step: int | None = None,
        rid: str | None = None,
        deadline: float | None = None,
    ) -> Iterator[Event]:
        """The same samples as ``generate``, block by block: ``Block`` and at the end of each sample ``Finished``.

        Closing the iterator aborts what is left.

        Raises:
            ConfigError: a prompt cannot be taken.
        """
        yield from self._events(prompts, params, n, seed, step, rid, deadline, blocks=True)

    def abort(self, rid: str) -> None:
        """End a stream at its next block boundaries, from any thread; nothing happens if there is none."""
        asyncio.run_coroutine_threadsafe(self.service.abort(rid), self.sglang.loop)

    def _events(
        self,
        prompts: Sequence[Prompt],
        params: GenerateParams | None,
        n: int,
        seed: int | None,
        step: int | None,
        rid: str | None,
        deadline: float | None,
        blocks: bool,
    ) -> Iterator[Event]:
        ids = [self._ids(prompt) for prompt in prompts]
        jobs = jobs_by_content(ids, n, seed) if step is None else jobs_by_place(ids, n, seed, step)
        events = self.service.events(jobs, params or GenerateParams(), rid=rid, deadline=deadline, blocks=blocks)
        return events_in(self.sglang.loop, events)

    def _ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked."""
        tokenizer = self.sglang.tokenizer_manager.tokenizer
        items: list[Any] = list(tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
        if items and isinstance(items[0], Mapping):
            items = chat_ids(tokenizer, items)
        check_prompt(items, self.block_diffusion.mask_id, self.vocab_size)
        return items

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
