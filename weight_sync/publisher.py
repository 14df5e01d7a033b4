"""Trainer side: send a full set of weights to one or more engines and say what happened."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

from torch import Tensor

from weight_sync.buckets import fill_buckets
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec, SyncReport
from weight_sync.transports import Transport

DEFAULT_BUCKET_BYTES = 512 << 20


class WeightPublisher:
    """Sends weights to engines.

    Args:
        layout: what the engines need.
        transport: how the bytes travel.
        engines: where they go.
        bucket_bytes: size of a bucket; the sender holds one at a time.
    """

    def __init__(
        self,
        layout: CheckpointLayout,
        transport: Transport,
        engines: Sequence[EngineControl],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.layout, self.transport, self.engines = layout, transport, list(engines)
        self.bucket_bytes = bucket_bytes

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: str) -> SyncReport:
        """Send all tensors of ``named_tensors`` as ``version``.

        The engines must be idle. On success every engine holds exactly these weights, its KV cache is empty and
        new samples carry ``version``.

        Raises:
            LayoutError: a tensor is missing, unexpected or mis-shaped.
            WeightSyncError: an engine refused or did not answer; it holds a mixture and must get a full resend.
        """
        run_id = uuid.uuid4().hex
        report = SyncReport(str(version), seconds={"gather": 0.0, "send": 0.0})
        clock = time.perf_counter()
        for bucket in fill_buckets(self.layout.normalise(named_tensors), self.bucket_bytes):
            now = time.perf_counter()
            report.seconds["gather"] += now - clock
            spec = BucketSpec(run_id, str(version), bucket.index, bucket.last, bucket.placements)
            self.transport.send(bucket, spec, self.engines)
            report.tensors += len(bucket.placements)
            report.nbytes += bucket.data.numel()
            report.buckets += 1
            clock = time.perf_counter()
            report.seconds["send"] += clock - now
        report.seconds["total"] = sum(report.seconds.values())
        return report

    def close(self) -> None:
        self.transport.close()
        for engine in self.engines:
            engine.close()
