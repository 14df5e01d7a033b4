"""Trainer and engines on different devices or hosts: buckets by NCCL or gloo to a receiver beside every engine.

The receiver (``weight_sync.receiver``) is a process of its own, so that a trainer that dies or stalls never blocks an
engine: the engine hears of an update when all of it has arrived. Words travel through a TCP store that the trainer
hosts, bytes through a process group that is nobody's default group; backends differ in nothing else.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weight_sync.buckets import Bucket, new_buffer
from weight_sync.deadline import within
from weight_sync.messages import (
    ABORT_SECONDS,
    Abort,
    BucketSpec,
    Commit,
    Manifest,
    Message,
    NoAnswer,
    WeightSyncError,
    refusal,
)
from weight_sync.transports import Engine, fan_out

GRACE_SECONDS = 2.0
"""An exchange that does not notice its own time limit is left that much later."""

TRAINER = 0
"""Rank of the sender; receivers are 1, 2, …"""


def meeting_point(host: str, port: int, is_master: bool, timeout: float) -> dist.TCPStore:
    """Where trainer and receivers meet; the trainer hosts it, and its ``port`` says which one it got for port 0.

    Raises:
        WeightSyncError: the trainer did not come within ``timeout``, or its port is taken.
    """
    limit = timedelta(seconds=timeout)
    if not is_master:
        _wait(host, port, timeout)
    try:
        return dist.TCPStore(host, port, is_master=is_master, timeout=limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        wrong = f"the trainer cannot listen at {host}:{port}" if is_master else f"no trainer at {host}:{port}"
        raise WeightSyncError(f"{wrong}: {_reason(error)}") from error


def _wait(host: str, port: int, timeout: float) -> None:
    """Until somebody listens there; a TCPStore that nobody answers prints the frames of its C++ code."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no trainer at {host}:{port} within {timeout:.0f} s: {error}") from error
        time.sleep(0.2)


def _reason(error: Exception) -> str:
    """What torch says, without the frames of its C++ code."""
    return str(error).partition("Exception raised from")[0].strip()


