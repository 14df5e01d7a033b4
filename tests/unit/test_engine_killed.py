"""An engine that is killed in the middle of a refresh, as the publisher sees it, and what becomes of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import small_model
from tests.unit.engines import LAYOUT, Process
from weight_sync.client import ServiceControl, StreamControl
from weight_sync.messages import EngineFailed, WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.http import HttpTransport
from weight_sync.transports.shm import SharedMemoryTransport

BUCKET = 64 << 10
WEIGHTS = {seed: small_model(seed).state_dict() for seed in range(4)}


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


def fleet(kind: type[ServiceControl], *running: Process) -> WeightPublisher:
    transport: Any = SharedMemoryTransport() if kind is StreamControl else HttpTransport()
    return WeightPublisher(LAYOUT, transport, [kind(p.url, timeout=20, drain_seconds=0) for p in running], BUCKET)


def serves(process: Process, seed: int) -> bool:
    """Whether requests are answered with the weights of ``seed``, which are its version too."""
    answer = process.generate(seed)
    return answer.status_code == 200 and answer.json()["holds"] and answer.json()["version"] == str(seed)


SESSION = r"/weights/v1/sessions"
CASES = [
    # Where the server dies, and the stage that the publisher names.
    (ServiceControl, rf"POST {SESSION}", "manifest"),
    (ServiceControl, rf"answer to POST {SESSION}", "manifest"),
    (ServiceControl, r"PUT .*/buckets/0", "bucket 0"),
    (ServiceControl, r"body of PUT .*/buckets/1", "bucket 1"),
    (ServiceControl, r"answer to PUT .*/buckets/2", "bucket 2"),
    (ServiceControl, r"POST .*/prepare", "bucket 3"),
    (ServiceControl, r"answer to POST .*/prepare", "bucket 3"),
    (ServiceControl, r"POST .*/commit", "commit"),
    (ServiceControl, "pause", "commit"),
    (ServiceControl, "begin", "commit"),
    (ServiceControl, "bucket 2", "commit"),
    (ServiceControl, "commit", "commit"),
    (ServiceControl, "resume", "commit"),
    (ServiceControl, r"answer to POST .*/commit", "commit"),
    (StreamControl, rf"POST {SESSION}", "manifest"),
    (StreamControl, "pause", "manifest"),
    (StreamControl, "begin", "manifest"),
    (StreamControl, "bucket 0", "bucket 0"),
    (StreamControl, r"body of POST .*/messages", "bucket 0"),
    (StreamControl, "bucket 2", "bucket 2"),
    (StreamControl, "bucket 3", "bucket 3"),
    (StreamControl, r"POST .*/commit", "commit"),
    (StreamControl, "commit", "commit"),
    (StreamControl, "resume", "commit"),
]


@pytest.mark.parametrize(("kind", "death", "stage"), CASES)
def test_killed_at_every_stage(processes, kind, death, stage):
    """The error names engine and stage; the survivor is on one version, takes the next one alone, and the engine comes
    back to the current version by ``rejoin``."""
    survivor, mortal = Process(), Process(death)
    processes += [survivor, mortal]
    publisher = fleet(kind, survivor, mortal)
    with pytest.raises(EngineFailed, match=mortal.url) as failure:
        publisher.publish(WEIGHTS[1], 1)
    assert mortal.killed()
    error = failure.value
    assert (error.stage, error.lost, [*error.errors]) == (stage, (mortal.url,), [mortal.url])
    assert f"version 1 failed at {stage}" in str(error) and ("prepare" in str(error)) == ("prepare" in death)

    status = publisher.status()
    assert status[mortal.url].lost and not status[survivor.url].lost
    if stage == "commit":
        assert error.committed == (survivor.url,) and status[survivor.url].version == "1" and serves(survivor, 1)
    elif kind is ServiceControl or stage == "manifest":
        assert survivor.state()["state"] == "serving" and survivor.state()["version"] == "0"
        assert survivor.generate(0).json()["untouched"] and not status[survivor.url].closed
    else:
        assert survivor.generate(1).status_code == 503 and status[survivor.url].closed

    second = publisher.publish(WEIGHTS[2], 2)
    assert serves(survivor, 2)
    again = Process(port=mortal.port)
    processes.append(again)
    report = publisher.rejoin(kind(again.url, timeout=20), WEIGHTS[2])
    assert report is not None and (report.version, report.checksum) == ("2", second.checksum) and serves(again, 2)
    publisher.publish(WEIGHTS[3], 3)
    assert serves(survivor, 3) and serves(again, 3)
    assert not any(s.lost or s.closed for s in publisher.status().values()) and len(publisher.engines) == 2
    publisher.close()


def test_other_weights_are_not_the_current_version(processes):
    """A trainer that has gone on since the last publish has no version 1 any more."""
    first, late = Process(), Process()
    processes += [first, late]
    publisher = fleet(ServiceControl, first)
    with pytest.raises(WeightSyncError, match="nothing has been published yet"):
        publisher.rejoin(ServiceControl(late.url), WEIGHTS[2])
    publisher.publish(WEIGHTS[1], 1)
    with pytest.raises(WeightSyncError, match="those that other engines hold as version 1"):
        publisher.rejoin(ServiceControl(late.url), WEIGHTS[2])
    assert late.state()["version"] == "0" and len(publisher.engines) == 1
    publisher.rejoin(ServiceControl(late.url), WEIGHTS[2], version=2)
    assert serves(late, 2) and serves(first, 1)
    publisher.close()
    with pytest.raises(WeightSyncError, match="version 3 cannot be sent: this publisher was closed"):
        publisher.publish(WEIGHTS[1], 3)
    assert serves(first, 1), "it was not stopped for it"


def test_the_last_engine_is_lost(processes):
    mortal = Process("begin")
    processes.append(mortal)
    publisher = fleet(StreamControl, mortal)
    with pytest.raises(EngineFailed, match="manifest"):
        publisher.publish(WEIGHTS[1], 1)
    with pytest.raises(WeightSyncError, match=r"no engine is left; start one and take it in with rejoin\(\)"):
        publisher.publish(WEIGHTS[1], 1)
    processes.append(Process(port=mortal.port))
    publisher.rejoin(StreamControl(mortal.url), WEIGHTS[1], version=1)
    assert serves(processes[-1], 1)
    publisher.close()


@pytest.mark.parametrize("kind", [ServiceControl, StreamControl])
def test_an_engine_that_was_restarted_behind_the_publishers_back(processes, kind):
    """It served the weights of its start until the next publish, which says so and brings it up to date."""
    steady, other = Process(), Process()
    processes += [steady, other]
    publisher = fleet(kind, steady, other)
    assert not publisher.publish(WEIGHTS[1], 1).strayed, "nothing is known of engines that it has not refreshed"
    other.close()
    processes.append(Process(port=other.port))
    report = publisher.publish(WEIGHTS[2], 2)
    assert report.strayed == {other.url: "0"} and report.as_metrics()["weight_sync/strayed"] == 1
    assert serves(steady, 2) and serves(processes[-1], 2)
    assert not publisher.publish(WEIGHTS[3], 3).strayed
    publisher.close()


def test_an_engine_that_hangs(processes):
    """Stopped, not dead: given up after the time-out, and no success when it wakes up."""
    survivor, hanging = Process(), Process()
    processes += [survivor, hanging]
    publisher = fleet(ServiceControl, survivor, hanging)
    impatient: Any = publisher.engines[1]
    impatient.client.timeout, impatient.timeout = httpx.Timeout(0.5), 0.5
    os.kill(hanging.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="did not answer POST /sessions") as failure:
        publisher.publish(WEIGHTS[1], 1)
    os.kill(hanging.process.pid, signal.SIGCONT)
    assert failure.value.lost == (hanging.url,) and time.monotonic() - began < 10
    assert survivor.state()["state"] == "serving"
    publisher.publish(WEIGHTS[2], 2)
    assert serves(survivor, 2) and hanging.state()["version"] == "0"
    publisher.close()


def test_a_cut_connection_is_no_lost_engine(processes):
    """The engine answers again: it stays in the fleet, and the next publish reaches it."""
    engine = Process()
    processes.append(engine)
    publisher = fleet(ServiceControl, engine)
    control: Any = publisher.engines[0]
    call, cuts = control.client.request, []

    def cut(method: str, path: str, **arguments: Any) -> httpx.Response:
        if path.endswith("/buckets/1") and not cuts:
            cuts.append(path)
            header = next(arguments["content"])
            # The connection breaks off in the middle of the bucket.
            arguments["content"] = broken(header)
        return call(method, path, **arguments)

    def broken(header: bytes) -> Iterator[bytes]:
        yield header
        raise httpx.WriteError("connection reset")

    control.client.request = cut
    with pytest.raises(EngineFailed, match="bucket 1") as failure:
        publisher.publish(WEIGHTS[1], 1)
    assert cuts and not failure.value.lost and not publisher.status()[engine.url].lost
    assert engine.state()["state"] == "serving" and engine.generate(0).json()["untouched"]
    publisher.publish(WEIGHTS[1], 1)
    assert serves(engine, 1)
    publisher.close()
