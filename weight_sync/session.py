"""Which weights an engine may serve while an update arrives: a state machine without I/O.

    SERVING(v) --open--> PREPARING(v -> v') --fence--> FENCED(v') --finish--> SERVING(v')
                             |                            |
                             +--abort, expire--> SERVING(v)+--fail after the first byte--> BROKEN

Staged updates collect every bucket while ``v`` is served and are fenced only to be applied. Streamed ones are fenced
first, because their bytes go straight into the engine. The version changes at the very end. A BROKEN engine holds
neither version: it admits nothing until a complete update has been applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

LEASE_S = 60.0
"""Seconds after its last sign of life during which an open update keeps other writers out."""

Mode = Literal["staged", "stream"]
Key = tuple[str, str]
"""Run id and version: what identifies an update."""


class State(StrEnum):
    """What an engine is doing; it admits requests in the first two."""

    SERVING = "serving"
    PREPARING = "preparing"
    FENCED = "fenced"
    BROKEN = "broken"


class Refused(Exception):
    """A step that the present state does not allow; nothing has changed.

    Attributes:
        unknown: the update it belongs to is not open, as opposed to a step at the wrong time.
    """

    def __init__(self, message: str, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


@dataclass
class Session:
    """An open update.

    Attributes:
        digest: identifies what its manifest says.
        received: checksum of every bucket that has arrived, by index; of a streamed update, that has been applied.
        last: index of the last bucket, once known.
        prepared: everything has arrived and was checked.
        touched: the engine's weights have been written to.
        applied: how many buckets the engine took since the application began.
        fenced_at: when the engine was closed for it.
        expires: time until which other writers are kept out.
    """

    run_id: str
    version: str
    digest: str
    mode: Mode
    expires: float
    received: dict[int, str] = field(default_factory=dict)
    last: int | None = None
    prepared: bool = False
    touched: bool = False
    applied: int = 0
    fenced_at: float = 0.0

    @property
    def key(self) -> Key:
        return self.run_id, self.version

    @property
    def complete(self) -> bool:
        return self.last is not None and len(self.received) == self.last + 1

    def missing(self) -> list[int]:
        """Buckets to send: the gaps, and the next one unless the last is there."""
        stop = self.last if self.last is not None else max(self.received, default=-1) + 1
        return [i for i in range(stop + 1) if i not in self.received]


@dataclass
class Machine:
    """State of one engine. Times are seconds of any clock that never goes back.

    Attributes:
        version: version that the engine holds completely; None while it holds a mixture.
        session: the open update, if there is one.
        fenced: nothing is admitted, because the open update is being applied.
        broken: why the engine holds a mixture that nothing is being applied to.
        committed: key of the last update that succeeded.
    """

    version: str | None
    lease: float = LEASE_S
    session: Session | None = None
    fenced: bool = False
    broken: str | None = None
    committed: Key | None = None

    @property
    def state(self) -> State:
        if self.fenced:
            return State.FENCED
        if self.broken is not None:
            return State.BROKEN
        return State.PREPARING if self.session else State.SERVING

    @property
    def admits(self) -> bool:
        """Whether a request may start; it is then decoded by ``version`` from beginning to end."""
        return not self.fenced and self.broken is None

    def serves(self, key: Key) -> bool:
        """Whether the engine holds what this update has brought."""
        return self.committed == key and self.version == key[1]

    def open(
        self, key: Key, digest: str, now: float, mode: Mode = "staged", base_version: str | None = None
    ) -> Session | None:
        """Begin an update, or go on with it.

        Returns:
            The open update; None if the engine serves its version already.

        Raises:
            Refused: another update is open, the version is not newer, or the engine does not hold ``base_version``.
        """
        run_id, version = key
        if not (version.isascii() and version.isdecimal()):
            raise Refused(f"version {version!r} is not a number; count updates from 0 upwards")
        if self.admits and self.serves(key):
            return None
        if self.session is not None and self.session.key == key:
            if (self.session.digest, self.session.mode) != (digest, mode):
                raise Refused(f"version {version} of run {run_id} is open with another manifest; abort it first")
            self.session.expires = now + self.lease
            return self.session
        self._check_writer(run_id, now)
        self._check_version(version, base_version)
        self.session = Session(run_id, version, digest, mode, now + self.lease)
        return self.session

    def _check_writer(self, run_id: str, now: float) -> None:
        other = self.session
        if other is None:
            return
        if self.fenced:
            raise Refused(f"version {other.version} of run {other.run_id} is being applied; wait for its end")
        if other.run_id != run_id and now < other.expires:
            raise Refused(
                f"version {other.version} of run {other.run_id} is open for another {other.expires - now:.0f} s; "
                "abort it or wait"
            )

    def _check_version(self, version: str, base_version: str | None) -> None:
        if base_version is not None and base_version != self.version:
            raise Refused(f"the update builds on version {base_version}, the engine holds {self.version}; send all")
        served = self.version if self.broken is None else None
        if served is not None and served.isascii() and served.isdecimal() and int(version) <= int(served):
            raise Refused(f"version {version} is not newer than {served}, which is served; count upwards")

    def receive(self, key: Key, index: int, checksum: str, last: bool, now: float) -> bool:
        """A bucket of a staged update has arrived intact, in any order.

        Returns:
            False if it had arrived before.

        Raises:
            Refused: it contradicts what has arrived.
        """
        session = self.opened(key, "staged")
        self.expects(key, index, checksum, last)
        session.expires = now + self.lease
        if index in session.received:
            return False
        session.received[index] = checksum
        if last:
            session.last = index
        return True

    def expects(self, key: Key, index: int, checksum: str, last: bool) -> None:
        """Raise ``Refused`` for a bucket that an open update cannot take."""
        session = self.opened(key)
        if index < 0:
            raise Refused(f"bucket index {index} is negative")
        if (before := session.received.get(index)) is not None:
            if before != checksum or last != (session.last == index):
                raise Refused(f"bucket {index} has arrived before with other bytes; abort the update")
            return
        if self.fenced and session.mode == "staged":
            raise Refused(f"bucket {index} arrived while the update is being applied")
        beyond = session.last is not None and (last or index > session.last)
        if session.prepared or beyond or (last and any(i > index for i in session.received)):
            raise Refused(f"bucket {index} arrived behind the last one; abort the update")
        if session.mode == "stream" and index != session.applied:
            raise Refused(f"bucket {index} arrived where {session.applied} was due")

    def prepare(self, key: Key, now: float) -> None:
        """All of a staged update is there (else ``Refused``); the caller has checked what its buckets hold."""
        session = self.opened(key, "staged")
        if not session.complete:
            raise Refused(f"buckets {session.missing()[:8]} of version {session.version} are missing; send them")
        session.prepared, session.expires = True, now + self.lease

    def forget(self, key: Key, index: int) -> None:
        """A bucket of a staged update was lost or damaged after it had arrived; it has to be sent again."""
        session = self.opened(key, "staged")
        if self.fenced:
            raise Refused(f"version {session.version} is being applied; wait for its end")
        session.received.pop(index, None)
        session.prepared = False
        if session.last == index:
            session.last = None

    def fence(self, key: Key, now: float) -> None:
        """Admit nothing from now on, so that the engine runs empty; ``Refused`` if a staged update is not prepared."""
        session = self.opened(key)
        if self.fenced:
            raise Refused(f"version {session.version} is being applied already")
        if session.mode == "staged" and not session.prepared:
            raise Refused(f"version {session.version} is not prepared; prepare it before the commit")
        self.fenced, session.fenced_at, session.expires = True, now, now + self.lease

    def touch(self, key: Key, now: float) -> None:
        """The engine is empty, and its weights are written to from now on; what an earlier attempt wrote is void."""
        session = self._fenced(key)
        if session.mode == "stream" and session.touched:
            raise Refused(f"version {session.version} is being applied already")
        session.touched, session.applied, session.expires = True, 0, now + self.lease
        self.version = None

    def apply(self, key: Key, index: int, checksum: str, last: bool, now: float) -> None:
        """The engine has taken a bucket, in order.

        Raises:
            Refused: it is not the one that was due, or not what was received.
        """
        session = self._fenced(key)
        if not session.touched or index != session.applied:
            raise Refused(f"bucket {index} was applied where {session.applied} was due")
        if session.mode == "staged" and session.received.get(index) != checksum:
            raise Refused(f"bucket {index} was applied with other bytes than received")
        if session.mode == "stream":
            self.expects(key, index, checksum, last)
            session.received[index] = checksum
            session.last = index if last else None
        session.applied, session.expires = index + 1, now + self.lease

    def finish(self, key: Key) -> Session:
        """The engine has verified what it holds and dropped the cache of the old weights: serve the new version.

        Returns the update, which has ended; raises ``Refused`` if something was not applied.
        """
        session = self._fenced(key)
        if not session.touched or session.last is None or session.applied != session.last + 1:
            raise Refused(f"version {session.version} was not applied completely")
        self.version, self.committed = session.version, key
        self.session, self.fenced, self.broken = None, False, None
        return session

    def fail(self, key: Key, reason: str) -> None:
        """The application has ended without success.

        An engine that no byte has reached serves its old version again. Otherwise it is BROKEN; a staged update stays
        open, because applying all of it again repairs the engine.
        """
        session = self._fenced(key)
        self.fenced = False
        # What was verified may have been damaged since.
        session.prepared = False
        if session.touched:
            self.broken = reason
        if session.mode == "stream":
            self.session = None

    def abort(self, key: Key, reason: str = "the update was aborted") -> bool:
        """Drop an update; one that is not open needs nothing. Returns whether there was something to drop.

        Raises:
            Refused: it is staged and being applied, or the engine serves it.
        """
        session = self.session
        if session is None or session.key != key:
            if self.serves(key):
                raise Refused(f"version {key[1]} of run {key[0]} has been committed")
            return False
        if self.fenced:
            if session.mode == "staged":
                raise Refused(f"version {session.version} is being applied; wait for its end")
            self.fail(key, reason)
        self.session = None
        return True

    def expire(self, now: float) -> bool:
        """Drop the open update if its writer has given no sign of life; True if that happened."""
        session = self.session
        if session is None or now < session.expires or (self.fenced and session.mode == "staged"):
            return False
        return self.abort(session.key, f"the writer of version {session.version} stopped sending")

    def tear(self, reason: str) -> None:
        """The engine is closed, and what it holds is unknown."""
        self.broken, self.version = reason, None

    def observe(self, version: str) -> None:
        """The engine has been given another version by other means."""
        if self.session is None and self.broken is None:
            self.version = version

    def opened(self, key: Key, mode: Mode | None = None) -> Session:
        """The open update, if it is the one of ``key``; otherwise raises ``Refused``."""
        if self.session is None or self.session.key != key:
            raise Refused(f"version {key[1]} of run {key[0]} is not open; open it again", unknown=True)
        if mode not in (None, self.session.mode):
            raise Refused(f"version {key[1]} of run {key[0]} is {self.session.mode}, this step is for {mode} updates")
        return self.session

    def _fenced(self, key: Key) -> Session:
        session = self.opened(key)
        if not self.fenced:
            raise Refused(f"version {session.version} is not being applied; commit it")
        return session
