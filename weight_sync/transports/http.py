"""HTTP: the bytes of a bucket as the body of a request. For servers anywhere, without shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

from weight_sync.buckets import Bucket, new_buffer
from weight_sync.checksum import host_checksum
from weight_sync.messages import BucketSpec
from weight_sync.transports import Engine, fan_out


class HttpTransport:
    """For engines whose ``send_bucket`` takes the bytes themselves (``weight_sync.client.ServiceControl``)."""

    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        return new_buffer(index, size, device)

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[Engine]) -> list[str]:
        bucket.wait()
        data = bucket.data.cpu()
        if bucket.data.is_cuda:
            # The server checks bytes as they come, by xxh3. That the copy to the host went well is seen in the end: the
            # server's checksum of all tensors is compared with the one that was taken on the device.
            spec.checksum = host_checksum(data)
        return fan_out(engines, lambda engine: engine.send_bucket(spec, data))

    def release(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""
