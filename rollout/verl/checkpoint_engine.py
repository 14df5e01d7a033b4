"""verl's ``checkpoint_engine.backend=weight_sync``: weights to engines on devices of their own.

verl makes one of these in every trainer rank and in a worker beside every rank of an engine, and its
``CheckpointEngineManager`` calls them in turn. The bytes travel by our publisher, transport and receivers, so that an
engine's weights are read back and compared like those of an engine that shares its device with the trainer.

Imported by verl as ``checkpoint_engine.custom_backend_module``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import ray
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from rollout.verl.adapter import RECEIVER, drained, tell_server, wire_layout
from weight_sync.messages import WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.collective import TRAINER, Channel, CollectiveTransport, meeting_point

BACKEND = "weight_sync"


@CheckpointEngineRegistry.register(BACKEND)
class ReceivedWeights(CheckpointEngine):
    """One end of the refresh: the first trainer rank sends, the first rank of every replica receives, others do nothing
    (trainer ranks take part in gathering the tensors).

    Args:
        bucket_size: bytes.
        model_path, dtype: of the engines.
        is_master: this is the first trainer rank.
        point_to_point: see ``CollectiveTransport``.
        timeout: seconds until an answer or a bucket of the other side is given up.
    """

    wire_format = RECEIVER

    def __init__(
        self,
        bucket_size: int,
        model_path: str,
        dtype: str = "auto",
        is_master: bool = False,
        point_to_point: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.bucket_size, self.model_path, self.dtype = bucket_size, model_path, dtype
        self.is_master, self.point_to_point, self.timeout = is_master, point_to_point, timeout
        self.meet: tuple[str, int] | None = None
        self.store: Any = None
        self.channel: Channel | None = None
        self.publisher: WeightPublisher | None = None

    def prepare(self) -> dict[str, Any]:
        """Where the receivers meet the sender, and whether this is the first rank of its group."""
        if self.is_master and self.meet is None:
            host = ray.util.get_node_ip_address().strip("[]")
            self.store = meeting_point(host, 0, True, self.timeout)
            self.meet = host, self.store.port
        return {"meet": self.meet, "first": int(os.environ["RANK"]) == 0}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Ranks in the channel, None for those that stay out; receivers are 1, 2, … in the order of the replicas."""
        first = [each["first"] for each in metadata[actor_wg_world_size:]]
        receivers = [sum(first[: i + 1]) if here else None for i, here in enumerate(first)]
        senders = [TRAINER, *[None] * (actor_wg_world_size - 1)]
        shared = {"size": sum(first) + 1, "meet": metadata[0]["meet"]}
        arguments = lambda ranks: {"rank": ranks, **{name: [value] * len(ranks) for name, value in shared.items()}}
        return arguments(senders), arguments(receivers)

    def init_process_group(self, rank: int | None, size: int, meet: tuple[str, int]) -> None:
        """Connect, once: every refresh of a run goes through the same channel.

        Raises:
            WeightSyncError: the other side did not come, or the number of replicas has changed.
        """
        if rank is None:
            return
        if self.channel is None:
            backend = "gloo" if get_device_name() == "cpu" else "nccl"
            self.channel = Channel(*meet, rank, size, backend, self.timeout, self.store)
        elif (self.channel.rank, self.channel.size) != (rank, size):
            raise WeightSyncError(
                f"the run began with {self.channel.size - 1} engines and has {size - 1} now; restart it"
            )

    def finalize(self) -> None:
        """Nothing is kept but the channel."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send ``weights`` as version ``global_steps``; the ``weight_sync/*`` metrics of the refresh.

        Raises:
            LayoutError, WeightSyncError: an engine does not hold the new weights; the run must stop.
        """
        if self.channel is None:
            for _ in weights:
                pass
            return {}
        if self.publisher is None:
            transport = CollectiveTransport(self.channel, self.point_to_point)
            layout = wire_layout(self.model_path, self.dtype)
            self.publisher = WeightPublisher(layout, transport, transport.engines(), self.bucket_size)
        report = self.publisher.publish(drained(weights), str(global_steps or 0))
        await asyncio.gather(*(tell_server(i, global_steps, report) for i in range(self.channel.size - 1)))
        return report.as_metrics()

    def receive_weights(self, global_steps: int | None = None) -> Channel | None:
        """What ``BlockDiffusionAdapter.update_weights`` receives from; None in ranks without a channel."""
        return self.channel
