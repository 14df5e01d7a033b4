"""Trainer side: send a full set of weights to one or more engines and say what happened."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from weight_sync.buckets import Bucket, fill_buckets
from weight_sync.checksum import MODULUS, host_checksum, name_factor, placement_sums, sums_checksum
from weight_sync.deadline import begin
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import (
    BucketSpec,
    EngineFailed,
    Manifest,
    NoAnswer,
    ResendError,
    SyncReport,
    Torn,
    WeightSyncError,
)
from weight_sync.transports import Engine, Transport, fan_out

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 1 << 30

ATTEMPTS = 3
"""How often a bucket is sent that arrives damaged."""

STAGES = ("pause", "gather", "checksum", "transfer", "apply", "stream", "finish", "resume")

Named = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


@dataclass
class EngineStatus:
    """What the publisher knows of an engine.

    Attributes:
        version: the last complete one.
        error: why the last update failed; None after a success.
        closed: the engine may hold a mixture and takes no requests until a complete resend.
        lost: the engine did not answer; it gets no further updates until ``rejoin``.
    """

    version: str | None = None
    error: str | None = None
    closed: bool = False
    lost: bool = False


@dataclass
class _Update:
    """An update on its way.

    Attributes:
        expected: checksum that the weights must have, because other engines hold the same version; None for a new one.
        stage: where it is; see ``EngineFailed``.
        touched: the first bucket is on its way.
        committed: addresses of engines that serve the new version.
    """

    manifest: Manifest
    engines: list[Engine]
    report: SyncReport
    expected: str | None = None
    checksum: int = 0
    answers: list[str] = field(default_factory=list)
    stage: str = "pause"
    touched: bool = False
    committed: set[str] = field(default_factory=set)


class WeightPublisher:
    """Sends weights to engines.

    Args:
        layout: what the engines need.
        transport: how the bytes travel.
        engines: where they go.
        bucket_bytes: size of a bucket; the sender holds two at most, one that fills and one on its way, and the
            tensor that is being copied; the experts of a layer that come one by one wait until all are there.
        rounded_router: see ``CheckpointLayout.normalise``.
    """

    def __init__(
        self,
        layout: CheckpointLayout,
        transport: Transport,
        engines: Sequence[Engine],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        rounded_router: bool = False,
    ) -> None:
        self.layout, self.transport, self.engines = layout, transport, list(engines)
        self.rounded_router = rounded_router
        self.bucket_bytes = bucket_bytes
        self.buffer_bytes = layout.largest_bucket(bucket_bytes)
        self._status: dict[str, EngineStatus] = {}
        self._last: tuple[str, str] | None = None
        self._closed = False

    def publish(self, named_tensors: Named, version: str | int) -> SyncReport:
        """Send all tensors of ``named_tensors`` as ``version``.

        Engines take no requests from the first byte to the commit. On success every engine holds exactly these weights
        (read back and compared), its cache of the old ones is gone and new samples carry ``version``. A mapping or a
        list is checked as a whole before the engines hear of it; tensors of a generator are checked as they come.

        Raises:
            LayoutError: a tensor is missing, unexpected, duplicate, mis-shaped or mis-typed.
            EngineFailed: an engine refused or did not answer; it says which, and at which stage.
            WeightSyncError: the bytes cannot travel, or no engine is left.

            An engine that has taken bytes by then stays closed until another ``publish``; any other goes on with its
            old weights, or with the new ones if it has committed them. One that does not answer any more is lost: the
            next ``publish`` goes to the others. ``status`` says which.
        """
        report = self._publish(named_tensors, str(version), self.engines)
        self._last = report.version, report.checksum
        return report

    def rejoin(
        self, engine: Engine, named_tensors: Named | None = None, version: str | int | None = None
    ) -> SyncReport | None:
        """Take an engine in, new or after a restart; without tensors it waits for the next ``publish``.

        With tensors it gets them now, and the other engines are left alone. Without ``version`` they must be the
        weights of the last ``publish``: the checksum is compared, so that no two engines mean different weights by one
        version.

        Raises:
            LayoutError, WeightSyncError: as ``publish``; the engine is not part of later updates then.
        """
        report = None
        if named_tensors is not None:
            current, checksum = self._last or (None, None)
            wanted = current if version is None else str(version)
            if wanted is None:
                raise WeightSyncError("nothing has been published yet, so there is no current version; give one")
            report = self._publish(named_tensors, wanted, [engine], checksum if wanted == current else None)
        # An engine that was started again may be given as another object.
        self.engines = [other for other in self.engines if other.url != engine.url] + [engine]
        if report is None:
            self._status[engine.url] = EngineStatus()
        return report

    def status(self) -> dict[str, EngineStatus]:
        """Outcome of the last update by engine address; also of engines that are lost."""
        return {url: self._status.get(url, EngineStatus()) for url in [*(e.url for e in self.engines), *self._status]}

    def close(self) -> None:
        """End the transport and the connections; a ``publish`` after it is refused before an engine hears of it."""
        self._closed = True
        self.transport.close()
        for engine in self.engines:
            engine.close()

    def _publish(self, named: Named, version: str, engines: list[Engine], expected: str | None = None) -> SyncReport:
        if self._closed:
            raise WeightSyncError(f"version {version} cannot be sent: this publisher was closed; make a new one")
        if not engines and any(status.lost for status in self._status.values()):
            raise WeightSyncError("no engine is left; start one and take it in with rejoin()")
        report = SyncReport(version, seconds=dict.fromkeys(STAGES, 0.0))
        started = time.perf_counter()
        if isinstance(named, Mapping):
            named = list(named.items())
        if isinstance(named, Sequence):
            known = ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in named)
            self.layout.check(known, rounded_router=self.rounded_router)
        manifest = Manifest(uuid.uuid4().hex, version, self.layout.tensors(), self.layout.nbytes)
        update = _Update(manifest, engines, report, expected)
        before = [getattr(engine, "applied_seconds", 0.0) for engine in engines]
        try:
            with report.timed("pause"):
                fan_out(engines, lambda engine: engine.pause())
                update.stage = "manifest"
                fan_out(engines, lambda engine: engine.begin(manifest))
            with report.timed("stream"):
                self._stream(named, update)
            with report.timed("finish"):
                self._finish(update)
            with report.timed("resume"):
                update.stage = "resume"
                fan_out(engines, lambda engine: engine.resume())
        except BaseException as error:
            lost = self._failed(update, error)
            if isinstance(error, WeightSyncError) and error.errors:
                served = sorted(update.committed - {*error.errors})
                raise EngineFailed(version, update.stage, error.errors, lost, served) from error
            raise
        finally:
            self.transport.release()
        for engine in engines:
            self._compare(engine, report)
            self._status[engine.url] = EngineStatus(version)
        after = [getattr(engine, "applied_seconds", 0.0) for engine in engines]
        report.seconds["apply"] = max((b - a for a, b in zip(before, after, strict=True)), default=0.0)
        report.seconds["total"] = time.perf_counter() - started
        return report

    def _compare(self, engine: Engine, report: SyncReport) -> None:
        """Note an engine that does not come from the version that it was left with."""
        last = self._status.get(engine.url, EngineStatus())
        if engine in self.engines and last.version is not None and not last.error and engine.held != last.version:
            report.strayed[engine.url] = engine.held
            held = f"engine {engine.url} held version {engine.held or 'of its start'}"
            logger.warning("%s where %s had been published: restarted, or refreshed by others", held, last.version)

    def _stream(self, named: Iterable[tuple[str, Tensor]], update: _Update) -> None:
        """Fill buckets while the one before is on its way."""
        tensors = self.layout.normalise(named, rounded_router=self.rounded_router)
        buckets = fill_buckets(tensors, self.bucket_bytes, self.transport.buffer, self.buffer_bytes)
        on_its_way: Future[None] | None = None
        try:
            while True:
                with update.report.timed("gather"):
                    bucket = next(buckets, None)
                spec = None if bucket is None else self._describe(bucket, update)
                if on_its_way is not None:
                    on_its_way.result()
                if bucket is None or spec is None:
                    return
                on_its_way = begin(partial(self._send, bucket, spec, update))
        finally:
            if on_its_way is not None:
                with suppress(WeightSyncError):
                    on_its_way.result()

    def _describe(self, bucket: Bucket, update: _Update) -> BucketSpec:
        """The header of a bucket, with its checksum; also counts it in the checksum of the whole."""
        manifest = update.manifest
        with update.report.timed("checksum"):
            bucket.wait()
            sums = placement_sums(bucket.data, bucket.placements)
            on_host = bucket.data.device.type == "cpu"
            checksum = host_checksum(bucket.data) if on_host else sums_checksum(bucket.placements, sums)
            for placement, value in zip(bucket.placements, sums, strict=True):
                update.checksum = (update.checksum + name_factor(placement.name) * value) % MODULUS
        spec = BucketSpec(manifest.run_id, manifest.version, bucket.index, bucket.last, bucket.placements, checksum)
        spec.nbytes = bucket.data.numel()
        return spec

    def _send(self, bucket: Bucket, spec: BucketSpec, update: _Update) -> None:
        report, update.touched = update.report, True
        update.stage = f"bucket {bucket.index}"
        with report.timed("transfer"):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    update.answers = self.transport.send(bucket, spec, update.engines)
                    break
                except ResendError:
                    report.resent += 1
                    if attempt == ATTEMPTS:
                        raise
        report.tensors += sum(placement.start == 0 for placement in bucket.placements)
        report.nbytes += bucket.data.numel()
        report.buckets += 1

    def _finish(self, update: _Update) -> None:
        """Commit on all engines, once all of them hold what was sent."""
        update.stage = "checksum"
        sent = update.report.checksum = f"{update.checksum:016x}"
        if update.expected not in (None, sent):
            raise WeightSyncError(
                f"the weights have checksum {sent}, those that other engines hold as version {update.report.version} "
                f"{update.expected}; give the same weights or another version"
            )
        wrong = WeightSyncError("engines hold other weights than were sent")
        wrong.errors = {
            engine.url: WeightSyncError(
                f"engine {engine.url} holds weights with checksum {held or 'unknown'}, the trainer sent {sent}"
            )
            for engine, held in zip(update.engines, update.answers, strict=True)
            if held != sent
        }
        if wrong.errors:
            raise wrong
        update.stage = "commit"

        def commit(engine: Engine) -> None:
            engine.commit(update.manifest.run_id, update.manifest.version, sent)
            update.committed.add(engine.url)

        fan_out(update.engines, commit)

    def _failed(self, update: _Update, error: BaseException) -> list[str]:
        """Leave every engine in a state that ``status`` tells; addresses of those that do not answer."""
        lost = []
        if update.committed and update.engines is self.engines:
            # What the survivors serve now is what an engine that rejoins must have.
            self._last = update.manifest.version, update.report.checksum
        errors = error.errors if isinstance(error, WeightSyncError) else {}
        for engine in update.engines:
            status = self._status.setdefault(engine.url, EngineStatus())
            if engine.url in update.committed:
                status.version, status.error, status.closed = update.manifest.version, None, False
                if engine.url not in errors:
                    with suppress(WeightSyncError):
                        engine.resume()
                    continue
            status.error = str(errors.get(engine.url, error))
            # A staged update does not touch the engine before its commit.
            status.closed |= update.touched and (update.stage == "commit" or not engine.staged)
            try:
                engine.abort(update.manifest.run_id, update.manifest.version)
                if not status.closed:
                    engine.resume()
            except Torn as refusal:
                status.closed = True
                logger.warning("%s", refusal)
            except NoAnswer:
                # Only one that has failed before: whoever is slow to answer now will be asked again.
                if isinstance(errors.get(engine.url), NoAnswer):
                    status.lost = True
                    lost.append(engine.url)
            except WeightSyncError as refusal:
                logger.warning("engine %s after a failed update: %s", engine.url, refusal)
        self.engines = [engine for engine in self.engines if engine.url not in lost]
        return lost
