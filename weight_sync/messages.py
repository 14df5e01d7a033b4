"""What travels between a publisher and the loader inside the engine, besides the bytes themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from weight_sync.buckets import Placement


class WeightSyncError(RuntimeError):
    """An engine did not take an update; its weights must not be used until a complete resend."""


@dataclass
class BucketSpec:
    """Header of one bucket.

    Attributes:
        run_id, version: identify the update; all buckets of an update carry the same.
        index: position of the bucket in the update, from 0.
        last: no further bucket follows.
        placements: tensors in the bucket.
        file: path of the bytes if they lie in shared memory instead of the tensor that travels along.
    """

    run_id: str
    version: str
    index: int
    last: bool
    placements: list[Placement] = field(default_factory=list)
    file: str | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> BucketSpec:
        raw = json.loads(text)
        raw["placements"] = [
            Placement(p["name"], tuple(p["shape"]), p["dtype"], p["offset"]) for p in raw["placements"]
        ]
        return cls(**raw)


@dataclass
class LoaderStatus:
    """What the loader of one rank did with a bucket."""

    ok: bool
    message: str = ""
    tensors: int = 0
    nbytes: int = 0


@dataclass
class SyncReport:
    """Outcome of a refresh: seconds by stage, bytes and buckets."""

    version: str
    tensors: int = 0
    nbytes: int = 0
    buckets: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def as_metrics(self) -> dict[str, Any]:
        total = sum(self.seconds.values())
        return {
            "sync/seconds": total,
            "sync/bytes": self.nbytes,
            "sync/gbps": self.nbytes / 1e9 / total if total else 0.0,
        }
