"""Run a training in this process: Ray, TransferQueue, trainer, agent loop, and a clean end.

verl runs its controller in a Ray actor; ours runs in the driver, which saves a process and shows errors and
progress where the user is.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from dllm.config import ConfigError
from trainers.reaper import start_reaper
from trainers.trainer import BlockDiffusionTrainer, Listener
from trainers.watchdog import Watchdog, worker_died

logger = logging.getLogger(__name__)


def start_ray(config: DictConfig) -> None:
    """Start a local Ray for this run with the environment its workers need."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    options = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"] |= {"TRANSFER_QUEUE_ENABLE": "1"}
    environment["env_vars"] |= options.pop("runtime_env", {}).get("env_vars", {})
    for name in FORWARDED:
        if name in os.environ:
            environment["env_vars"][name] = os.environ[name]
    if os.environ.get("VERL_PLATFORM") == "cpu":
        # The "GPU" slots are logical; Ray refuses more of them than the variable names.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    ray.init(runtime_env=environment, logging_level=logging.ERROR, **options)


FORWARDED = (
    "VERL_PLATFORM",
    "VERL_USE_EXTERNAL_MODULES",
    "SGLANG_USE_CPU_ENGINE",
    "TORCHDYNAMO_DISABLE",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONWARNINGS",
    "HF_HUB_OFFLINE",
)
"""Environment variables of the driver that every worker needs."""


def train(config: DictConfig, listener: Listener | None = None) -> None:
    """Run a training to its end.

    Args:
        config: a resolved verl config with our ``dllm`` group.
        listener: told of progress (see ``BlockDiffusionTrainer``).

    Raises:
        WorkerDied: an engine or a worker is gone; the message has its name and the end of its log.
    """
    import transfer_queue as tq

    from rollout.verl.agent_loop import BlockDiffusionAgentLoopManager

    listener = listener or (lambda event, details: None)
    try:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"verl refuses the config: {error}") from error
    start_reaper()
    listener("phase", {"name": "Ray"})
    start_ray(config)
    trainer: BlockDiffusionTrainer | None = None
    succeeded = False
    try:
        with Watchdog() as watchdog:
            config.transfer_queue.enable = True
            tq.init(config.transfer_queue)
            listener("phase", {"name": "trainer and engine"})
            trainer = BlockDiffusionTrainer(config, listener)
            trainer.init()
            watchdog.watch(trainer.llm_server_manager.get_replicas(), trainer.actor_rollout_wg.workers)
            listener("phase", {"name": "agent loop"})
            manager = BlockDiffusionAgentLoopManager.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        succeeded = True
    except ray.exceptions.ActorDiedError as error:
        raise worker_died(error) from error
    finally:
        tracking = getattr(trainer, "logger", None)
        if tracking is not None:
            with suppress(Exception):
                tracking.finish(exit_code=0 if succeeded else 1)
        with suppress(Exception):
            tq.close()
        ray.shutdown()
