"""Worker side of ``rollout.name=sglang_dllm``: carries refreshed weights to an engine.

It sits in a trainer rank that shares its device with the engine, or, with ``checkpoint_engine.backend=weight_sync``,
in a worker beside an engine that has a device for itself, and receives there.
"""

from __future__ import annotations

import asyncio
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
from weight_sync.messages import SyncReport
from weight_sync.publisher import WeightPublisher
from weight_sync.receiver import Receiver
from weight_sync.transports import Transport

RECEIVER = "receiver"
"""``wire_format`` of ``rollout.verl.checkpoint_engine``: instead of tensors there is a channel to the trainer."""


class BlockDiffusionAdapter(BaseRollout):
    """One per rank that carries weights. The first rank of every replica talks to the engine; all trainer ranks drain
    the weights, because gathering a sharded tensor is collective."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = replica_rank if replica_rank != -1 else rank // size
        self.is_leader_rank = rank % size == 0
        self._engine: EngineControl | None = None
        self._publisher: WeightPublisher | None = None

    async def engine(self) -> EngineControl:
        """Connection to this replica's engine, made on first use."""
        if self._engine is None:
            server = server_of(self.replica_rank)
            host, port = await server.get_server_address.remote()
            host = f"[{host}]" if is_valid_ipv6_address(host) else host
            self._engine = EngineControl(
                f"http://{host}:{port}",
                self.config.tensor_model_parallel_size,
                admin_key=await server.get_admin_key.remote(),
            )
        return self._engine

    async def publisher(self) -> WeightPublisher:
        """What sends to an engine on this rank's device, made on first use."""
        if self._publisher is None:
            self._publisher = WeightPublisher(
                wire_layout(self.model_config.local_path, self.config.dtype),
                default_transport(),
                [await self.engine()],
                int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20,
            )
        return self._publisher

    async def resume(self, tags: list[str]) -> None:
        """Map released engine memory back in ("weights" or "kv_cache")."""
        if self.is_leader_rank and self.config.free_cache_engine:
            (await self.engine()).resume_memory(tags)

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            (await self.engine()).release_memory(["kv_cache", "weights"])

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Refresh the engine with ``weights`` and label them ``global_steps``.

        Args:
            weights: (name, tensor) pairs; with ``wire_format="receiver"`` a channel to the trainer that sends them
                (None in ranks that have none), which is served until the engine holds ``global_steps``.

        Raises:
            LayoutError, WeightSyncError: the engine does not hold the new weights; the run must stop.
        """
        if wire_format == RECEIVER:
            if weights is not None:
                await asyncio.to_thread(Receiver(weights, await self.engine()).serve, str(global_steps or 0))
            return
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"wire_format={wire_format!r} is not supported; use checkpoint_engine.backend=weight_sync"
            )
        named = [pair async for pair in weights] if isinstance(weights, AsyncIterator) else weights
        if not self.is_leader_rank:
            for _ in named:
                pass
            return
        report = (await self.publisher()).publish(drained(named), str(global_steps or 0))
        await tell_server(self.replica_rank, global_steps, report)


def server_of(replica_rank: int) -> Any:
    """The Ray actor that hosts a replica's engine."""
    return ray.get_actor(f"sglang_server_{replica_rank}_0")


async def tell_server(replica_rank: int, global_steps: int | None, report: SyncReport) -> None:
    """Tell an engine's host which weights it has now, and what they cost."""
    server = server_of(replica_rank)
    await server.set_global_steps.remote(global_steps)
    await server.set_refresh_metrics.remote(report.as_metrics())


def wire_layout(model_path: str, dtype: str) -> CheckpointLayout:
    """What an engine of ``dtype`` ("auto": the one it chooses) takes of the model at ``model_path``."""
    hf_config = load_hf_config(model_path)
    name = engine_dtype(hf_config, get_device_name()) if dtype == "auto" else dtype
    return CheckpointLayout.from_config(hf_config, getattr(torch, name))


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
