"""Weight updates of a running server over HTTP: sessions, buckets, prepare, commit, abort, state.

    GET    /weights/v1/state
    POST   /weights/v1/sessions                                      open or go on; the manifest
    PUT    /weights/v1/sessions/{run_id}/{version}/buckets/{index}   8 bytes length of the header, header, bytes
    POST   /weights/v1/sessions/{run_id}/{version}/directory         or: take them from a checkpoint on this host
    POST   /weights/v1/sessions/{run_id}/{version}/messages          or, streamed: relay one to the loader
    POST   /weights/v1/sessions/{run_id}/{version}/prepare           verify what has arrived
    POST   /weights/v1/sessions/{run_id}/{version}/commit            drain, apply, verify, serve
    POST   /weights/v1/sessions/{run_id}/{version}/abort

Every step may be repeated. Until ``commit`` the engine serves its old weights, and a client that dies leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from weight_sync.buckets import fill_buckets
from weight_sync.checksum import host_checksum
from weight_sync.control import EngineControl
from weight_sync.frames import bucket_spec, check_manifest, take_header
from weight_sync.gate import TOKEN_HEADER, Rejected, Requests
from weight_sync.layout import CheckpointLayout, LayoutError
from weight_sync.messages import APPLY_ATTEMPTS, BucketSpec, Manifest, WeightSyncError
from weight_sync.metrics import RefreshMetrics
from weight_sync.rescue import Rescue
from weight_sync.session import Key, Machine, Refused, Session
from weight_sync.staging import ROOTS, Staging, StagingError
from weight_sync.transports.directory import tensors, verify

logger = logging.getLogger(__name__)

WRITE_BYTES = 4 << 20
"""Bytes that are collected before a thread writes them."""

BUSY_S = 86400.0

DIRECTORY_BUCKET_BYTES = 512 << 20


class WeightService:
    """The open update of one engine, and everything that is done to the engine for it.

    Args:
        control: the engine's own endpoints, on this server.
        layout: what the engine takes.
        version: label of the weights that the engine was started with.
        roots: where buckets may wait.
        clock: seconds, never going back.
        metrics: count what happens; None does not.
    """

    def __init__(
        self,
        control: EngineControl,
        layout: CheckpointLayout,
        version: str,
        roots: Sequence[Path] = ROOTS,
        clock: Callable[[], float] = time.monotonic,
        metrics: RefreshMetrics | None = None,
    ) -> None:
        self.control, self.layout, self.roots, self.clock = control, layout, roots, clock
        self.machine = Machine(version)
        self.staging: Staging | None = None
        self.checksum: str | None = None
        self._sent = ""
        self.error: str | None = None
        self.requests, self.metrics = Requests(), metrics or RefreshMetrics()
        self.token = secrets.token_hex(16)
        control.client.headers[TOKEN_HEADER] = self.token
        self._commit: tuple[Key, asyncio.Task[None]] | None = None
        self._committing = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self.rescue = Rescue(control, self.machine, self.requests)

    def state(self) -> dict[str, Any]:
        """What ``GET /weights/v1/state`` answers."""
        machine = self.machine
        session = machine.session
        opened = session and {
            "run_id": session.run_id,
            "version": session.version,
            "received": len(session.received),
            "missing": session.missing(),
            "prepared": session.prepared,
            "expires_in": round(max(0.0, session.expires - self.clock()), 1),
        }
        return {
            "state": machine.state.value,
            "version": machine.version,
            "admits": machine.admits,
            "session": opened,
            "committed": machine.committed,
            "checksum": self.checksum,
            "error": machine.broken or self.error,
            "dtype": str(self.layout.dtype).removeprefix("torch."),
            "tp_size": self.control.tp_size,
        }

    def open(self, manifest: Manifest) -> dict[str, Any]:
        """Begin an update or go on with it; which buckets are missing."""
        self.tidy()
        check_manifest(manifest, self.layout)
        key, before = (manifest.run_id, manifest.version), self.machine.session
        # Room is looked for first: an update that finds none must not displace another.
        resumed = before is not None and before.key == key
        staging = None if resumed or self.serves(key) else Staging(manifest, self.roots)
        try:
            session = self.machine.open(key, manifest.digest, self.clock(), base_version=manifest.base_version)
        except Refused:
            if staging is not None:
                staging.close()
            raise
        if session is None:
            return {"committed": True, "version": self.machine.version, "missing": []}
        if staging is not None:
            self.drop_staging()
            self.staging, self.error = staging, None
            self.keep()
        return {"committed": False, "version": self.machine.version, "missing": session.missing()}

    async def receive(self, key: Key, index: int, body: AsyncIterator[bytes]) -> dict[str, Any]:
        """Take one bucket: the header is checked before the bytes are read, the bytes as they come."""
        session, staging = self._session(key)
        buffer = bytearray()
        writer = None
        try:
            async for chunk in body:
                buffer += chunk
                if writer is None:
                    if (header := take_header(buffer)) is None:
                        continue
                    spec = bucket_spec(header)
                    if (spec.run_id, spec.version, spec.index) != (*key, index):
                        raise StagingError("the bucket's header and its address disagree")
                    self.machine.expects(key, index, spec.checksum, spec.last)
                    staging.check(spec)
                    writer = staging.writer(spec)
                if len(buffer) >= WRITE_BYTES:
                    await asyncio.to_thread(writer.write, bytes(buffer))
                    buffer.clear()
                    session.expires = self.clock() + self.machine.lease
            if writer is None:
                raise StagingError("the bucket ends within its header")
            await asyncio.to_thread(writer.write, bytes(buffer))
            if self.machine.opened(key) is not session:
                raise Refused(f"version {key[1]} was begun anew meanwhile")
            if index not in session.received:
                writer.finish()
            new = self.machine.receive(key, index, writer.spec.checksum, writer.spec.last, self.clock())
        finally:
            if writer is not None:
                writer.discard()
        return {"new": new, "missing": session.missing()}

    async def read(self, key: Key, directory: Path) -> dict[str, Any]:
        """Take all buckets from a checkpoint on a file system of this host, after a check of its files."""
        session, staging = self._session(key)
        try:
            with self.busy(session):
                await asyncio.to_thread(verify, directory)
                named = self.layout.normalise(tensors(directory), rounded_router=True)
                capacity = self.layout.largest_bucket(DIRECTORY_BUCKET_BYTES)
                filled = fill_buckets(named, DIRECTORY_BUCKET_BYTES, capacity=capacity)
                while not session.prepared and (bucket := await asyncio.to_thread(next, filled, None)) is not None:
                    spec = BucketSpec(*key, bucket.index, bucket.last, bucket.placements, host_checksum(bucket.data))
                    spec.nbytes = bucket.data.numel()
                    self.machine.expects(key, spec.index, spec.checksum, spec.last)
                    await asyncio.to_thread(staging.writer(spec).take, bucket.data.numpy().data)
                    self.machine.receive(key, spec.index, spec.checksum, spec.last, self.clock() + BUSY_S)
        except (WeightSyncError, LayoutError, OSError) as error:
            raise Rejected(422, f"checkpoint {directory}: {error}") from error
        return {"missing": session.missing()}

    async def prepare(self, key: Key) -> dict[str, Any]:
        """Verify everything that has arrived; a damaged bucket is forgotten, so that it is sent again."""
        session, staging = self._session(key)
        if not session.prepared:
            if not session.complete:
                raise Refused(f"buckets {session.missing()[:8]} of version {key[1]} are missing; send them")
            try:
                with self.busy(session):
                    checksum = await asyncio.to_thread(staging.verify)
            except StagingError as error:
                if error.damaged is not None and self.machine.session is session:
                    self.machine.forget(key, error.damaged)
                raise
            self.machine.prepare(key, self.clock())
            self._sent = checksum
        return {"checksum": self._sent}

    async def commit(self, key: Key, drain_seconds: float, checksum: str) -> dict[str, Any]:
        """Apply a prepared update; goes on if the client leaves, and may be asked for again."""
        async with self._committing:  # a second one waits until the first has begun
            if self._commit is None or self._commit[0] != key or self._commit[1].done():
                if self.serves(key, checksum):
                    return self.state()
                await self.prepare(key)
                if checksum and checksum != self._sent:
                    raise Rejected(422, f"buckets with checksum {self._sent} arrived, the sender has {checksum}")
                await self.rescue.settle()
                self.machine.fence(key, self.clock())
                self._commit = key, asyncio.create_task(self._apply(key, drain_seconds))
            applying = self._commit[1]
        await asyncio.shield(applying)
        return self.state()

    async def abort(self, key: Key) -> dict[str, Any]:
        """Drop an update."""
        fenced = self.machine.fenced
        if self.machine.abort(key):
            self.drop_staging()
            if fenced:
                await self.rescue.run(key)
        return self.state()

    def serves(self, key: Key, checksum: str = "") -> bool:
        """Whether an update has been committed and is served; refuses one that the sender means other weights by."""
        if not self.machine.serves(key):
            return False
        if checksum and self.checksum is not None and checksum != self.checksum:
            raise Rejected(422, f"weights with checksum {self.checksum} are served, the sender has {checksum}")
        return True

    def served(self, session: Session, checksum: str) -> None:
        """An update has ended well."""
        self.checksum, self.error = checksum, None
        self.metrics.served(session, self.layout.nbytes, self.clock())

    async def _apply(self, key: Key, drain_seconds: float) -> None:
        """From the closed gate to the open one."""
        control, machine = self.control, self.machine
        try:
            control.drain_seconds = drain_seconds
            await asyncio.to_thread(control.pause)
            for attempt in range(1, APPLY_ATTEMPTS + 1):
                try:
                    await self._send(key)
                    break
                except WeightSyncError as error:
                    logger.warning("applying version %s failed (attempt %d): %s", key[1], attempt, error)
                    assert machine.session is not None
                    if attempt == APPLY_ATTEMPTS or not machine.session.touched:
                        raise
                    self.metrics.retried()
                    await asyncio.to_thread(control.abort, *key)
            await asyncio.to_thread(control.resume)
            self.served(machine.finish(key), self._sent)
            self.drop_staging()
        except Exception as error:
            self.error = str(error)
            machine.fail(key, f"version {key[1]} was not applied completely: {error}")
            await self.rescue.run(key)
            raise Rejected(504 if machine.admits else 502, str(error)) from error

    async def _send(self, key: Key) -> None:
        """Hand every staged bucket to the loader of every rank, and have the result compared."""
        control, machine, staging = self.control, self.machine, self.staging
        assert staging is not None
        await asyncio.to_thread(control.begin, staging.manifest)
        machine.touch(key, self.clock())
        for index in sorted(staging.specs):
            spec = staging.specs[index]
            spec.file = str(staging.file(index))
            held = await asyncio.to_thread(control.send_bucket, spec)
            machine.apply(key, index, spec.checksum, spec.last, self.clock())
        if held != self._sent:
            raise WeightSyncError(f"the engine holds weights with checksum {held or 'unknown'}, not {self._sent}")
        await asyncio.to_thread(control.commit, *key, held)

    async def observe(self) -> None:
        """Learn the engine's version after an update by other means, which may have kept the label."""
        self.checksum, self.machine.committed = None, None
        try:
            answer = await asyncio.to_thread(self.control.client.get, "/model_info")
            self.machine.observe(str(answer.json()["weight_version"]))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            logger.warning("the engine's version is unknown: %s", error)

    def tidy(self) -> None:
        """Drop an update whose writer is gone."""
        session, fenced = self.machine.session, self.machine.fenced
        if session is not None and self.machine.expire(self.clock()):
            self.metrics.failed("lease", "WriterGone")
            self.drop_staging()
            if fenced:
                self.rescue.begin(session.key)

    @contextmanager
    def busy(self, session: Session) -> Iterator[None]:
        """In this block the writer waits for the server, for however long."""
        session.expires = self.clock() + BUSY_S
        try:
            yield
        finally:
            session.expires = self.clock() + self.machine.lease

    def _session(self, key: Key) -> tuple[Session, Staging]:
        self.tidy()
        session = self.machine.opened(key, "staged")
        assert self.staging is not None
        return session, self.staging

    def drop_staging(self) -> None:
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def keep(self) -> None:
        """Look after the update until it ends, so that a dead writer's buckets do not stay in memory."""

        async def keeper() -> None:
            while self.machine.session is not None:
                await asyncio.sleep(self.machine.lease / 4)
                self.tidy()

        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(keeper())
