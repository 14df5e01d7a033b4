"""verl plugin: ``actor_rollout_ref.rollout.name=sglang_dllm``.

Imported by verl in every process, through the ``verl.plugins`` entry point or ``VERL_USE_EXTERNAL_MODULES``, at
the end of ``import verl``: registrations only, everything heavy is loaded when it is used.
"""

from __future__ import annotations

import os

NAME = "sglang_dllm"


def _load_replica() -> type:
    from rollout.verl.replica import replica_class

    return replica_class()


def _register() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if os.environ.get("VERL_PLATFORM") == "cpu":
        from rollout.plugin.cpu import prepare_environment
        from rollout.verl import platform_cpu

        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        prepare_environment()
        platform_cpu.register()
    # verl has a register function for replicas but not for the worker-side adapters: their table is the registry.
    base._ROLLOUT_REGISTRY[(NAME, "async")] = "rollout.verl.adapter.BlockDiffusionAdapter"
    RolloutReplicaRegistry.register(NAME, _load_replica)

    from rollout.hf_config import register_configs

    register_configs()


_register()
