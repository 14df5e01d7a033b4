"""The state machine of weight updates against a model that is nothing but an engine's memory.

The model holds the bytes of every slot of an engine, the buckets that lie in its staging area and a log of what it was
told. Whatever order the steps come in, what the machine says about the engine has to be true of those bytes.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weight_sync.session import Machine, Refused, State

SLOTS = 3
LEASE = 10.0
RUNS = ("a", "b")

runs, slots = st.sampled_from(RUNS), st.integers(0, SLOTS - 1)
modes = st.sampled_from(["staged", "staged", "stream"])
strays = st.integers(0, 9).map(lambda n: n == 0)
"""A step that belongs to another update than the open one."""


def content(run: str, version: str) -> str:
    """Checksum and bytes of a bucket, in one."""
    return f"{run}:{version}"


class Updates(RuleBasedStateMachine):
    """Two runs update one engine in any order of steps, many of them wrong; they crash, go on, and start again."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine("0", lease=LEASE)
        self.engine = [content("start", "0")] * SLOTS
        self.holder = content("start", "0")
        self.now = 0.0
        self.staging: dict[tuple[str, str], dict[int, str]] = {}
        self.success: list[tuple[str, str]] = []

    def key(self, stray: bool) -> tuple[str, str]:
        """Of the open update, or of one that is long over or never was."""
        if stray or self.machine.session is None:
            return self.success[-1] if self.success else ("b", "7")
        return self.machine.session.key

    def attempt(self, step, *arguments):
        """Take a step; a refused one must change nothing."""
        before = repr(self.machine)
        try:
            return True, step(*arguments)
        except Refused:
            assert repr(self.machine) == before
            return False, None

    @rule(run=runs, ahead=st.integers(-1, 3), mode=modes, base=st.sampled_from([None, None, "0", "1"]))
    def open(self, run, ahead, mode, base):
        m = self.machine
        key = (run, str(max(0, int(self.success[-1][1] if self.success else "0") + ahead)))
        other, held = m.session, m.version
        alive = other is not None and self.now < other.expires
        ok, session = self.attempt(m.open, key, "digest", self.now, mode, base)
        if ok and session is None:
            assert self.engine == [content(*key)] * SLOTS and m.admits and m.version == key[1]
        elif ok and session is not other:
            assert not (alive and other.run_id != run), "a living writer is not displaced"
            assert base in (None, held)
            assert m.state is State.BROKEN or int(key[1]) > int(held)
            self.staging[key] = {}

    @rule(stray=strays, index=slots, last=strays, damaged=strays)
    def receive(self, stray, index, last, damaged):
        key, last = self.key(stray), last or index == SLOTS - 1
        held = self.staging.get(key, {})
        checksum = content(*key) + ("!" if damaged and index in held else "")
        ok, new = self.attempt(self.machine.receive, key, index, checksum, last, self.now)
        if ok:
            assert new is (index not in held)
            assert not checksum.endswith("!"), "other bytes under the same index are refused"
            held[index] = checksum

    @rule(run=runs, mode=modes, steps=st.integers(1, 12))
    def go_on(self, run, mode, steps):
        """A writer that does nothing wrong for a number of steps."""
        for _ in range(steps):
            session, m = self.machine.session, self.machine
            if session is None:
                self.open(run, 1, mode, None)
            elif not m.fenced and session.mode == "staged" and not session.prepared:
                missing = [i for i in session.missing() if i < SLOTS]
                if missing:
                    self.receive(False, missing[0], False, False)
                else:
                    self.prepare(False)
            elif not m.fenced:
                self.fence(False)
            elif not session.touched:
                self.touch(False)
            elif session.applied < SLOTS and session.applied - 1 != session.last:
                self.apply(False, session.applied, False)
            else:
                self.finish(False)

    @rule(stray=strays)
    def prepare(self, stray):
        key = self.key(stray)
        ok, _ = self.attempt(self.machine.prepare, key, self.now)
        if ok:
            held = self.staging[key]
            assert held and sorted(held) == list(range(len(held))) and self.machine.session.last == len(held) - 1

    @rule(stray=strays, index=slots)
    def forget(self, stray, index):
        key = self.key(stray)
        ok, _ = self.attempt(self.machine.forget, key, index)
        if ok:
            self.staging[key].pop(index, None)

    @rule(stray=strays)
    def fence(self, stray):
        ok, _ = self.attempt(self.machine.fence, self.key(stray), self.now)
        if ok:
            session = self.machine.session
            assert session.mode == "stream" or session.prepared

    @rule(stray=strays)
    def touch(self, stray):
        self.attempt(self.machine.touch, self.key(stray), self.now)

    @rule(stray=strays, index=slots, last=strays)
    def apply(self, stray, index, last):
        """What has been written to the engine is written, whatever the machine says to it; it is told before."""
        key, m = self.key(stray), self.machine
        written = m.fenced and m.session.touched and m.session.key == key
        if written:
            self.engine[index] = content(*key)
        ok, _ = self.attempt(m.apply, key, index, content(*key), last or index == SLOTS - 1, self.now)
        assert not ok or written

    @rule(stray=strays)
    def finish(self, stray):
        m, key = self.machine, self.key(stray)
        # That the buckets hold every tensor is checked when they arrive: here, that the last one is the last slot.
        if m.session is None or m.session.last in (None, SLOTS - 1):
            ok, _ = self.attempt(m.finish, key)
            if ok:
                assert self.engine == [content(*key)] * SLOTS, "success with something missing"
                self.holder = content(*key)
                self.success.append(key)

    @rule(stray=strays)
    def fail(self, stray):
        self.attempt(self.machine.fail, self.key(stray), "the engine refused")

    @rule(stray=strays)
    def abort(self, stray):
        key = self.key(stray)
        ok, _ = self.attempt(self.machine.abort, key)
        if ok:
            assert self.machine.session is None or self.machine.session.key != key
            assert self.attempt(self.machine.abort, key) == (True, False), "a second abort is a no-op"

    @rule(seconds=st.sampled_from([1.0, 1.0, LEASE]))
    def time_passes(self, seconds):
        self.now += seconds
        session = self.machine.session
        over = session is not None and self.now >= session.expires
        assert not self.machine.expire(self.now) or over

    @rule(run=runs)
    def full_refresh(self, run):
        """From every state, a patient writer gets a complete update through."""
        m = self.machine
        if m.session is not None and m.fenced:
            m.fail(m.session.key, "its end was waited for")
        if m.session is not None:
            m.abort(m.session.key)
        key = (run, str(int(self.success[-1][1] if self.success else "0") + 1))
        self.staging[key] = {}
        assert m.open(key, "digest", self.now).missing() == [0]
        for index in reversed(range(SLOTS)):
            assert m.receive(key, index, content(*key), index == SLOTS - 1, self.now)
        assert m.session.missing() == []
        m.prepare(key, self.now)
        m.fence(key, self.now)
        m.touch(key, self.now)
        for index in range(SLOTS):
            self.apply(False, index, False)
        self.finish(False)
        assert m.state is State.SERVING and m.version == key[1] and self.success[-1] == key

    @invariant()
    def what_is_served_is_one_version(self):
        if self.machine.admits:
            assert self.engine == [self.holder] * SLOTS, "a mixture is served"
            assert self.machine.version == self.holder.partition(":")[2]
        else:
            assert self.machine.state in (State.FENCED, State.BROKEN)

    @invariant()
    def a_mixture_has_no_version(self):
        if len(set(self.engine)) > 1:
            assert self.machine.version is None and not self.machine.admits

    @invariant()
    def only_success_changes_the_version(self):
        last = self.success[-1][1] if self.success else "0"
        assert self.machine.version in (None, last)
        assert self.machine.committed == (self.success[-1] if self.success else None)


