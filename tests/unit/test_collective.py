"""Weights over a process group to receivers in processes of their own: all ranks, both ways, trainers that die."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.support import free_port, small_model
from tests.unit.receiver import LocalEngine, Receiver
from weight_sync import loader
from weight_sync.buckets import Bucket
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec, Commit, EngineFailed, Manifest, WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.receiver import Receiver as Served
from weight_sync.receiver import Staged, hand_over, main, receive
from weight_sync.transports.collective import Channel, CollectiveTransport, RemoteEngine, meeting_point

LAYOUT = CheckpointLayout(small_model(), torch.float32)
SHAPES = {name: spec.shape for name, spec in LAYOUT.wire.items()}
FORK = multiprocessing.get_context("fork")
BUCKET = 8192


def engine_process(port: int, rank: int, size: int, events) -> None:
    """A receiver beside an engine whose loader runs here; says what the engine holds after every commit."""
    # What earlier tests left: the end of a process group waits for threads that a fork does not have.
    gc.freeze()
    loader.STATE = loader.LoaderState()

    class Told(LocalEngine):
        def resume(self) -> None:
            super().resume()
            seed = int(loader.STATE.label) if loader.STATE.label else -1
            events.put((rank, loader.STATE.label, self.receiver.holds(small_model(seed).state_dict()), self.calls[:2]))

    receive(("127.0.0.1", port), rank, size, Told(Receiver(SHAPES)), timeout=5)


@pytest.fixture
def fleet() -> Iterator:
    """Starts ``count`` receivers; (port, queue of what their engines hold)."""
    processes = []

    def start(count: int):
        port, events = free_port(), FORK.Queue()
        for rank in range(1, count + 1):
            processes.append(FORK.Process(target=engine_process, args=(port, rank, count + 1, events), daemon=True))
            processes[-1].start()
        return port, events

    yield start
    for process in processes:
        process.kill()
        process.join()


def publish(port: int, size: int, seed: int, point_to_point: bool = False, transport=CollectiveTransport):
    channel = Channel("127.0.0.1", port, 0, size, timeout=20)
    sender = transport(channel, point_to_point)
    publisher = WeightPublisher(LAYOUT, sender, sender.engines(), BUCKET)
    return publisher.publish(small_model(seed).state_dict(), str(seed)), publisher


@pytest.mark.parametrize(("count", "point_to_point"), [(1, False), (2, False), (2, True)])
def test_all_receivers_hand_over_what_was_sent(fleet, count, point_to_point):
    port, events = fleet(count)
    report, publisher = publish(port, count + 1, 3, point_to_point)
    assert report.buckets > 5 and report.version == "3"
    told = sorted(events.get(timeout=20) for _ in range(count))
    assert told == [(rank, "3", True, ["pause", "begin"]) for rank in range(1, count + 1)]
    assert not publisher.publish(small_model(4).state_dict(), "4").strayed, "the engine says what it held"
    assert {events.get(timeout=20)[1:3] for _ in range(count)} == {("4", True)}


def test_a_receiver_may_serve_one_update_after_another(monkeypatch):
    """A loop that waits for each: the channel stays, and each call returns when the engine holds its version."""
    monkeypatch.setattr(loader, "STATE", loader.LoaderState())
    port, engine = free_port(), LocalEngine(Receiver(SHAPES))
    trainer = Channel("127.0.0.1", port, 0, 2, timeout=20)
    transport = CollectiveTransport(trainer)
    publisher = WeightPublisher(LAYOUT, transport, transport.engines(), BUCKET)
    channel = Channel("127.0.0.1", port, 1, 2, timeout=20)
    for seed in (1, 2):
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(Served(channel, engine).serve, str(seed))
            publisher.publish(small_model(seed).state_dict(), seed)
            served.result(20)
        assert engine.receiver.holds(small_model(seed).state_dict()) and str(seed) == loader.STATE.label


class Mortal(RemoteEngine):
    """A trainer's view of a receiver; the trainer is killed before one of its calls."""

    def begin(self, manifest):
        self.die("begin")
        super().begin(manifest)

    def commit(self, *arguments):
        self.die("commit")
        super().commit(*arguments)

    def die(self, stage: str) -> None:
        if Dying.stage == stage:
            os.kill(os.getpid(), signal.SIGKILL)


