"""Receives weights beside an engine and hands them over when all have arrived.

    python -m weight_sync.receiver --engine http://127.0.0.1:30000 --meet TRAINER:29600 --rank 1 --size 3 --backend nccl

One process per engine, on its host and (with NCCL) on a GPU that the engine's ranks can map. It holds one full copy of
the weights while an update arrives. If the trainer disappears, what has arrived is dropped, the engine goes on with its
old weights, and the receiver waits for the next trainer at the same address.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dllm.config import ConfigError
from weight_sync.buckets import Bucket, view
from weight_sync.checksum import TensorSums, origin, same_checksum
from weight_sync.control import EngineControl
from weight_sync.messages import APPLY_ATTEMPTS, RESEND, BucketSpec, Commit, Manifest, NoAnswer, WeightSyncError
from weight_sync.transports import Engine
from weight_sync.transports.collective import TRAINER, Channel
from weight_sync.transports.shm import SharedMemoryTransport

logger = logging.getLogger(__name__)


@dataclass
class Staged:
    """An update that has arrived in part or whole."""

    manifest: Manifest
    buckets: list[tuple[BucketSpec, Tensor]] = field(default_factory=list)
    sums: TensorSums = field(default_factory=TensorSums)

    def take(self, spec: BucketSpec, data: Tensor) -> str:
        """Keep a bucket; after the last one the checksum of everything.

        Raises:
            WeightSyncError: it is damaged or not the next one.
        """
        if (spec.run_id, spec.version) != (self.manifest.run_id, self.manifest.version):
            raise WeightSyncError(f"bucket {spec.index} of version {spec.version} has no open update; start over")
        if spec.index < len(self.buckets) and self.buckets[spec.index][0].checksum == spec.checksum:
            # Sent again for another receiver, which had it damaged.
            return self._checksum(spec)
        if spec.index != len(self.buckets):
            raise WeightSyncError(f"{RESEND}bucket {spec.index} arrived where {len(self.buckets)} was due")
        if not same_checksum(data, spec.placements, spec.checksum):
            raise WeightSyncError(f"{RESEND}bucket {spec.index} was damaged on the way")
        self.buckets.append((spec, data))
        for placement in spec.placements:
            self.sums.add(placement.name, view(data, placement), origin(placement))
        return self._checksum(spec)

    def _checksum(self, spec: BucketSpec) -> str:
        return f"{self.sums.value():016x}" if spec.last else ""

    @property
    def complete(self) -> bool:
        return bool(self.buckets) and self.buckets[-1][0].last


def hand_over(staged: Staged, engine: Engine, checksum: str) -> None:
    """Close the engine, give it everything, and open it again with the new version.

    What is staged is applied again if the engine refuses some of it, because nothing else repairs a mixture.

    Raises:
        WeightSyncError: the engine refused. It stays closed if it has taken bytes by then.
    """
    on_device = staged.buckets[0][1].is_cuda
    with nullcontext() if on_device else closing(SharedMemoryTransport()) as shared:
        _apply(staged, engine, checksum, shared)


def _apply(staged: Staged, engine: Engine, checksum: str, shared: SharedMemoryTransport | None) -> None:
    manifest, touched = staged.manifest, False
    for attempt in range(1, APPLY_ATTEMPTS + 1):
        try:
            engine.pause()
            engine.begin(manifest)
            if shared is None:
                engine.send_slots(manifest.run_id, manifest.version, [data for _, data in staged.buckets])
            touched = True
            held = _send(staged, engine, shared)
            if checksum and held != checksum:
                raise WeightSyncError(f"the engine holds weights with checksum {held or 'unknown'}, not {checksum}")
            engine.commit(manifest.run_id, manifest.version, checksum)
            engine.resume()
            return
        except (WeightSyncError, OSError) as error:
            logger.warning("applying version %s failed (attempt %d): %s", manifest.version, attempt, error)
            with suppress(WeightSyncError):
                engine.abort(manifest.run_id, manifest.version)
                engine.resume()  # refuses by itself where a byte was used
            if not touched or attempt == APPLY_ATTEMPTS or isinstance(error, NoAnswer):
                raise


def _send(staged: Staged, engine: Engine, shared: SharedMemoryTransport | None) -> str:
    """Every bucket into the closed engine, which sees those of a device already; the checksum of what it holds then."""
    held = ""
    for spec, data in staged.buckets:
        if shared is None:
            spec.slot = spec.index
            held = engine.send_bucket(spec)
        else:
            [held] = shared.send(Bucket(spec.index, data, spec.placements, spec.last), spec, [engine])
    return held


class Receiver:
    """Answers one trainer."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self.channel, self.engine = channel, engine
        self.staged: Staged | None = None
        self.committed: tuple[str, str] | None = None

    def serve(self, version: str | None = None) -> None:
        """Answer until the engine holds ``version``; without one for ever.

        Raises:
            WeightSyncError: the connection is lost.
        """
        while version is None or self.committed is None or self.committed[1] != version:
            try:
                text = self.channel.hear(TRAINER, 1.0)
            except TimeoutError:
                continue
            try:
                answer = {"ok": True, "message": self.handle(text)}
            except ConnectionLost:
                raise
            except Exception as error:
                logger.warning("refused: %s", error)
                answer = {"ok": False, "message": str(error)}
            self.channel.tell(TRAINER, json.dumps({**answer, "to": self.channel.heard(TRAINER)}))

    def handle(self, text: str) -> str:
        *way, header = text.split("\n", 1)
        raw = json.loads(header)
        if raw["kind"] == "begin":
            self.staged = Staged(Manifest.from_dict(raw))
            return ""
        if raw["kind"] == "bucket":
            spec = BucketSpec.from_dict(raw)
            # The bytes are on their way whether we want them or not.
            data = self._bytes(spec.nbytes, json.loads(way[0])["broadcast"])
            if self.staged is None:
                raise WeightSyncError(f"bucket {spec.index} of version {spec.version} has no open update; start over")
            return self.staged.take(spec, data)
        key = (raw["run_id"], raw["version"])
        if raw["kind"] == "commit":
            self._commit(Commit.from_dict(raw), key)
            return self.engine.held
        if raw["kind"] == "abort" and self.staged is not None and self._open() == key:
            self.staged = None
        return ""

    def _open(self) -> tuple[str, str] | None:
        return (self.staged.manifest.run_id, self.staged.manifest.version) if self.staged is not None else None

    def _commit(self, commit: Commit, key: tuple[str, str]) -> None:
        if self.staged is None and self.committed == key:
            return
        if self.staged is None or self._open() != key or not self.staged.complete:
            raise WeightSyncError(f"version {commit.version} is not complete; start over")
        hand_over(self.staged, self.engine, commit.checksum)
        self.staged, self.committed = None, key

    def _bytes(self, size: int, broadcast: bool) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=self.channel.device)
        try:
            if size and broadcast:
                self.channel.broadcast(data)
            elif size:
                self.channel.receive(data, TRAINER)
        except WeightSyncError as error:
            raise ConnectionLost(str(error)) from error
        return data


