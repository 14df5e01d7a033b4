"""SGLang's own model class, weight payloads and update group: to test and time what happens to weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.config import load_hf_config
from rollout.preflight import checkpoint_dtype
from weight_sync.control import pickled


def build_model(model_path: str | Path, device: str = "cpu", rank: int = 0, size: int = 1, port: int = 0) -> Any:
    """The network that an engine would hold, with weights that are not initialised.

    Args:
        model_path: directory with config.json.
        rank, size: tensor-parallel rank and number of ranks, which are processes that call this at the same time.
        port: where the ranks meet; needed if ``size`` is not 1. Later models of a process are of the same ranks.
    """
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        from rollout.plugin.cpu import prepare_environment

        prepare_environment()
    import rollout.plugin

    rollout.plugin.register()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.srt.utils.network import get_free_port

    # SGLang's "auto" turns fp32 into fp16.
    dtype = checkpoint_dtype(load_hf_config(model_path))
    args = ServerArgs(model_path=str(model_path), device=device, dtype=dtype, tp_size=size, skip_tokenizer_init=True)
    set_global_server_args_for_scheduler(args)
    backend = "gloo" if device == "cpu" else "nccl"
    meeting = f"tcp://127.0.0.1:{port or get_free_port()}"
    if not model_parallel_is_initialized():
        init_distributed_environment(
            backend=backend, world_size=size, rank=rank, local_rank=rank, distributed_init_method=meeting
        )
        initialize_model_parallel(tensor_model_parallel_size=size, backend=backend)
    config = ModelConfig.from_server_args(args)
    initialize_dp_attention(args, config)
    initialize_moe_config(args)
    cls, _ = get_model_architecture(config)
    with set_default_torch_dtype(config.dtype), torch.device(device):
        return cls(config.hf_config)


def flattened_bucket(named: Sequence[tuple[str, Tensor]]) -> str:
    """SGLang's own bucket of tensors (``load_format="flattened_bucket"``) as its endpoint takes it: base64 of a pickle.

    A CUDA bucket travels as an IPC handle, which the caller keeps alive; a CPU bucket by value.
    """
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # Offsets are not aligned: wider elements first.
    bucket = FlattenedTensorBucket(named_tensors=sorted(named, key=lambda pair: -pair[1].element_size()))
    flat = bucket.get_flattened_tensor()
    if flat.is_cuda:
        monkey_patch_torch_reductions()
    flattened_bucket.alive = flat  # type: ignore[attr-defined]
    return pickled({"flattened_tensor": flat, "metadata": bucket.get_metadata()}, flat.is_cuda)


def join_update_group(address: str, name: str, size: int, backend: str) -> Any:
    """Rank 0 of the process group of SGLang's own distributed update, which its ranks join at the same time.

    Args:
        address: ``tcp://HOST:PORT``, where this process listens.
        name: as in ``/init_weights_update_group``.
        size: this process and the engine's ranks.
    """
    from sglang.srt.utils.common import init_custom_process_group

    return init_custom_process_group(backend, address, world_size=size, rank=0, group_name=name)
