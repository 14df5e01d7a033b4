"""Ray actor that hosts the engine: verl's SGLang server with block-diffusion settings and logged generation."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dllm.config import ConfigError
from dllm.decoding import SamplingParams, decoder_class
from rollout import preflight
from rollout.engine import write_algorithm_config
from rollout.params import StopRules
from rollout.records import RolloutError, check_trainable, sample_from_response

NO_SETTINGS = {
    "algorithm": "SelectThenSample",
    "options": {},
    "routing_every": 0,
    "load_debug_rollouts": None,
    "train_mixed": False,
}


def decoder_settings(engine_kwargs: dict[str, Any]) -> dict[str, Any]:
    """``rollout.engine_kwargs.sglang_dllm`` with defaults, and those that the decoder has for RL (``rl_options``).

    An option of null is one that was not set.

    Raises:
        ConfigError: an unknown key.
    """
    given = dict(engine_kwargs.get("sglang_dllm") or {})
    if unknown := sorted(set(given) - set(NO_SETTINGS)):
        raise ConfigError(
            f"rollout.engine_kwargs.sglang_dllm has no key {unknown[0]!r}; valid keys are {sorted(NO_SETTINGS)} "
            "(SGLang's own server arguments go under rollout.engine_kwargs.sglang)"
        )
    settings = NO_SETTINGS | given
    if not isinstance(settings["train_mixed"], bool):
        raise ConfigError(
            f"rollout.engine_kwargs.sglang_dllm.train_mixed={settings['train_mixed']!r} is no truth value; use true or "
            "false"
        )
    ours = preflight.is_ours(settings["algorithm"])
    preset = getattr(decoder_class(settings["algorithm"]), "rl_options", {}) if ours else {}
    chosen = {key: value for key, value in (settings["options"] or {}).items() if value is not None}
    return settings | {"options": {**preset, **chosen}}


def engine_flags(config: Any, model_path: str, config_file: str | None) -> dict[str, Any]:
    """Server arguments of the engine for a verl rollout config, checked.

    Args:
        config: verl's RolloutConfig.
        config_file: YAML file with the decoder's options.

    Raises:
        ConfigError: the preflight refused.
    """
    settings = decoder_settings(config.engine_kwargs or {})
    own = dict((config.engine_kwargs or {}).get("sglang") or {})
    requested = {
        "model_path": model_path,
        "dtype": config.dtype,
        "dllm_algorithm": settings["algorithm"],
        "dllm_algorithm_config": config_file,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tensor_model_parallel_size,
        "pp_size": config.pipeline_model_parallel_size,
        "disable_cuda_graph": bool(config.enforce_eager),
        "quantization": config.get("quantization"),
        "mem_fraction_static": config.gpu_memory_utilization,
        **own,
    }
    report = preflight.check_server(requested, training=True)
    flags = {name: report.effective.get(name) for name in preflight.FLAGS}
    # verl passes these itself, from its own keys.
    for name in ("model_path", "tp_size", "pp_size", "enable_lora", "disaggregation_mode", "quantization"):
        flags.pop(name)
    flags.pop("mem_fraction_static")
    if settings["routing_every"]:
        flags["enable_return_routed_experts"] = True
    flags |= own | {"grammar_backend": "none"}
    if report.effective["device"] == "cpu":
        flags["enable_memory_saver"] = False
    return {name: value for name, value in flags.items() if value is not None}


@cache
def server_class() -> type:
    """``BlockDiffusionServer``; made on demand, because its base imports SGLang."""
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    class BlockDiffusionServer(SGLangHttpServer):
        async def launch_server(self, master_address: str | None = None, master_port: int | None = None) -> None:
            if os.environ.get("VERL_PLATFORM") == "cpu":
                from rollout.plugin.cpu import cpu_environment

                os.environ.update(cpu_environment())
            from rollout.plugin.http import require_admin_key
            from rollout.plugin.loading import require

            require()
            settings = decoder_settings(self.config.engine_kwargs or {})
            options = settings["options"]
            self._config_file: Path | None = write_algorithm_config(options) if options else None
            flags = engine_flags(
                self.config, self.model_config.local_path, str(self._config_file) if self._config_file else None
            )
            self.config.engine_kwargs["sglang"] = flags
            # The engine listens on the node's address, and its weights, cache and profile are the trainer's alone.
            self._admin_key = flags.get("admin_api_key") or secrets.token_urlsafe(24)
            require_admin_key(self._admin_key)
            self.block_diffusion = preflight.check_server(
                {"model_path": self.model_config.local_path, **flags}, training=True
            ).block_diffusion
            await super().launch_server(master_address, master_port)
            if self.node_rank == 0:
                self._repair_server_info()

        def _repair_server_info(self) -> None:
            """verl 0.9.1 takes SGLang 0.5.17's port arguments for its scheduler info, which ``/server_info`` needs."""
            from sglang.srt.entrypoints.http_server import _GlobalState, set_global_state

            set_global_state(
                _GlobalState(
                    tokenizer_manager=self.tokenizer_manager,
                    template_manager=self.template_manager,
                    scheduler_info={},
                )
            )

        async def get_admin_key(self) -> str:
            return self._admin_key

        refresh_metrics: dict[str, float] | None = None

        async def set_refresh_metrics(self, metrics: dict[str, float]) -> None:
            """Keep what the last weight refresh cost, for the trainer to ask."""
            self.refresh_metrics = metrics

        async def get_refresh_metrics(self) -> dict[str, float] | None:
            return self.refresh_metrics

        async def check_alive(self) -> int:
            """Process id of the host; answers only while it is alive."""
            return os.getpid()

        async def generate(
            self,
            prompt_ids: list[int],
            sampling_params: dict[str, Any],
            request_id: str,
            image_data: Any = None,
            video_data: Any = None,
            **unused: Any,
        ) -> Any:
            """Decode one response with its log.

            Returns:
                ``TokenOutput`` whose ``token_ids`` and ``log_probs`` cover the whole terminal block (the log-prob of a
                random choice of positions rides on the first token of its step);
                ``extra_fields["dllm"]`` is the line of a rollout file (see ``rollout.records``).

            Raises:
                RolloutError: the engine failed the request, its log cannot be trained on, or it was restarted.
            """
            from sglang.srt.managers.io_struct import GenerateReqInput

            sampling, limit, request = split_sampling_params(sampling_params)
            every = decoder_settings(self.config.engine_kwargs or {})["routing_every"]
            seed = request.get("sampling_seed")
            output = await self.tokenizer_manager.generate_request(
                GenerateReqInput(
                    rid=request_id,
                    input_ids=list(prompt_ids),
                    sampling_params=request,
                    return_routed_experts=bool(every and seed is not None and seed % every == 0),
                ),
                None,
            ).__anext__()
            sample = sample_from_response(
                output, prompt_ids, self.block_diffusion.block_size, sampling, limit, request.get("sampling_seed")
            )
            sample.stop_rules = StopRules()
            check_trainable(sample.trace)
            check_refreshed(sample.trace.weight_versions, self.global_steps)
            versions = [int(v) if v.isdigit() else None for v in sample.trace.weight_versions]
            return TokenOutput(
                token_ids=sample.trace.replay_ids.tolist(),
                log_probs=sample.trace.action_logprob.tolist(),
                stop_reason=sample.finish_reason,
                extra_fields={
                    "dllm": sample.to_line(),
                    "global_steps": versions[-1] if versions else self.global_steps,
                    "min_global_steps": versions[0] if versions else self.global_steps,
                    "max_global_steps": versions[-1] if versions else self.global_steps,
                },
            )

    return BlockDiffusionServer