class ConnectionLost(WeightSyncError):
    """The trainer is gone in the middle of a bucket."""


def receive(
    meet: tuple[str, int], rank: int, size: int, engine: Engine, backend: str = "gloo", timeout: float = 60.0
) -> None:
    """Serve one trainer after the other, for ever."""
    while True:
        try:
            Receiver(Channel(*meet, rank, size, backend, timeout), engine).serve()
        except WeightSyncError as error:
            logger.warning("%s; waiting for a trainer at %s:%d", error, *meet)
            time.sleep(0.2)


def _check(given: Any, host: str, port: str) -> None:
    """Refuse arguments that cannot work, before anything waits for a trainer."""
    meets = host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
    if not meets or not 0 < given.rank < given.size:
        wrong = f"--meet {given.meet!r} --rank {given.rank} --size {given.size}"
        raise ConfigError(f"{wrong}: need HOST:PORT and 0 < rank < size")
    if given.tp_size < 1:
        raise ConfigError(f"--tp-size {given.tp_size}: give the engine's number of tensor-parallel ranks, 1 at least")
    if given.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--backend nccl needs a GPU, and none is visible here; use --backend gloo")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="address of the engine, http://127.0.0.1:30000")
    parser.add_argument("--tp-size", type=int, default=1, help="tensor-parallel ranks of the engine")
    parser.add_argument("--admin-api-key")
    parser.add_argument("--meet", required=True, help="HOST:PORT where the trainer listens")
    parser.add_argument("--rank", type=int, required=True, help="1, 2, …; the trainer is 0")
    parser.add_argument("--size", type=int, required=True, help="number of receivers plus 1")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="seconds until an exchange is given up and the next trainer is waited for (default 60)",
    )
    given: Any = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    host, _, port = given.meet.rpartition(":")
    try:
        _check(given, host, port)
        engine = EngineControl(given.engine, given.tp_size, given.admin_api_key, given.timeout)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    receive((host, int(port)), given.rank, given.size, engine, given.backend, given.timeout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
