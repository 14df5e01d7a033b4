"""Control of a running SGLang engine over HTTP: the one place that knows its update endpoints."""

from __future__ import annotations

import base64
import io
import json
import pickle
import pickletools
import time
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from dllm.config import ConfigError
from dllm.trace import TORN
from weight_sync.messages import (
    ABORT_SECONDS,
    CHECKSUM,
    HOLDS,
    Abort,
    BucketSpec,
    Commit,
    Manifest,
    Message,
    NoAnswer,
    Read,
    ResendError,
    Slots,
    Torn,
    WeightSyncError,
    applied_seconds,
    refusal,
)
from weight_sync.staging import StagingError

LOADER = "weight_sync.loader.load"
"""Our entry in ``--custom-weight-loader``, and the ``load_format`` of update requests."""

DRAIN = "weight_sync.drain:"
"""Request id of a pause, followed by the seconds that running requests may take to end on their own."""


class HandlePickler(ForkingPickler):
    """Pickles a CUDA tensor as an IPC handle that names its GPU by UUID.

    PyTorch writes the sender's index, which is another GPU's where the receiver sees others. SGLang reads both.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        device = arguments[DEVICE]
        if isinstance(device, int):
            device = str(torch.cuda.get_device_properties(device).uuid)
        return rebuild, (*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])


DEVICE = 6
"""Place of the GPU's index among the arguments of torch's rebuild_cuda_tensor."""


def pickled(value: Any, cuda: bool) -> str:
    """Base64 of a pickle, in which CUDA tensors are IPC handles; their owner keeps them alive."""
    buffer = io.BytesIO()
    (HandlePickler(buffer) if cuda else pickle.Pickler(buffer)).dump(value)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def serialise(header: str, tensors: Sequence[Tensor]) -> str:
    """A header and tensors as SGLang expects them: base64 of a pickle.

    A CUDA tensor travels as an IPC handle; a CPU tensor (an empty one: its bytes lie in a shared file) by value.
    """
    return pickled([(header if i == 0 else "", tensor) for i, tensor in enumerate(tensors)], tensors[0].is_cuda)


def header_of(payload: str) -> dict[str, Any]:
    """The header in what ``serialise`` made, which is not unpickled for it.

    Raises:
        StagingError: it is none.
    """
    try:
        operations = pickletools.genops(base64.b64decode(payload, validate=True))
        return json.loads(next(argument for _, argument, _ in operations if isinstance(argument, str)))
    except (ValueError, StopIteration, IndexError, RecursionError) as error:
        raise StagingError(f"the payload is no message: {error!r}") from error


MAX_TIMEOUT = 86400.0
"""Seconds; far larger ones overflow in the operating system's calls."""


def connection(url: str, admin_key: str | None, timeout: float) -> httpx.Client:
    """A client of a server at ``url`` that sends its admin key.

    Raises:
        ConfigError: the address, the key or the timeout cannot work, whatever the server.
    """
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # what the resolver makes of it, with another exception class
        wrong = parsed.scheme not in ("http", "https") or not parsed.host or not 0 < (parsed.port or 1) < 1 << 16
    except (httpx.InvalidURL, UnicodeError):
        wrong = True
    if wrong:
        raise ConfigError(f"engine address {url!r} is no URL of a server; write http://HOST:PORT or https://HOST:PORT")
    if admin_key and not (admin_key.isascii() and admin_key.isprintable() and admin_key == admin_key.strip()):
        # The key itself is a secret, and stays out of the message.
        raise ConfigError(
            f"admin API key of {len(admin_key)} characters cannot travel in a header: it has others than printable "
            "ASCII, or space around it; give the server's --admin-api-key"
        )
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ConfigError(f"timeout={timeout} is not a number of seconds in 0 to {MAX_TIMEOUT:.0f}; use e.g. 300")
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout)


