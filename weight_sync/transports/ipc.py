"""CUDA IPC: the engine maps the sender's GPU buffer and copies out of it. For a colocated trainer and engine."""

from __future__ import annotations

import torch
from torch import Tensor

from weight_sync.buckets import Bucket
from weight_sync.messages import BucketSpec
from weight_sync.transports import Engine, fan_out

SLOTS = 2


class CudaIpcTransport:
    """Two device buffers, which every engine maps once per update and keeps until it ends.

    The buffers must not come from ``expandable_segments`` or a pausable allocator: CUDA cannot share those.
    """

    def __init__(self) -> None:
        self._slots: list[Tensor] = []
        self._announced: str | None = None

    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        if not self._slots:
            self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        return self._slots[index % SLOTS]

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[Engine]) -> list[str]:
        bucket.wait()
        if self._announced != spec.run_id:
            fan_out(engines, lambda engine: engine.send_slots(spec.run_id, spec.version, self._slots))
            self._announced = spec.run_id
        spec.slot = bucket.index % SLOTS
        return fan_out(engines, lambda engine: engine.send_bucket(spec))

    def release(self) -> None:
        self._slots, self._announced = [], None
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()