TestUpdates = Updates.TestCase
TestUpdates.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def through(machine: Machine, key: tuple[str, str], upto: str = "finish") -> None:
    """Take a staged update of two buckets as far as the step ``upto``."""
    steps = {
        "open": lambda: machine.open(key, "d", 0),
        "first": lambda: machine.receive(key, 0, "x0", False, 0),
        "second": lambda: machine.receive(key, 1, "x1", True, 0),
        "prepare": lambda: machine.prepare(key, 0),
        "fence": lambda: machine.fence(key, 0),
        "touch": lambda: machine.touch(key, 0),
        "half": lambda: machine.apply(key, 0, "x0", False, 0),
        "all": lambda: machine.apply(key, 1, "x1", True, 0),
        "finish": lambda: machine.finish(key),
    }
    for name, step in steps.items():
        step()
        if name == upto:
            return


def test_a_resend_asks_only_for_what_is_missing():
    machine = Machine("default")
    session = machine.open(("run", "1"), "d", 0)
    assert session.missing() == [0]
    machine.receive(session.key, 2, "x2", True, 0)
    assert machine.open(session.key, "d", 5) is session
    assert session.missing() == [0, 1]
    machine.receive(session.key, 0, "x0", False, 0)
    with pytest.raises(Refused, match=r"buckets \[1\] of version 1 are missing; send them"):
        machine.prepare(session.key, 0)