class EngineControl:
    """One engine's control endpoints.

    Args:
        url: base address, e.g. ``http://127.0.0.1:30000``.
        tp_size: tensor-parallel ranks of the engine; every rank gets its own copy of the payload.
        admin_key: value of the server's ``--admin-api-key``, if it has one.
        timeout: seconds until a call is given up.
        drain_seconds: how long requests that run when an update begins may take to end on their own; afterwards they
            are aborted at their next block boundary.

    Raises:
        ConfigError: address, key or timeout cannot work.

    Attributes:
        applied_seconds: that the engine's loader has spent on buckets so far.
    """

    staged = False

    def __init__(
        self,
        url: str,
        tp_size: int = 1,
        admin_key: str | None = None,
        timeout: float = 120.0,
        drain_seconds: float = 60.0,
    ) -> None:
        self.url, self.tp_size = url.rstrip("/"), tp_size
        self.timeout, self.drain_seconds = timeout, drain_seconds
        self.applied_seconds, self.held = 0.0, ""
        self.client = connection(self.url, admin_key, timeout)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """POST and return the decoded answer.

        Raises:
            ResendError: a bucket was refused before any of it was used.
            NoAnswer: the engine cannot be reached, or did not answer in time.
            WeightSyncError: it answered with a failure.
        """
        try:
            answer = self.client.post(path, json=body or {}, timeout=timeout or self.timeout)
        except httpx.HTTPError as error:
            raise NoAnswer(f"engine {self.url} did not answer {path}: {error!r}") from error
        try:
            decoded = answer.json()
        except ValueError:
            decoded = answer.text
        failed = isinstance(decoded, dict) and decoded.get("success") is False
        if answer.status_code != 200 or failed:
            message = decoded.get("message", decoded) if isinstance(decoded, dict) else decoded
            raise refusal(f"engine {self.url} refused {path} ({answer.status_code}): {message}")
        return decoded

    def message(
        self,
        header: Message,
        tensors: Sequence[Tensor] = (),
        version: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Deliver a header to the loader of every tensor-parallel rank; its answer.

        Each call makes its own IPC handles, because a handle that is opened twice leaks (sglang PR 4446). The cache is
        left alone: SGLang asserts that a flush within an update succeeds, and dies if a request is still there.
        """
        payload = tensors or [torch.empty(0, dtype=torch.uint8)]
        return self.deliver([serialise(header.encode(), payload) for _ in range(self.tp_size)], version, timeout)

    def deliver(self, payload: Sequence[str], version: str | None = None, timeout: float | None = None) -> str:
        """Deliver a message that ``serialise`` made, one for every tensor-parallel rank; its answer."""
        answer = self.post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": list(payload),
                "load_format": LOADER,
                "flush_cache": False,
                "weight_version": version,
            },
            timeout,
        )
        return str(answer.get("message", "")) if isinstance(answer, dict) else str(answer)

    def pause(self) -> None:
        """Close the engine: new requests wait, running ones end on their own or, after ``drain_seconds``, at a block
        boundary. Only this pause is safe for block diffusion: SGLang's ``retract`` and ``in_place`` leave half-denoised
        blocks behind."""
        body = {"mode": "abort", "rid": f"{DRAIN}{self.drain_seconds}"}
        self.post("/pause_generation", body, timeout=self.timeout + self.drain_seconds)

    def resume(self) -> None:
        """Let the waiting requests in.

        Raises:
            Torn: an update that broke off, of whatever trainer, has left a mixture.
        """
        try:
            self.post("/continue_generation", {"torch_empty_cache": False})
        except WeightSyncError as error:
            raise (Torn(str(error)) if TORN in str(error) else error) from None

    def begin(self, manifest: Manifest) -> None:
        """Announce an update; refused before its first byte if the engine's tensors are others."""
        self.held = self.message(manifest).partition(HOLDS)[2]

    def send_slots(self, run_id: str, version: str, buffers: Sequence[Tensor]) -> None:
        """Share device buffers for the rest of the update."""
        self.message(Slots(run_id, version), buffers)

    def send_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> str:
        """Deliver one bucket; returns when every rank has copied it.

        Returns:
            After the last bucket the checksum of all weights as the engine holds them, otherwise "".

        Raises:
            ResendError: it was damaged or is not the next one; nothing of it was used.
        """
        answer = self.message(spec, [] if data is None else [data])
        self.applied_seconds += applied_seconds(answer)
        return answer.partition(CHECKSUM)[2][:16]

    def commit(self, run_id: str, version: str, checksum: str = "") -> None:
        """After the last bucket: drop the cache of the old weights, then flip the version."""
        deadline = time.monotonic() + self.timeout / 2
        while True:
            try:
                self.message(Commit(run_id, version, checksum), version=version)
                return
            except ResendError:
                # A request that was aborted may take one more round of the scheduler to leave.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def abort(self, run_id: str, version: str) -> None:
        """Give an update up; the engine releases what it holds of it. One that is gone or hangs is not waited for."""
        self.message(Abort(run_id, version), timeout=min(self.timeout, ABORT_SECONDS))

    def checksum(self) -> str:
        """Checksum of all weights as the engine holds them: 16 hex digits, equal for equal weights whatever the number
        of ranks, and to ``SyncReport.checksum``."""
        return self.message(Read()).partition(CHECKSUM)[2][:16]

    def flush(self) -> None:
        """Drop KV and radix cache, once the requests that run have ended."""
        seconds = self.timeout / 2
        self.post(f"/flush_cache?timeout={seconds}")

    def resume_memory(self, tags: list[str]) -> None:
        """Map released memory back in: "weights" or "kv_cache"."""
        self.post("/resume_memory_occupation", {"tags": tags})

    def release_memory(self, tags: list[str]) -> None:
        self.post("/release_memory_occupation", {"tags": tags})

    def close(self) -> None:
        self.client.close()