class Channel:
    """One end of the connection between a trainer and its receivers.

    Args:
        host, port: where the trainer listens; port 0 lets it choose (see ``port``).
        rank, size: this process and the number of processes, trainer included.
        backend: "gloo" for host memory, "nccl" for GPUs.
        timeout: seconds until an exchange is given up.
        store: the trainer's ``meeting_point``, if it is there already.

    Raises:
        WeightSyncError: see ``meeting_point``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        backend: str = "gloo",
        timeout: float = 60.0,
        store: dist.TCPStore | None = None,
    ) -> None:
        self.rank, self.size, self.backend, self.timeout = rank, size, backend, timeout
        self.limit = timedelta(seconds=timeout)
        self.device = torch.device("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
        self._sent = dict.fromkeys(range(size), 0)
        self._read = dict.fromkeys(range(size), 0)
        self._group: Any = None
        self._stuck = ""
        self.store = store or meeting_point(host, port, rank == TRAINER, timeout)

    @property
    def port(self) -> int:
        return int(self.store.port)

    def group(self) -> Any:
        """The process group of the bytes; all ends make it at the same time, at the first bucket."""
        if self._group is None:
            store = dist.PrefixStore("bytes", self.store)
            try:
                if self.backend == "gloo":
                    self._group = dist.ProcessGroupGloo(store, self.rank, self.size, self.limit)
                else:
                    options = dist.ProcessGroupNCCL.Options()
                    options._timeout = self.limit
                    self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            except RuntimeError as error:
                raise WeightSyncError(
                    f"the {self.size} processes of a refresh did not meet: {_reason(error)}"
                ) from error
        return self._group

    def sent(self, rank: int) -> int:
        """How many messages have been left for ``rank``."""
        return self._sent[rank]

    def heard(self, rank: int) -> int:
        """How many messages of ``rank`` have been read."""
        return self._read[rank]

    def tell(self, rank: int, text: str) -> None:
        """Leave a message for ``rank``."""
        try:
            self.store.set(f"{self.rank}>{rank}/{self._sent[rank]}", text)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"the connection to rank {rank} is lost: {_reason(error)}") from error
        self._sent[rank] += 1

    def hear(self, rank: int, timeout: float | None = None) -> str:
        """The next message from ``rank``.

        Raises:
            TimeoutError: there is none within ``timeout`` seconds.
            WeightSyncError: the connection is lost.
        """
        key = f"{rank}>{self.rank}/{self._read[rank]}"
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} said nothing")
                time.sleep(0.001)
            text = self.store.get(key).decode()
            self.store.delete_key(key)
        except (RuntimeError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise WeightSyncError(f"the connection to rank {rank} is lost: {_reason(error)}") from error
        self._read[rank] += 1
        return text

    def broadcast(self, data: Tensor) -> None:
        """From the trainer to all; ``data`` is uint8 [n] on ``device``."""
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER
        self._exchange(lambda: self.group().broadcast([data], options))

    def send(self, data: Tensor, rank: int) -> None:
        self._exchange(lambda: self.group().send([data], rank, 0))

    def receive(self, data: Tensor, rank: int) -> None:
        self._exchange(lambda: self.group().recv([data], rank, 0))

    def _exchange(self, start: Callable[[], Any]) -> None:
        if self._stuck:
            raise WeightSyncError(f"{self._stuck}; make a new Channel")

        def exchange() -> None:
            # NCCL makes its communicator here: that has no time limit of its own, and fails for two ranks on one GPU.
            start().wait(self.limit)
            if self.device.type == "cuda":
                # wait() of NCCL orders streams only: the other side may be dead.
                torch.cuda.current_stream(self.device).synchronize()

        try:
            within(self.timeout + GRACE_SECONDS, exchange)
        except TimeoutError:
            self._stuck = f"an exchange of the refresh took longer than {self.timeout} s"
            self._abort()
            raise WeightSyncError(self._stuck) from None
        except RuntimeError as error:
            known = isinstance(error, WeightSyncError)
            raise (error if known else WeightSyncError(f"an exchange failed: {_reason(error)}")) from None

    def _abort(self) -> None:
        """End what hangs in the group, or its kernels would keep the device busy."""
        group, self._group = self._group, None
        if group is not None and self.backend == "nccl":
            with suppress(TimeoutError, RuntimeError):
                within(ABORT_SECONDS, group.abort)


class RemoteEngine:
    """An engine behind a receiver: the update is staged there, and taken over at the commit."""

    staged = True

    def __init__(self, channel: Channel, rank: int) -> None:
        self.channel, self.rank, self.url, self.held = channel, rank, f"receiver {rank}", ""

    def ask(self, message: Message, timeout: float | None = None) -> str:
        self.channel.tell(self.rank, message.encode())
        return self.answer(timeout)

    def answer(self, timeout: float | None = None) -> str:
        """What the receiver says to the last message.

        Raises:
            ResendError, WeightSyncError: it refused.
            NoAnswer: it said nothing.
        """
        said: dict[str, Any] = {}
        try:
            # What comes late, or was not waited for, answers an earlier message.
            while said.get("to") != self.channel.sent(self.rank):
                said = json.loads(self.channel.hear(self.rank, timeout))
        except TimeoutError as error:
            raise NoAnswer(f"{self.url} does not answer") from error
        if not said["ok"]:
            raise refusal(f"{self.url}: {said['message']}")
        return str(said["message"])

    def pause(self) -> None:
        """Nothing: the engine serves until its receiver has everything."""

    def resume(self) -> None:
        """Nothing: the receiver does it at the commit."""

    def begin(self, manifest: Manifest) -> None:
        self.ask(manifest)

    def send_slots(self, run_id: str, version: str, buffers: Sequence[Tensor]) -> None:
        raise WeightSyncError("a receiver takes buckets from its process group only; use CollectiveTransport")

    def send_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> str:
        raise WeightSyncError("a receiver takes buckets from its process group only; use CollectiveTransport")

    def commit(self, run_id: str, version: str, checksum: str = "") -> None:
        self.held = self.ask(Commit(run_id, version, checksum), 4 * self.channel.timeout)

    def abort(self, run_id: str, version: str) -> None:
        self.ask(Abort(run_id, version), min(self.channel.timeout, ABORT_SECONDS))

    def close(self) -> None: ...


class CollectiveTransport:
    """Buckets to all receivers of a channel.

    Args:
        point_to_point: send to one receiver after the other instead of one broadcast; for receivers that come and go
            with their engines, and where a broadcast is slower.
    """

    def __init__(self, channel: Channel, point_to_point: bool = False) -> None:
        self.channel, self.point_to_point = channel, point_to_point

    def engines(self) -> list[RemoteEngine]:
        return [RemoteEngine(self.channel, rank) for rank in range(1, self.channel.size)]

    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        return new_buffer(index, size, device)

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[Engine]) -> list[str]:
        bucket.wait()
        remote = [engine for engine in engines if isinstance(engine, RemoteEngine)]
        if len(remote) != len(engines) or (len(remote) != self.channel.size - 1 and not self.point_to_point):
            raise WeightSyncError(
                "a broadcast reaches all receivers of the channel, or none: start those that are lost again and make a "
                "new Channel, or use point_to_point"
            )
        data = bucket.data.to(self.channel.device)
        header = json.dumps({"broadcast": not self.point_to_point}) + "\n" + spec.encode()
        for engine in remote:
            self.channel.tell(engine.rank, header)
        reached = remote
        try:
            if spec.nbytes and self.point_to_point:
                for engine in remote:
                    reached = [engine]
                    self.channel.send(data, engine.rank)
            elif spec.nbytes:
                self.channel.broadcast(data)
        except WeightSyncError as error:
            # A broadcast does not say whom it has not reached.
            error.errors = {engine.url: WeightSyncError(f"{engine.url}: {error}") for engine in reached}
            raise
        return fan_out(remote, lambda engine: engine.answer())

    def release(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept; receivers notice that the store is gone."""