class Dying(CollectiveTransport):
    """A trainer that is killed at ``stage``; in the middle of a bucket, its header is out and its bytes are not."""

    stage = "bucket"

    def engines(self):
        return [Mortal(self.channel, rank) for rank in range(1, self.channel.size)]

    def send(self, bucket, spec, engines):
        if self.stage == "bucket" and bucket.index == 2:
            for engine in engines:
                self.channel.tell(engine.rank, '{"broadcast": true}\n' + spec.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(bucket, spec, engines)


@pytest.mark.parametrize("stage", ["begin", "bucket", "commit"])
def test_a_trainer_that_dies_leaves_the_engine_alone(fleet, monkeypatch, stage):
    """The engine never hears of the unfinished update; the next trainer, at the same address, gets through."""
    monkeypatch.setattr(Dying, "stage", stage)
    port, events = fleet(1)
    trainer = FORK.Process(target=publish, args=(port, 2, 5), kwargs={"transport": Dying})
    trainer.start()
    trainer.join(30)
    assert trainer.exitcode == -signal.SIGKILL
    with pytest.raises(queue.Empty):
        events.get(timeout=0.5)
    publish(port, 2, 6)
    _, version, holds, calls = events.get(timeout=20)
    assert (version, holds) == ("6", True) and calls == ["pause", "begin"], "its first update is the second one sent"


@pytest.mark.parametrize("point_to_point", [False, True])
def test_a_receiver_that_is_lost_among_several(point_to_point):
    """In the middle of a bucket: named where that can be known, no engine is touched, and all meet on a new channel."""
    port, events = free_port(), FORK.Queue()
    start = lambda rank: FORK.Process(target=engine_process, args=(port, rank, 3, events), daemon=True)
    running = {rank: start(rank) for rank in (1, 2)}
    for process in running.values():
        process.start()

    class Losing(CollectiveTransport):
        def send(self, bucket, spec, engines):
            if spec.version == "4" and bucket.index == 2 and running[2].is_alive():
                running[2].kill()
                running[2].join()
            return super().send(bucket, spec, engines)

    try:
        channel = Channel("127.0.0.1", port, 0, 3, timeout=2)
        transport = Losing(channel, point_to_point)
        publisher = WeightPublisher(LAYOUT, transport, transport.engines(), BUCKET)
        publisher.publish(small_model(3).state_dict(), 3)
        assert sorted(events.get(timeout=20)[:3] for _ in range(2)) == [(1, "3", True), (2, "3", True)]
        with pytest.raises(EngineFailed, match="version 4 failed at bucket 2: .*receiver 2: an exchange failed"):
            publisher.publish(small_model(4).state_dict(), 4)
        if point_to_point:
            with pytest.raises(EngineFailed, match="failed at manifest: receiver 2 does not answer; lost: receiver 2"):
                publisher.publish(small_model(5).state_dict(), 5)
            publisher.publish(small_model(6).state_dict(), 6)
            assert events.get(timeout=20)[:3] == (1, "6", True), "the other one goes on"
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
        publisher.close()
        del publisher, transport, channel
        gc.collect()
        running[2] = start(2)
        running[2].start()
        publish(port, 3, 7, point_to_point)
        assert sorted(events.get(timeout=20)[:3] for _ in range(2)) == [(1, "7", True), (2, "7", True)]
    finally:
        for process in running.values():
            process.kill()
            process.join()


def test_a_late_answer_belongs_to_its_message():
    """What an engine says after it was given up is not taken for the answer to something else."""

    class Late:
        timeout, answers = 1.0, [("first", 1), ("second", 2)]

        def sent(self, rank):
            return 2

        def hear(self, rank, timeout=None):
            text, to = self.answers.pop(0)
            return f'{{"ok": true, "message": "{text}", "to": {to}}}'

    assert RemoteEngine(Late(), 1).answer() == "second"


class Flipping(CollectiveTransport):
    flipped = False

    def send(self, bucket, spec, engines):
        if bucket.index == 1 and not self.flipped:
            self.flipped = True
            data = bucket.data.clone()
            data[5] ^= 1
            bucket = Bucket(bucket.index, data, bucket.placements, bucket.last)
        return super().send(bucket, spec, engines)


def test_a_damaged_bucket_is_sent_again(fleet):
    port, events = fleet(1)
    report, _ = publish(port, 2, 7, transport=Flipping)
    assert report.resent == 1 and events.get(timeout=20)[2]


def test_a_bucket_that_one_of_two_receivers_had_damaged(fleet):
    """It is sent to both again; to the other one it is nothing new. Any bucket, the last one too."""
    port, events = fleet(2)
    channel = Channel("127.0.0.1", port, 0, 3, timeout=20)
    transport = CollectiveTransport(channel, point_to_point=True)
    send, sent = channel.send, {1: 0, 2: 0}

    def flipping(data: torch.Tensor, rank: int) -> None:
        sent[rank] += 1
        if rank == 2 and sent[1] in damaged:
            data = data.clone()
            data[5] ^= 1
        send(data, rank)

    channel.send = flipping  # type: ignore[method-assign]
    publisher = WeightPublisher(LAYOUT, transport, transport.engines(), BUCKET)
    damaged = {2}
    report = publisher.publish(small_model(3).state_dict(), 3)
    assert report.resent == 1 and sent == {1: report.buckets + 1, 2: report.buckets + 1}
    assert {events.get(timeout=20)[1:3] for _ in range(2)} == {("3", True)}
    sent |= {1: 0, 2: 0}
    damaged = {1, report.buckets + 1}
    assert publisher.publish(small_model(4).state_dict(), 4).resent == 2
    assert {events.get(timeout=20)[1:3] for _ in range(2)} == {("4", True)}
    sent |= {1: 0, 2: 0}
    damaged = range(1000)
    with pytest.raises(EngineFailed, match="failed at bucket 0: receiver 2: resend: bucket 0 was damaged") as failure:
        publisher.publish(small_model(5).state_dict(), 5)
    assert failure.value.errors.keys() == {"receiver 2"} and not failure.value.lost
    assert not any(status.closed for status in publisher.status().values())


def an_update(monkeypatch) -> tuple[Staged, LocalEngine, str]:
    """All of an update beside an engine that has heard nothing of it, and its checksum."""
    monkeypatch.setattr(loader, "STATE", loader.LoaderState())
    from tests.unit.test_weight_loader import manifest, parts

    staged = Staged(manifest())
    for spec, data in parts():
        last = staged.take(spec, data)
    return staged, LocalEngine(Receiver(SHAPES)), last


@pytest.mark.parametrize("fault", ["damaged", "refused"])
def test_what_is_staged_is_applied_again(monkeypatch, fault):
    """Between receiver and engine: nobody else has the bytes that repair a mixture."""
    staged, engine, last = an_update(monkeypatch)
    once = [2]

    def tamper(engine: LocalEngine, spec: BucketSpec, data: torch.Tensor | None) -> str:
        if spec.index in once:
            once.clear()
            spec = replace(spec, **{"damaged": {"checksum": "xxh3:0"}, "refused": {"run_id": "stranger"}}[fault])
        return engine.deliver(spec, data)

    engine.tamper = tamper
    hand_over(staged, engine, last)
    assert not once and engine.calls.count("begin") == 2 and engine.calls[-2:] == ["commit", "resume"]
    assert engine.receiver.holds(small_model(0).state_dict())


def test_an_engine_that_no_byte_has_reached_is_opened_again(monkeypatch):
    """No room for a bucket, or for the directory of buckets: it serves its old weights."""
    staged, engine, last = an_update(monkeypatch)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "no room")

    twice = ["pause", "begin", "abort", "resume"] * 2
    for place, calls in (("transports.shm.tempfile.mkdtemp", []), ("receiver.SharedMemoryTransport.send", twice)):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
            patch.setattr(f"weight_sync.{place}", full)
            hand_over(staged, engine, last)
        assert engine.calls == calls


