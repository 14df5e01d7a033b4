"""Engine settings: resolved from the checkpoint instead of SGLang's table, and refused by name if wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from dllm.config import BlockDiffusionConfig, resolve
from rollout import preflight
from rollout.plugin.loading import check_loaded
from weight_sync.control import LOADER

logger = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def _resolve(model_path: str, block_size: int | None) -> BlockDiffusionConfig:
    config = resolve(model_path, block_size=block_size)
    logger.info("block diffusion settings: %s", config.describe())
    return config


def _dllm_config(original: Callable, server_args: Any) -> Any:
    """SGLang's ``DllmConfig`` from the checkpoint, the algorithm's YAML and the flags."""
    if server_args.dllm_algorithm is None:
        return None
    check_loaded()
    from sglang.srt.dllm.config import DllmConfig

    options = preflight.read_algorithm_config(server_args.dllm_algorithm, server_args.dllm_algorithm_config)
    config = _resolve(server_args.model_path, options.pop("block_size", None))
    result = DllmConfig(
        algorithm=server_args.dllm_algorithm,
        algorithm_config=options,
        block_size=config.block_size,
        mask_id=config.mask_id,
        max_running_requests=server_args.max_running_requests,
        first_done_first_out_mode=server_args.dllm_fdfo,
    )
    result.random_seed = getattr(server_args, "random_seed", None) or 0
    return result


def _before_server_args(server_args: Any) -> None:
    """Run the preflight on the flags as the user gave them, fill in what is unset, and add our weight loader."""
    if server_args.dllm_algorithm is not None:
        check_loaded()
    flags = {name: getattr(server_args, name, None) for name in preflight.FLAGS}
    report = preflight.check_server(flags)
    for name, value in report.effective.items():
        if name in preflight.FLAGS and flags.get(name) != value:
            setattr(server_args, name, value)
            logger.warning("preflight: %s = %r (%s)", name, value, report.reasons.get(name, "preflight"))
    if server_args.dllm_algorithm is not None:
        given = server_args.custom_weight_loader or []
        loaders = [given] if isinstance(given, str) else list(given)
        # Beside a user's own: an update request names the one it means.
        server_args.custom_weight_loader = list(dict.fromkeys([*loaders, LOADER]))


def _after_deterministic_config(result: Any, scheduler: Any) -> None:
    """Lift the alignment of prompt chunks that SGLang's deterministic mode asks for.

    Its block-diffusion scheduler asserts that there is none, on the first request. Chunks here are whole blocks, each
    a row of its own, so that their attention does not depend on the chunk.
    """
    if scheduler.server_args.dllm_algorithm is not None:
        scheduler.truncation_align_size = None


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rollout.hf_config import register_configs

    register_configs()
    HookRegistry.register("sglang.srt.dllm.config.DllmConfig.from_server_args", _dllm_config, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.__post_init__", _before_server_args, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_deterministic_inference_config",
        _after_deterministic_config,
        HookType.AFTER,
    )
