"""Host shared memory: a bucket is a file under /dev/shm that the engine reads. For CPU engines on the same host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from weight_sync.buckets import Bucket, new_buffer
from weight_sync.messages import BucketSpec, WeightSyncError
from weight_sync.staging import sweep
from weight_sync.transports import Engine, fan_out

SHM = Path("/dev/shm")

PREFIX = "weight_sync_"


class SharedMemoryTransport:
    """Writes each bucket into one file, delivers it to all engines and removes it.

    Args:
        directory: where the files lie; its file system must have room for one bucket.
    """

    def __init__(self, directory: Path | None = None) -> None:
        parent = directory or (SHM if SHM.is_dir() else Path(tempfile.gettempdir()))
        sweep([parent], PREFIX)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_", dir=parent))

    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        return new_buffer(index, size, device)

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[Engine]) -> list[str]:
        bucket.wait()
        file = self.directory / f"{bucket.index}.bin"
        try:
            bucket.data.cpu().numpy().tofile(file)
            spec.file = str(file)
            return fan_out(engines, lambda engine: engine.send_bucket(spec))
        except OSError as error:
            raise WeightSyncError(
                f"bucket {bucket.index} of {spec.nbytes} bytes cannot be written to {self.directory}: {error}; make "
                "room there or use smaller buckets"
            ) from error
        finally:
            file.unlink(missing_ok=True)

    def release(self) -> None:
        for file in self.directory.glob("*.bin"):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        self.release()
        if self.directory.is_dir():
            self.directory.rmdir()
