"""CUDA IPC: the engine maps the sender's GPU buffer and copies out of it. For a colocated trainer and engine."""

from __future__ import annotations

import torch

from weight_sync.buckets import Bucket
from weight_sync.control import EngineControl
from weight_sync.messages import BucketSpec


class CudaIpcTransport:
    """Every engine opens the handle exactly once per payload; the buffer lives until all have answered."""

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[EngineControl]) -> None:
        torch.cuda.current_stream(bucket.data.device).synchronize()
        for engine in engines:
            engine.send_bucket(spec, bucket.data)

    def close(self) -> None:
        torch.cuda.ipc_collect()
