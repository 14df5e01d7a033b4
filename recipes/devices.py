"""Which devices trainer and engines take, and whether that can work; asked before any process starts."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from dllm.config import ConfigError, load_hf_config
from weight_sync.layout import CheckpointLayout

BACKEND = "weight_sync"
"""``checkpoint_engine.backend`` of engines on devices of their own (``rollout.verl.checkpoint_engine``)."""

ROLLOUT = "actor_rollout_ref.rollout"


def check_devices(config: DictConfig, visible: int, gpu_bytes: int | None, *, dry_run: bool) -> list[str]:
    """Refuse a division of devices that cannot work or would not do what it says.

    Args:
        config: the recipe's, composed.
        visible: number of GPUs of this host.
        gpu_bytes: memory of one; None without any.
        dry_run: nothing is started here, so a lack of GPUs is worth a note only.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if trainer.v1.trainer_mode != "sync":
        raise ConfigError(
            f"trainer.v1.trainer_mode={trainer.v1.trainer_mode} is not what this recipe runs, which trains on the "
            "responses of the current weights only; leave it at sync"
        )
    needed, key = trainer.nnodes * trainer.n_gpus_per_node, "trainer.n_gpus_per_node"
    if config.actor_rollout_ref.hybrid_engine:
        _check_shared(rollout)
    else:
        _check_separate(config, gpu_bytes)
        needed += rollout.nnodes * rollout.n_gpus_per_node
        key += f" or {ROLLOUT}.n_gpus_per_node"
    if trainer.device == "cpu":
        slots = config.ray_kwargs.ray_init.num_gpus
        if slots < needed:
            raise ConfigError(
                f"ray_kwargs.ray_init.num_gpus={slots} logical slots are too few for {needed} ranks of trainer and "
                f"engines; set it to {needed}"
            )
        return []
    several_hosts = max(trainer.nnodes, rollout.nnodes) > 1 or config.ray_kwargs.ray_init.get("address") is not None
    if several_hosts or visible >= needed:
        return []
    lack = f"trainer and engines need {needed} GPUs, and {visible} are visible here"
    if dry_run:
        return [f"{lack}: a start would be refused"]
    raise ConfigError(f"{lack}; lower {key}, or use hardware=gpu1 or hardware=cpu")


def _check_shared(rollout: Any) -> None:
    """verl ignores these keys when engines share the trainer's devices."""
    for key, value, default in (
        ("nnodes", rollout.nnodes, 0),
        ("checkpoint_engine.backend", rollout.checkpoint_engine.backend, "naive"),
    ):
        if value != default:
            raise ConfigError(
                f"{ROLLOUT}.{key}={value} asks for engines on devices of their own, and "
                f"actor_rollout_ref.hybrid_engine=true puts them on the trainer's; use hardware=separate, or "
                f"leave it at {default}"
            )


def _check_separate(config: DictConfig, gpu_bytes: int | None) -> None:
    rollout = config.actor_rollout_ref.rollout
    backend = rollout.checkpoint_engine.backend
    if backend != BACKEND:
        raise ConfigError(
            f"{ROLLOUT}.checkpoint_engine.backend={backend} sends weights that nobody reads back and compares; with "
            f"engines on devices of their own use {BACKEND}, which hardware=separate sets"
        )
    gpus = rollout.nnodes * rollout.n_gpus_per_node
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if gpus < size or gpus % size:
        raise ConfigError(
            f"{ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node} on {ROLLOUT}.nnodes={rollout.nnodes} leaves {gpus} "
            f"devices for engines of {size}; give a multiple of {size}"
        )
    if rollout.free_cache_engine:
        raise ConfigError(
            f"{ROLLOUT}.free_cache_engine=true puts engines to sleep while the trainer works, which gains nothing on "
            "devices of their own; set it to false"
        )
    if gpu_bytes is not None and config.trainer.device != "cpu":
        dtype = rollout.dtype if rollout.dtype != "auto" else "bfloat16"
        hf_config = load_hf_config(config.actor_rollout_ref.model.path)
        nbytes = CheckpointLayout.from_config(hf_config, getattr(torch, dtype)).nbytes
        check_staging(nbytes, gpu_bytes, rollout.gpu_memory_utilization)


def check_staging(nbytes: int, gpu_bytes: int, utilization: float) -> None:
    """A receiver holds one copy of the weights on its engine's first GPU while a refresh arrives.

    Raises:
        ConfigError: beside an engine that takes ``utilization`` of ``gpu_bytes`` it does not fit.
    """
    free = int(gpu_bytes * (1 - utilization))
    if nbytes > free:
        raise ConfigError(
            f"{ROLLOUT}.gpu_memory_utilization={utilization} leaves {free / 1e9:.1f} GB of a GPU, and a refresh stages "
            f"{nbytes / 1e9:.1f} GB of weights there; lower it"
        )
