"""Custom weight loader inside the engine; the plugin adds it to ``--custom-weight-loader``.

Runs in every tensor-parallel worker. It never raises, because an exception there kills the scheduler; instead it
keeps a status, which the plugin turns into the answer of the update request.

An update is a manifest, buckets in order, and a commit. A bucket that is damaged or not the next one is refused before
any of its bytes is used, and the update goes on when the right one comes. From the first copy to the commit the
weights are a mixture, and ``LoaderState.label`` says so.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm.trace import TORN
from weight_sync.checksum import MODULUS, same_checksum
from weight_sync.messages import (
    APPLIED,
    CHECKSUM,
    HOLDS,
    RESEND,
    Abort,
    BucketSpec,
    Commit,
    LoaderStatus,
    Manifest,
    Message,
    Read,
    Slots,
)
from weight_sync.target import Progress, Target

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A message was refused; nothing of it was used, and the update stays open."""


class NoSuchUpdate(Exception):
    """A message belongs to no open update; the one that is open, if any, stays open."""


@dataclass
class Session:
    """An update in progress.

    Attributes:
        received: checksums of the buckets so far.
        slots: the sender's device buffers.
        share: this rank's part of the checksum of all weights, after the last bucket.
        total: the checksum, over all ranks.
    """

    run_id: str
    version: str
    progress: Progress
    received: list[str] = field(default_factory=list)
    slots: list[Tensor] = field(default_factory=list)
    share: int | None = None
    total: int | None = None


@dataclass
class LoaderState:
    """State of this worker, read by the plugin after every update request.

    Attributes:
        label: version of the weights; ``torn:<old>-><new>`` between the first copy and the commit; None before the
            first update.
        committed: run id and version of the last update.
        flush: drops the cache of the old weights; False if requests are still running. The plugin sets it.
    """

    session: Session | None = None
    status: LoaderStatus | None = None
    label: str | None = None
    committed: tuple[str, str] | None = None
    target: Target | None = None
    model: Callable[[], Any] = lambda: None
    flush: Callable[[], bool] = lambda: True


STATE = LoaderState()


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Handle one message: its header (see ``weight_sync.messages``) and the tensors that travel along."""
    began = time.perf_counter()
    try:
        message = _decode(named_tensors[0][0] if named_tensors else "")
        STATE.status = HANDLERS[type(message)](model, message, [tensor for _, tensor in named_tensors])
    except Refused as error:
        STATE.status = LoaderStatus(False, str(error), resend=True)
    except NoSuchUpdate as error:
        STATE.status = LoaderStatus(False, f"{error}; start over")
    except Exception as error:
        logger.exception("weight update failed")
        STATE.session = None
        STATE.status = LoaderStatus(False, f"{type(error).__name__}: {error}; start over")
    STATE.status.label, STATE.status.seconds = STATE.label, time.perf_counter() - began


def unreadable(error: Exception) -> None:
    """Note a message that did not get as far as ``load``; the plugin calls it. The open update stays open."""
    STATE.status = LoaderStatus(False, _unreadable(error), resend=True, label=STATE.label)


def _unreadable(error: Exception) -> str:
    return f"the message cannot be read: {type(error).__name__}: {error}"


def _decode(header: str) -> Message:
    """The message of a header.

    Raises:
        Refused: it is none.
    """
    try:
        raw = json.loads(header)
        return KINDS[raw["kind"]].from_dict(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(_unreadable(error)) from error


def answer(statuses: Sequence[LoaderStatus | None]) -> tuple[bool, str]:
    """Success and message of the whole engine, from the statuses of its ranks; the same on every rank.

    The message says how long it took; of a manifest also which version the engine held, and always if it holds a
    mixture now (``holds``); after the last bucket, and when asked for it, it ends in ``checksum: <16 hex digits>`` of
    all weights over all ranks.
    """
    labels = [status.label for status in statuses if status is not None and status.label is not None]
    # A rank that took what another refused holds a mixture alone.
    torn = next((f"; {HOLDS}{label}" for label in labels if label.startswith(TORN)), "")
    for rank, status in enumerate(statuses):
        if status is None or not status.ok:
            resend = RESEND if status and status.resend else ""
            return False, f"{resend}rank {rank}: {status.message if status else 'the loader did not run'}{torn}"
    shares = [status.checksum for status in statuses if status is not None and status.checksum is not None]
    applied = f"{APPLIED}{max(status.seconds for status in statuses if status):.6f} s"
    if len(shares) != len(statuses):
        held = next((f"; {HOLDS}{s.held}" for s in statuses if s is not None and s.held is not None), "")
        return True, f"{applied}{torn or held}"
    total = sum(shares) % MODULUS
    if STATE.session is not None and STATE.session.share is not None:
        STATE.session.total = total
    return True, f"{applied}{torn}; {CHECKSUM}{total:016x}"


def target_of(model: Any) -> Target:
    """The model's target, made once."""
    if STATE.target is None or STATE.model() is not model:
        rank, size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        STATE.target, STATE.model = Target(model, rank, size), weakref.ref(model)
    STATE.target.bind(model)
    return STATE.target


