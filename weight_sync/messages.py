"""What travels between a publisher and the loader inside the engine, besides the bytes themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from dllm.trace import TORN
from weight_sync.buckets import Placement


class WeightSyncError(RuntimeError):
    """An engine did not take an update; unless it says that it kept the old weights, they must not be used until a
    complete resend.

    Attributes:
        errors: of a step that several engines took, what each of those that failed said, by address.
    """

    errors: Mapping[str, WeightSyncError] = {}


class Torn(WeightSyncError):
    """An engine holds a mixture of two versions and stays closed until a complete update."""


class NoAnswer(WeightSyncError):
    """An engine is gone, hangs, or cannot be reached."""


class EngineFailed(WeightSyncError):
    """An update has ended without success, because of an engine.

    Attributes:
        version: that it did not get everywhere.
        stage: "pause", "manifest", "bucket 3", "checksum", "commit" or "resume".
        errors: what each engine that failed said, by address.
        lost: addresses of those that do not answer any more; the fleet goes on without them.
        committed: addresses of those that serve ``version`` all the same.
    """

    def __init__(
        self,
        version: str,
        stage: str,
        errors: Mapping[str, WeightSyncError],
        lost: Sequence[str] = (),
        committed: Sequence[str] = (),
    ) -> None:
        self.version, self.stage, self.errors = version, stage, errors
        self.lost, self.committed = tuple(lost), tuple(committed)
        named = ((url, str(error)) for url, error in errors.items())
        said = "; ".join(text if url in text else f"{url}: {text}" for url, text in named)
        gone = f"; lost: {', '.join(lost)}" if lost else ""
        super().__init__(f"version {version} failed at {stage}: {said}{gone}")


class ResendError(WeightSyncError):
    """A message was refused before any of it was used; the update goes on when the right one is sent."""


ABORT_SECONDS = 5.0
"""How long an engine may take to give up an update before it counts as lost."""

MAX_DRAIN_SECONDS = 3600.0
"""How long a server lets running requests end on their own at most."""


VERSION_DIGITS = 18
"""Longest number that a session takes as a version."""


APPLY_ATTEMPTS = 2
"""How often a staged update is applied before the engine counts as broken."""


RESEND = "resend: "
"""What a refusal says that is a ``ResendError``, whoever it comes from."""


def refusal(text: str) -> WeightSyncError:
    """The error of a loader, a server or a receiver that refused with these words."""
    return (ResendError if RESEND in text else WeightSyncError)(text)


CHECKSUM = "checksum: "
"""Beginning of the answer to the last bucket and to ``Read``; 16 hex digits follow."""


APPLIED = "applied in "
"""Beginning of the answer to a bucket; the seconds of the slowest rank follow."""


HOLDS = "holds "
"""In the answer to a manifest, before the version that the engine has held so far, if an update has brought it; in any
answer before the label of a mixture that it holds now."""


def mixture(answer: str) -> str:
    """The label of the mixture that an engine holds, from any of its loader's answers; "" if it holds none."""
    rest = answer.partition(HOLDS + TORN)[2]
    return TORN + rest.partition(";")[0] if rest else ""


def applied_seconds(answer: str) -> float:
    """What the answer to a bucket says of the time in the loader; 0 if it says nothing."""
    try:
        return float(answer.partition(APPLIED)[2].partition(" s")[0])
    except ValueError:
        return 0.0


class Message:
    """Base of the headers below: JSON text whose ``kind`` says which one it is."""

    kind = ""

    def encode(self) -> str:
        return json.dumps({"kind": self.kind, **asdict(self)})  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Any:
        return cls(**{key: value for key, value in raw.items() if key != "kind"})

    @classmethod
    def decode(cls, text: str) -> Any:
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class Manifest(Message):
    """What an update consists of, told before its first byte.

    Attributes:
        run_id, version: identify the update; all its messages carry the same. The version is a label, "12".
        tensors: (name, full shape, dtype) on the wire, experts fused per layer.
        nbytes: of all tensors.
        base_version: version that the engine must hold; None does not care.
    """

    kind = "begin"

    run_id: str
    version: str
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    nbytes: int
    base_version: str | None = None

    @property
    def digest(self) -> str:
        """Identifies names, shapes and dtypes, in any order."""
        return tensors_digest(self.tensors)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Manifest:
        tensors = tuple((name, tuple(shape), dtype) for name, shape, dtype in raw["tensors"])
        return cls(raw["run_id"], raw["version"], tensors, raw["nbytes"], raw.get("base_version"))


