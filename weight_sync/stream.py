"""Updates that do not wait in a staging area: the gate closes first, and buckets go straight into the engine.

For a sender on the engine's own GPU, whose buffers are the staging area (CUDA IPC), or where there is no room for one.
A sender that dies after its first bucket leaves a broken engine, which says so and takes the next complete update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from weight_sync.control import header_of
from weight_sync.frames import bucket_spec, check_manifest
from weight_sync.gate import Rejected
from weight_sync.messages import CHECKSUM, BucketSpec, Manifest, Slots, WeightSyncError
from weight_sync.service import WeightService
from weight_sync.session import Key, Refused, Session
from weight_sync.staging import StagingError


class Streams:
    """Streamed updates of a service's engine.

    Attributes:
        lock: one message at a time reaches the engine.
        held: checksum that the engine has arrived at, after the last bucket.
    """

    def __init__(self, service: WeightService) -> None:
        self.service = service
        self.lock = asyncio.Lock()
        self.held = ""

    async def open(self, manifest: Manifest, drain_seconds: float) -> dict[str, Any]:
        """Close the gate, let the engine run empty and announce the update; on failure the old weights go on."""
        service, machine = self.service, self.service.machine
        service.tidy()
        check_manifest(manifest, service.layout)
        key = (manifest.run_id, manifest.version)
        async with self.lock:
            await service.rescue.settle()
            session = machine.open(key, manifest.digest, service.clock(), "stream", manifest.base_version)
            if session is None:
                return {"committed": True, "version": machine.version, "missing": []}
            service.drop_staging()
            if not machine.fenced:
                machine.fence(key, service.clock())
                service.keep()
                try:
                    with service.busy(session):
                        service.control.drain_seconds = drain_seconds
                        await asyncio.to_thread(service.control.pause)
                        await asyncio.to_thread(service.control.begin, manifest)
                except WeightSyncError as error:
                    await self._fail(key, error)
            return {"committed": False, "version": machine.version, "missing": session.missing()}

    async def relay(self, key: Key, header: dict[str, Any], payload: Sequence[str]) -> dict[str, Any]:
        """Hand a message to the loader of every rank.

        Args:
            header: of the message; buckets are counted.
            payload: for every tensor-parallel rank, the message as ``weight_sync.control.serialise`` makes it.

        Raises:
            ResendError: the loader has used nothing of it, and takes it when it comes again.
        """
        service, machine = self.service, self.service.machine
        async with self.lock:
            service.tidy()
            session = machine.opened(key, "stream")
            with service.busy(session):
                return {"answer": await self._deliver(session, header, payload)}

    async def _deliver(self, session: Session, header: dict[str, Any], payload: Sequence[str]) -> str:
        service, machine, key = self.service, self.service.machine, session.key
        spec = self._checked(key, header, payload)
        if spec is None:
            return await asyncio.to_thread(service.control.deliver, payload)
        machine.expects(key, spec.index, spec.checksum, spec.last)
        if not session.touched:
            machine.touch(key, service.clock())
        answer = await asyncio.to_thread(service.control.deliver, payload)
        if spec.index not in session.received:
            machine.apply(key, spec.index, spec.checksum, spec.last, service.clock())
        if spec.last:
            self.held = answer.partition(CHECKSUM)[2]
        return answer

    def _checked(self, key: Key, header: dict[str, Any], payload: Sequence[str]) -> BucketSpec | None:
        """The header of a bucket; None for device buffers.

        Raises:
            StagingError: it is neither, or of another update, or not what the ranks are to get.
        """
        if header.get("kind") not in (BucketSpec.kind, Slots.kind):
            raise StagingError(f"message of kind {header.get('kind')!r}: a streamed update takes bucket and slots")
        if (header.get("run_id"), header.get("version")) != key:
            raise StagingError("the message's header and its address disagree")
        if len(payload) != self.service.control.tp_size:
            raise StagingError(f"{len(payload)} payloads for {self.service.control.tp_size} tensor-parallel ranks")
        for rank, each in enumerate(payload):
            if header_of(each) != header:
                raise StagingError(f"the payload for rank {rank} is not that of its header")
        return bucket_spec(header, placed=True) if header["kind"] == BucketSpec.kind else None

    async def commit(self, key: Key, checksum: str) -> dict[str, Any]:
        """Serve what was streamed, if it is all there and the engine holds it as it was sent."""
        service, machine = self.service, self.service.machine
        async with self.lock:
            if service.serves(key, checksum):
                return service.state()
            session = machine.opened(key, "stream")
            if not session.complete:
                raise Refused(f"buckets {session.missing()[:8]} of version {key[1]} are missing; send them")
            try:
                if checksum and checksum != self.held:
                    raise WeightSyncError(f"the engine holds weights with checksum {self.held}, the sender {checksum}")
                with service.busy(session):
                    await asyncio.to_thread(service.control.commit, *key, self.held)
                    await asyncio.to_thread(service.control.resume)
            except WeightSyncError as error:
                await self._fail(key, error)
            service.served(machine.finish(key), self.held)
            return service.state()

    async def _fail(self, key: Key, error: Exception) -> None:
        self.service.machine.fail(key, f"version {key[1]} was not applied completely: {error}")
        await self.service.rescue.run(key)
        raise Rejected(504 if self.service.machine.admits else 502, str(error)) from error
