"""Host shared memory: a bucket is a file under /dev/shm that the engine maps. For CPU engines on the same host."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from weight_sync.buckets import Bucket
from weight_sync.control import EngineControl
from weight_sync.messages import BucketSpec

SHM = Path("/dev/shm")


class SharedMemoryTransport:
    """Writes each bucket into one file, delivers it to all engines and removes it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="weight_sync_", dir=SHM if SHM.is_dir() else None))

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[EngineControl]) -> None:
        file = self.directory / f"{bucket.index}.bin"
        bucket.data.cpu().numpy().tofile(file)
        try:
            spec.file = str(file)
            for engine in engines:
                engine.send_bucket(spec, torch.empty(0, dtype=torch.uint8))
        finally:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        for file in self.directory.glob("*"):
            file.unlink(missing_ok=True)
        self.directory.rmdir()
