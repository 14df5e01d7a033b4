"""The sender's side of ``weight_sync.service``: a server with sessions as an engine of the publisher.

``ServiceControl`` stages an update while the server serves; ``StreamControl`` sends it straight into a closed engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from dllm.config import ConfigError
from weight_sync.control import connection, serialise
from weight_sync.frames import frame
from weight_sync.messages import (
    ABORT_SECONDS,
    CHECKSUM,
    MAX_DRAIN_SECONDS,
    BucketSpec,
    Manifest,
    NoAnswer,
    Slots,
    WeightSyncError,
    applied_seconds,
    refusal,
)


class ServiceControl:
    """A rollout server that stages an update while it serves, and applies it at the commit.

    Args:
        url: its address, e.g. ``http://127.0.0.1:30000``.
        admin_key: value of the server's ``--admin-api-key``, if it has one.
        timeout: seconds until a call is given up; a commit may take this and ``drain_seconds``.
        drain_seconds: how long requests that run at the commit may take to end on their own; afterwards they are
            aborted at their next block boundary.

    Raises:
        ConfigError: address, key, timeout or ``drain_seconds`` cannot work.
    """

    staged = True

    def __init__(
        self, url: str, admin_key: str | None = None, timeout: float = 300.0, drain_seconds: float = 60.0
    ) -> None:
        self.url, self.timeout, self.drain_seconds, self.held = url.rstrip("/"), timeout, drain_seconds, ""
        if not 0 <= drain_seconds <= MAX_DRAIN_SECONDS:
            raise ConfigError(
                f"drain_seconds={drain_seconds} is not in 0 to {MAX_DRAIN_SECONDS:.0f}, which a server takes; use "
                "e.g. 60"
            )
        self.client = connection(self.url, admin_key, timeout)

    def call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """One step; the decoded answer.

        Raises:
            ResendError: a bucket did not arrive as it was sent; the update goes on when it comes again.
            NoAnswer: the server cannot be reached, or did not answer in time.
            WeightSyncError: it refused.
        """
        try:
            answer = self.client.request(method, f"/weights/v1{path}", **arguments)
        except httpx.HTTPError as error:
            raise NoAnswer(f"server {self.url} did not answer {method} {path}: {error!r}") from error
        try:
            decoded = answer.json()
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            decoded = {"error": answer.text[:500]}
        if answer.status_code != 200:
            message = decoded.get("error") or decoded.get("detail") or decoded
            if answer.status_code == 404 and message == "Not Found":
                message = "it has no weight sessions; start it with `python -m rollout.server`"
            if answer.status_code == 401:
                message = "it wants its admin key; give --admin-api-key"
            raise refusal(f"server {self.url} refused {method} {path} ({answer.status_code}): {message}")
        return decoded

    def state(self) -> dict[str, Any]:
        """State, version, open session, dtype of the weights."""
        state = self.call("GET", "/state")
        if "dtype" not in state:
            raise WeightSyncError(f"server {self.url} has no weight sessions; start it with `python -m rollout.server`")
        return state

    def open(self, manifest: Manifest) -> list[int] | None:
        """Begin an update or go on with it; which buckets are missing, None if it has been committed."""
        return self._opened(json=json.loads(manifest.encode()))

    def _opened(self, **arguments: Any) -> list[int] | None:
        answer = self.call("POST", "/sessions", **arguments)
        self.held = answer["version"] or ""
        return None if answer["committed"] else answer["missing"]

    def begin(self, manifest: Manifest) -> None:
        """``open``, for the publisher."""
        self.open(manifest)

    def send_slots(self, run_id: str, version: str, buffers: Sequence[Tensor]) -> None:
        raise WeightSyncError("device buffers cannot wait for a commit; use StreamControl")

    def send_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> str:
        """Send the bytes of one bucket (uint8, host memory, or those of ``spec.file``).

        Returns:
            After the last bucket the checksum of all tensors as they have arrived, otherwise "".
        """
        self.put_bucket(spec, data)
        return self.prepare(spec.run_id, spec.version) if spec.last else ""

    def put_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> None:
        """Send the bytes of one bucket, in any order; ``prepare`` follows when all are there."""
        if data is None:
            if spec.file is None:
                raise WeightSyncError(f"bucket {spec.index} has no bytes to send")
            data = torch.from_file(spec.file, size=spec.nbytes, dtype=torch.uint8)
        body = frame(spec.encode()), data.contiguous().numpy().data
        path = f"/sessions/{spec.run_id}/{spec.version}"
        headers = {"Content-Length": str(len(body[0]) + spec.nbytes)}
        self.call("PUT", f"{path}/buckets/{spec.index}", content=iter(body), headers=headers)

    def send_directory(self, run_id: str, version: str, directory: Path) -> str:
        """Have the server read a checkpoint from a file system that it shares; the checksum of its tensors."""
        path = f"/sessions/{run_id}/{version}"
        self.call("POST", f"{path}/directory", json={"path": str(directory.absolute())})
        return self.prepare(run_id, version)

    def prepare(self, run_id: str, version: str) -> str:
        """Have the server verify all that has arrived; its checksum."""
        return self.call("POST", f"/sessions/{run_id}/{version}/prepare")["checksum"]

    def commit(self, run_id: str, version: str, checksum: str = "") -> None:
        """Exchange the weights. May be repeated after a lost answer."""
        body = {"drain_seconds": self.drain_seconds, "checksum": checksum}
        path = f"/sessions/{run_id}/{version}/commit"
        self.call("POST", path, timeout=self.timeout + self.drain_seconds, json=body)

    def abort(self, run_id: str, version: str) -> None:
        """Drop an update. A server that is gone or hangs is not waited for."""
        seconds = min(self.timeout, ABORT_SECONDS)
        self.call("POST", f"/sessions/{run_id}/{version}/abort", timeout=seconds)

    def pause(self) -> None:
        """Nothing: the server serves until the commit."""

    def resume(self) -> None:
        """Nothing: the server goes on by itself."""

    def close(self) -> None:
        self.client.close()


class StreamControl(ServiceControl):
    """A rollout server that takes no requests from the beginning of an update to its commit.

    For ``weight_sync.transports.ipc`` on the server's own GPU, and ``shm`` on its host: nothing is copied twice.
    """

    staged, tp_size, applied_seconds = False, 1, 0.0

    def open(self, manifest: Manifest) -> list[int] | None:
        self.tp_size = self.state()["tp_size"]
        body = {**json.loads(manifest.encode()), "mode": "stream", "drain_seconds": self.drain_seconds}
        return self._opened(json=body, timeout=self.timeout + self.drain_seconds)

    def send_slots(self, run_id: str, version: str, buffers: Sequence[Tensor]) -> None:
        self._relay(Slots(run_id, version), buffers)

    def send_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> str:
        """Returns when every rank has copied the bucket; after the last one with the checksum of the engine."""
        answer = self._relay(spec, [torch.empty(0, dtype=torch.uint8) if data is None else data])
        self.applied_seconds += applied_seconds(answer)
        return answer.partition(CHECKSUM)[2]

    def _relay(self, message: BucketSpec | Slots, tensors: Sequence[Tensor]) -> str:
        encoded = message.encode()
        payload = [serialise(encoded, tensors) for _ in range(self.tp_size)]
        path = f"/sessions/{message.run_id}/{message.version}/messages"
        return self.call("POST", path, json={"header": json.loads(encoded), "payload": payload})["answer"]
