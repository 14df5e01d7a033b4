"""How the bytes of a bucket reach an engine: one file per way, one protocol."""

from __future__ import annotations

from typing import Protocol

from weight_sync.buckets import Bucket
from weight_sync.control import EngineControl
from weight_sync.messages import BucketSpec


class Transport(Protocol):
    """Delivers buckets to engines, in order; returns when the engine has copied them."""

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[EngineControl]) -> None: ...

    def close(self) -> None: ...