def check_refreshed(versions: Sequence[str], published: int | None) -> None:
    """Refuse blocks that were decoded with weights that no refresh has brought.

    Args:
        versions: of the blocks.
        published: version of the last refresh; None before the first one.

    Raises:
        RolloutError: a version is no number, as of an engine that has just started.
    """
    strange = sorted({version for version in versions if not version.isdecimal()})
    if published is not None and strange:
        raise RolloutError(
            f"the engine decoded with weights {strange[0]!r} after version {published} was published: it was "
            "restarted, or somebody else exchanged its weights; go on from the last checkpoint"
        )


def split_sampling_params(params: dict[str, Any]) -> tuple[SamplingParams, int, dict[str, Any]]:
    """verl's sampling dictionary as our parameters, the token limit, and SGLang's dictionary.

    Raises:
        ConfigError: a parameter that block diffusion cannot honour.
    """
    given = dict(params)
    given.pop("logprobs", None)
    limit = given.pop("max_tokens", None) or given.pop("max_new_tokens", None)
    if limit is None:
        raise ConfigError("sampling parameters lack max_tokens; the agent loop sets it")
    seed = given.pop("seed", None)
    if (penalty := given.pop("repetition_penalty", 1.0)) != 1.0:
        raise ConfigError(f"repetition_penalty={penalty} is not supported for block diffusion; use 1.0")
    sampling = SamplingParams(
        float(given.pop("temperature", 1.0)),
        float(given.pop("top_p", 1.0)),
        int(given.pop("top_k", -1)),
        float(given.pop("min_p", 0.0)),
    )
    if given:
        raise ConfigError(f"sampling parameter {min(given)!r} is not supported for block diffusion; remove it")
    request: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": int(limit),
    }
    if seed is not None:
        request["sampling_seed"] = int(seed)
    return sampling, int(limit), request
