"""Driver side of ``rollout.name=sglang_dllm``: verl's SGLang replica with our server in it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from dllm.config import ConfigError

SECTION = "sglang_dllm"
"""Key under ``rollout.engine_kwargs`` that holds the decoder's settings."""


@cache
def replica_class() -> type:
    """``BlockDiffusionReplica``; made on demand, because its base imports SGLang."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE")
    base = RolloutReplicaRegistry.get("sglang")
    if on_cpu is not None:
        # verl's loader sets and then deletes the variable that our engine processes inherit.
        os.environ["SGLANG_USE_CPU_ENGINE"] = on_cpu

    import ray

    from rollout.verl.server import server_class

    class BlockDiffusionReplica(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_rollout_config(self.config)
            self.server_class = ray.remote(server_class())

    return BlockDiffusionReplica


def check_rollout_config(config: Any) -> None:
    """Refuse a verl rollout config that would lose the log or train another distribution than it samples.

    Raises:
        ConfigError: a key has to be set; the message says to what.
    """
    manager = (config.get("agent", {}) or {}).get("agent_loop_manager_class")
    if manager != AGENT_LOOP_MANAGER:
        raise ConfigError(
            f"rollout.agent.agent_loop_manager_class={manager!r} drops the reveal log of block diffusion; set it to "
            f"{AGENT_LOOP_MANAGER!r}"
        )
    if not config.calculate_log_probs:
        raise ConfigError("rollout.calculate_log_probs=False hides the engine's log-probs; set it to True")


AGENT_LOOP_MANAGER = "rollout.verl.agent_loop.BlockDiffusionAgentLoopManager"