@pytest.mark.parametrize("upto", ["open", "first", "second", "prepare"])
def test_before_the_fence_the_old_version_is_served(upto):
    machine = Machine("3")
    through(machine, ("run", "4"), upto)
    assert (machine.state, machine.version, machine.admits) == (State.PREPARING, "3", True)
    assert machine.expire(60.0)
    assert (machine.state, machine.version) == (State.SERVING, "3")


def test_a_fence_without_a_byte_goes_back():
    machine = Machine("3")
    through(machine, ("run", "4"), "fence")
    assert machine.state is State.FENCED
    machine.fail(("run", "4"), "requests did not end in time")
    assert (machine.state, machine.version, machine.admits) == (State.PREPARING, "3", True)
    machine.prepare(("run", "4"), 0)
    machine.fence(("run", "4"), 0)


@pytest.mark.parametrize("upto", ["touch", "half", "all"])
def test_broken_until_all_of_an_update_is_applied(upto):
    machine = Machine("3")
    through(machine, ("run", "4"), upto)
    machine.fail(("run", "4"), "the engine died")
    assert (machine.state, machine.version, machine.broken) == (State.BROKEN, None, "the engine died")
    machine.abort(("run", "4"))
    assert machine.state is State.BROKEN, "dropping the update does not bring the old weights back"
    through(machine, ("other", "3"), "prepare")
    assert machine.state is State.BROKEN and not machine.admits
    machine.abort(("other", "3"))
    through(machine, ("other", "3"))
    assert (machine.state, machine.version) == (State.SERVING, "3"), "an older version may repair the engine"


def test_a_staged_update_is_applied_again_after_a_failure():
    machine = Machine("3")
    through(machine, ("run", "4"), "half")
    machine.fail(("run", "4"), "refused")
    with pytest.raises(Refused, match="version 4 is not prepared"):
        machine.fence(("run", "4"), 0)
    for step in (machine.prepare, machine.fence, machine.touch):
        step(("run", "4"), 0)
    with pytest.raises(Refused, match="bucket 1 was applied where 0 was due"):
        machine.apply(("run", "4"), 1, "x1", True, 0)
    for index in (0, 1):
        machine.apply(("run", "4"), index, f"x{index}", index == 1, 0)
    machine.finish(("run", "4"))
    assert (machine.state, machine.version) == (State.SERVING, "4")


def test_two_writers():
    machine = Machine("3", lease=60)
    through(machine, ("first", "4"), "first")
    with pytest.raises(Refused, match="version 4 of run first is open for another 59 s; abort it or wait"):
        machine.open(("second", "4"), "d", 1)
    with pytest.raises(Refused, match="version 9 of run second is not open; open it again") as refusal:
        machine.receive(("second", "9"), 0, "x", False, 1)
    assert refusal.value.unknown
    assert machine.open(("second", "4"), "d", 61).key == ("second", "4")


def test_a_stream_whose_writer_dies():
    """Before the first byte the old version comes back; after it, the engine is broken."""
    machine, key = Machine("3", lease=60), ("run", "4")
    machine.open(key, "d", 0, "stream")
    machine.fence(key, 0)
    assert machine.expire(60) and (machine.state, machine.version) == (State.SERVING, "3")
    machine.open(key, "d", 61, "stream")
    machine.fence(key, 61)
    machine.touch(key, 61)
    machine.apply(key, 0, "x0", False, 62)
    assert not machine.expire(121)
    assert machine.expire(122)
    assert machine.broken == "the writer of version 4 stopped sending"


@pytest.mark.parametrize(
    ("version", "base", "message"),
    [
        ("3", None, "version 3 is not newer than 3, which is served; count upwards"),
        ("2", None, "version 2 is not newer than 3"),
        ("v4", None, "version 'v4' is not a number; count updates from 0 upwards"),
        ("-1", None, "version '-1' is not a number"),
        ("5", "2", "the update builds on version 2, the engine holds 3; send all"),
    ],
)
def test_refused_versions(version, base, message):
    with pytest.raises(Refused, match=message):
        Machine("3").open(("run", version), "d", 0, base_version=base)


def test_a_repeated_commit_is_a_no_op():
    machine = Machine("default")
    through(machine, ("run", "0"))
    assert machine.open(("run", "0"), "d", 9) is None
    with pytest.raises(Refused, match="version 0 of run run has been committed"):
        machine.abort(("run", "0"))
    with pytest.raises(Refused, match="version 0 is not newer than 0"):
        machine.open(("other", "0"), "d", 9)