def tensors_digest(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """xxh3 of names, shapes and dtypes, whatever their order."""
    listed = sorted((name, list(shape), dtype) for name, shape, dtype in tensors)
    return xxhash.xxh3_128_hexdigest(json.dumps(listed).encode())


@dataclass(frozen=True)
class Slots(Message):
    """The sender's device buffers travel along, once per update; later buckets say in which one they lie."""

    kind = "slots"

    run_id: str
    version: str


@dataclass
class BucketSpec(Message):
    """Header of one bucket. Its bytes are the tensor that travels along, or lie in ``file`` or in ``slot``.

    Attributes:
        run_id, version: identify the update; all buckets of an update carry the same.
        index: position of the bucket in the update, from 0; buckets arrive in order.
        last: no further bucket follows.
        placements: tensors in the bucket.
        checksum: of its bytes (see ``weight_sync.checksum``).
        file: path on the engine's host; all of the file is the bucket.
        slot: number of the device buffer (see ``Slots``); the bucket begins where the buffer does.
        nbytes: length of the bucket.
    """

    kind = "bucket"

    run_id: str
    version: str
    index: int
    last: bool
    placements: list[Placement] = field(default_factory=list)
    checksum: str = ""
    file: str | None = None
    slot: int | None = None
    nbytes: int = 0

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> BucketSpec:
        placements = [Placement(**{**p, "shape": tuple(p["shape"])}) for p in raw["placements"]]
        return super().from_dict({**raw, "placements": placements})


@dataclass(frozen=True)
class Commit(Message):
    """All buckets are in and the old cache is gone: from now on samples carry the new version.

    Attributes:
        checksum: of all weights as the sender sent them, 16 hex digits; "" does not compare.
    """

    kind = "commit"

    run_id: str
    version: str
    checksum: str = ""


@dataclass(frozen=True)
class Abort(Message):
    """The sender gives the update up. Weights that were touched stay what they are, and say so."""

    kind = "abort"

    run_id: str
    version: str


@dataclass(frozen=True)
class Read(Message):
    """Asks for the checksum of all weights as the engine holds them now; changes nothing."""

    kind = "read"


@dataclass
class LoaderStatus:
    """What the loader of one tensor-parallel rank did with a message.

    Attributes:
        resend: nothing of the message was used; the same update goes on when the right one comes.
        checksum: this rank's share of the checksum of everything the engine holds, after the last bucket.
        label: version of the weights after the message; ``torn:<old>-><new>`` while they are a mixture, None if no
            update has touched them.
        seconds: that it took.
        held: in the answer to a manifest or to giving up, what the engine holds; None if no update has brought it.
    """

    ok: bool
    message: str = ""
    tensors: int = 0
    nbytes: int = 0
    resend: bool = False
    checksum: int | None = None
    label: str | None = None
    seconds: float = 0.0
    held: str | None = None


@dataclass
class SyncReport:
    """Outcome of a refresh: seconds by stage, bytes and buckets.

    Attributes:
        tensors: on the wire (experts fused per layer).
        resent: buckets that had to be sent again.
        checksum: of the weights, equal on the trainer and on every engine ("" if it was not computed).
        seconds: by stage, in the order of time: "pause" (running requests end), "stream" (first tensor to last
            bucket, read back and compared), "finish" (cache and version), "resume"; "total" is all of it. Within
            "stream", and partly at the same time: "gather" (source to bucket), "checksum", "transfer" (until the engine
            has copied it) and of that "apply" (in its loader).
        strayed: engines that held another version than the publisher's last one when the update began, and which ("" is
            that of their start): restarted, or refreshed by somebody else. They have the new version like the others,
            but what they served in between was decoded with that one.
    """

    version: str
    tensors: int = 0
    nbytes: int = 0
    buckets: int = 0
    resent: int = 0
    checksum: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    strayed: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began

    def as_metrics(self) -> dict[str, Any]:
        """Under the names ``weight_sync/...``; goodput in 1e9 bytes per second of the whole refresh."""
        total = self.seconds.get("total", 0.0)
        return {
            **{f"weight_sync/{stage}_seconds": seconds for stage, seconds in self.seconds.items()},
            "weight_sync/bytes": self.nbytes,
            "weight_sync/buckets": self.buckets,
            "weight_sync/resent": self.resent,
            "weight_sync/strayed": len(self.strayed),
            "weight_sync/goodput_gbps": self.nbytes / 1e9 / total if total else 0.0,
        }