def test_an_engine_that_refuses_is_not_opened(monkeypatch):
    """A commit of other weights than were sent: the engine has taken bytes and stays closed."""
    staged, engine, last = an_update(monkeypatch)
    with pytest.raises(WeightSyncError, match=f"holds weights with checksum {last}, not 0000"):
        hand_over(staged, engine, "0" * 16)
    assert "resume" not in engine.calls and engine.calls[-1] == "abort" and engine.calls.count("begin") == 2


def test_what_is_staged_must_be_whole():
    staged = Staged(Manifest("run", "1", LAYOUT.tensors(), LAYOUT.nbytes))
    data = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="resend: bucket 1 arrived where 0 was due"):
        staged.take(BucketSpec("run", "1", 1, False), data)
    with pytest.raises(WeightSyncError, match="resend: bucket 0 was damaged"):
        staged.take(BucketSpec("run", "1", 0, False, checksum="xxh3:0"), data)
    with pytest.raises(WeightSyncError, match="has no open update"):
        staged.take(BucketSpec("other", "1", 0, False), data)
    assert not staged.complete and Commit("run", "1").encode()


def test_a_trainer_that_is_not_there(capfd):
    with pytest.raises(WeightSyncError, match=r"^no trainer at 127.0.0.1:\d+ within 1 s: .*refused$"):
        Channel("127.0.0.1", free_port(), 1, 2, timeout=1)
    assert "frame #" not in "".join(capfd.readouterr()), "torch says where in its C++ code a store was given up"