def _session(run_id: str, version: str, what: str) -> Session:
    """The open update.

    Raises:
        NoSuchUpdate: it is another one, or none.
    """
    session = STATE.session
    if session is None or (session.run_id, session.version) != (run_id, version):
        raise NoSuchUpdate(f"{what} of version {version} has no open update")
    return session


def _begin(model: Any, manifest: Manifest, tensors: list[Tensor]) -> LoaderStatus:
    target = target_of(model)
    if manifest.digest != target.digest:
        wrong = sorted(set(manifest.tensors).symmetric_difference(target.layout.tensors()))
        raise NoSuchUpdate(f"{len(wrong)} tensors of the manifest are not those of this engine, e.g. {wrong[0]}")
    if manifest.base_version is not None and STATE.label not in (None, manifest.base_version):
        raise NoSuchUpdate(f"the engine holds {STATE.label}, not the base version {manifest.base_version}")
    session = STATE.session
    if session is None or (session.run_id, session.version) != (manifest.run_id, manifest.version):
        STATE.session = Session(manifest.run_id, manifest.version, Progress(target))
    _synchronize(target)
    return LoaderStatus(True, held=STATE.label)


def _slots(model: Any, message: Slots, tensors: list[Tensor]) -> LoaderStatus:
    # Kept for the whole update: mapping another process's memory takes milliseconds.
    _session(message.run_id, message.version, "buffers").slots = tensors
    return LoaderStatus(True)


def _bucket(model: Any, spec: BucketSpec, tensors: list[Tensor]) -> LoaderStatus:
    session = _session(spec.run_id, spec.version, f"bucket {spec.index}")
    progress = session.progress
    if spec.index < len(session.received) and session.received[spec.index] == spec.checksum:
        return LoaderStatus(True, "duplicate", checksum=session.share)
    if spec.index != len(session.received) or session.share is not None:
        raise Refused(f"bucket {spec.index} arrived where {len(session.received)} was due")
    data = _bytes(spec, session, tensors[0])
    if data.numel() != spec.nbytes:
        raise Refused(f"bucket {spec.index} has {data.numel()} bytes, {spec.nbytes} were sent")
    if not same_checksum(data, spec.placements, spec.checksum):
        raise Refused(f"bucket {spec.index} was damaged on the way")
    pieces = progress.check(spec.placements, data)
    STATE.label = _torn(spec.version)
    progress.copy(pieces)
    if spec.last:
        session.share = progress.finish()
    # The sender reuses its buffer as soon as it is told of success.
    _synchronize(progress.target)
    session.received.append(spec.checksum)
    return LoaderStatus(True, tensors=len(pieces), nbytes=data.numel(), checksum=session.share)


def _bytes(spec: BucketSpec, session: Session, along: Tensor) -> Tensor:
    if spec.slot is not None:
        if not 0 <= spec.slot < len(session.slots):
            raise Refused(f"bucket {spec.index} lies in buffer {spec.slot}, which was not announced")
        return session.slots[spec.slot][: spec.nbytes]
    if spec.file is None:
        return along
    try:
        return torch.from_numpy(np.fromfile(spec.file, dtype=np.uint8))
    except OSError as error:
        raise Refused(f"bucket {spec.index} cannot be read from {spec.file}: {error.strerror}") from error


def _torn(version: str) -> str:
    before = STATE.label or "start"
    if before.startswith(TORN):
        before = before.removeprefix(TORN).partition("->")[0]
    return f"{TORN}{before}->{version}"


def _commit(model: Any, commit: Commit, tensors: list[Tensor]) -> LoaderStatus:
    key = (commit.run_id, commit.version)
    if STATE.session is None and STATE.committed == key:
        return LoaderStatus(True, "duplicate")
    session = _session(*key, "the commit")
    if session.total is None:
        raise NoSuchUpdate(f"version {commit.version} is not complete: {len(session.received)} buckets arrived")
    if commit.checksum and f"{session.total:016x}" != commit.checksum:
        raise ValueError(f"the engine's weights have checksum {session.total:016x}, the sender's {commit.checksum}")
    if not STATE.flush():
        raise Refused(f"version {commit.version} cannot take over while requests are running")
    STATE.session, STATE.committed, STATE.label = None, key, session.version
    return LoaderStatus(True)


def _abort(model: Any, message: Abort, tensors: list[Tensor]) -> LoaderStatus:
    if STATE.session is not None and (STATE.session.run_id, STATE.session.version) == (message.run_id, message.version):
        STATE.session = None
    return LoaderStatus(True, held=STATE.label)


def _read(model: Any, message: Read, tensors: list[Tensor]) -> LoaderStatus:
    return LoaderStatus(True, checksum=target_of(model).checksum())


def _synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


HANDLERS: dict[type[Message], Callable[..., LoaderStatus]] = {
    Manifest: _begin,
    Slots: _slots,
    BucketSpec: _bucket,
    Commit: _commit,
    Abort: _abort,
    Read: _read,
}

KINDS = {message.kind: message for message in HANDLERS}
