"""Worker side of ``rollout.name=sglang_dllm``: carries refreshed weights from a trainer rank to its engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import ray
import torch
from verl.utils.device import get_device_name
from verl.utils.net_utils import is_valid_ipv6_address
from verl.workers.rollout.base import BaseRollout

from dllm.config import load_hf_config
from rollout.preflight import engine_dtype
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout
from weight_sync.publisher import WeightPublisher
from weight_sync.transports import Transport


class BlockDiffusionAdapter(BaseRollout):
    """One per trainer rank. The first rank of every replica talks to the engine; all ranks drain the weights,
    because gathering a sharded tensor is collective."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = replica_rank if replica_rank != -1 else rank // size
        self.is_leader_rank = rank % size == 0
        self._publisher: WeightPublisher | None = None

    async def publisher(self) -> WeightPublisher:
        """Connection to this replica's engine, made on first use."""
        if self._publisher is None:
            server = ray.get_actor(f"sglang_server_{self.replica_rank}_0")
            host, port = await server.get_server_address.remote()
            host = f"[{host}]" if is_valid_ipv6_address(host) else host
            engine = EngineControl(f"http://{host}:{port}", self.config.tensor_model_parallel_size)
            hf_config = load_hf_config(self.model_config.local_path)
            dtype = self.config.dtype if self.config.dtype != "auto" else engine_dtype(hf_config, get_device_name())
            self._publisher = WeightPublisher(
                CheckpointLayout.from_config(hf_config, getattr(torch, dtype)),
                default_transport(),
                [engine],
                int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20,
            )
        return self._publisher

    async def resume(self, tags: list[str]) -> None:
        """Map released engine memory back in ("weights" or "kv_cache")."""
        if self.is_leader_rank and self.config.free_cache_engine:
            for engine in (await self.publisher()).engines:
                engine.resume_memory(tags)

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            for engine in (await self.publisher()).engines:
                engine.release_memory(["kv_cache", "weights"])

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Refresh the engine with ``weights`` and label them ``global_steps``.

        Raises:
            LayoutError, WeightSyncError: the engine does not hold the new weights; the run must stop.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format={wire_format!r} is not supported; use a full-tensor backend")
        named = [pair async for pair in weights] if isinstance(weights, AsyncIterator) else weights
        if not self.is_leader_rank:
            for _ in named:
                pass
            return
        report = (await self.publisher()).publish(drained(named), str(global_steps if global_steps is not None else 0))
        server = ray.get_actor(f"sglang_server_{self.replica_rank}_0")
        await server.set_global_steps.remote(global_steps)
        await server.set_refresh_metrics.remote(report.as_metrics())


def drained(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of ``named``; what a failing consumer leaves is still drained, so that no other rank waits."""
    iterator = iter(named)
    try:
        yield from iterator
    finally:
        for _ in iterator:
            pass


def default_transport() -> Transport:
    """CUDA IPC to a colocated engine on a GPU, shared memory on a CPU."""
    if get_device_name() != "cpu":
        from weight_sync.transports.ipc import CudaIpcTransport

        return CudaIpcTransport()
    from weight_sync.transports.shm import SharedMemoryTransport

    return SharedMemoryTransport()