def test_a_port_that_is_taken():
    taken = meeting_point("127.0.0.1", 0, True, 5)
    with pytest.raises(WeightSyncError, match=rf"^the trainer cannot listen at 127.0.0.1:{taken.port}: .*in use$"):
        Channel("127.0.0.1", taken.port, 0, 2, timeout=1)
    there = Channel("127.0.0.1", taken.port, 0, 2, timeout=1, store=taken)
    assert there.port == taken.port


STUCK = """
import threading
from weight_sync.messages import WeightSyncError
from weight_sync.transports import collective
from weight_sync.transports.collective import Channel
import torch

class Hangs:
    def broadcast(self, data, options):
        threading.Event().wait()

collective.GRACE_SECONDS = 0.1
channel = Channel("127.0.0.1", 0, 0, 2, timeout=0.3)
channel._group = Hangs()
for _ in range(2):
    try:
        channel.broadcast(torch.zeros(1, dtype=torch.uint8))
    except WeightSyncError as error:
        print(error)
"""


def test_a_collective_that_never_returns():
    """As one of NCCL, which cannot be interrupted: it is given up in time, and neither repeated nor waited for."""
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=True)
    late = "an exchange of the refresh took longer than 0.3 s"
    assert done.stdout.splitlines() == [late, f"{late}; make a new Channel"]


@pytest.mark.parametrize(
    "arguments", [["--meet", "nowhere"], ["--meet", "h:99999"], ["--meet", "h:0"], ["--rank", "2"], ["--rank", "0"]]
)
def test_wrong_arguments(arguments, capsys):
    given = {"--engine": "http://x", "--meet": "h:1", "--rank": "1", "--size": "2"}
    given |= dict([arguments])
    assert main([part for pair in given.items() for part in pair]) == 2
    assert "need HOST:PORT and 0 < rank < size" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "why"), [(["--tp-size", "0"], "--tp-size 0"), (["--backend", "nccl"], "a GPU")])
def test_what_a_receiver_cannot_do(arguments, why, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--engine", "http://x", "--meet", "h:1", "--rank", "1", "--size", "2", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_an_engine_that_has_no_address(capsys):
    assert main(["--engine", "localhost:30000", "--meet", "h:1", "--rank", "1", "--size", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: engine address 'localhost:30000' is no URL of a server; write")
