"""How the bytes of a bucket reach an engine: one file per way, one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from weight_sync.buckets import Bucket
from weight_sync.messages import BucketSpec, Manifest, ResendError, WeightSyncError


class Engine(Protocol):
    """What takes an update; ``weight_sync.control.EngineControl`` documents the calls.

    Attributes:
        staged: the engine's weights are not written to before the commit.
        held: version that it had when the present update began ("" if it has had none since its start).
    """

    url: str
    staged: bool
    held: str

    def pause(self) -> None: ...

    def begin(self, manifest: Manifest) -> None: ...

    def send_slots(self, run_id: str, version: str, buffers: Sequence[Tensor]) -> None: ...

    def send_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> str: ...

    def commit(self, run_id: str, version: str, checksum: str = "") -> None: ...

    def abort(self, run_id: str, version: str) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Delivers buckets to engines, in order."""

    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        """Memory for bucket ``index``: uint8 [size], on the device of the tensors; the same size for all of an update.

        The buffer of bucket ``index - 2`` may be reused: it has arrived.
        """

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[Engine]) -> list[str]:
        """Deliver a bucket; the answers of ``Engine.send_bucket``. Returns when all engines have copied it, and raises
        when one has not in the transport's own time: nobody else watches it."""

    def release(self) -> None:
        """Free the buffers; the update has ended, well or not."""

    def close(self) -> None: ...


T = TypeVar("T")
E = TypeVar("E", bound=Engine)


def fan_out(engines: Sequence[E], call: Callable[[E], T]) -> list[T]:
    """Results of ``call`` on every engine, all at the same time.

    Raises:
        WeightSyncError: of the first engine that failed, after all calls have ended; ``errors`` has all of them. A
            ``ResendError`` only if no engine has failed otherwise.
    """
    results: list[T] = []
    errors: dict[str, WeightSyncError] = {}
    with ThreadPoolExecutor(max(1, len(engines))) as pool:
        calls = [pool.submit(call, engine) for engine in engines[1:]]
        # The first one in this thread: a single engine needs no other.
        for engine, get in zip(engines, [lambda: call(engines[0]), *(c.result for c in calls)], strict=False):
            try:
                results.append(get())
            except WeightSyncError as error:
                errors[engine.url] = error
    if errors:
        worst = next((e for e in errors.values() if not isinstance(e, ResendError)), next(iter(errors.values())))
        worst.errors = errors
        raise worst
    return results
