"""verl worker classes that also run on a CPU host."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


def init_gloo() -> None:
    """Start the process group before verl does: it asks for "cpu:gloo,cpu:gloo", which torch refuses.

    Nothing happens on a GPU.
    """
    if get_device_name() != "cpu" or torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


class BlockDiffusionTrainingWorker(TrainingWorker):
    def __init__(self, config: Any) -> None:
        init_gloo()
        super().__init__(config)
        if get_device_name() == "cpu":
            # Engine and trainer take turns on the cores, so each may use all of them.
            torch.set_num_threads(os.cpu_count() or 1)


class BlockDiffusionWorker(ActorRolloutRefWorker):
    actor_worker_cls = BlockDiffusionTrainingWorker
    ref_worker_cls = BlockDiffusionTrainingWorker
