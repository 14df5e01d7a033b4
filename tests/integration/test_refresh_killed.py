"""A real engine that is killed in the middle of a refresh. Runs behind everything else that uses the server."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import pytest

from tests.integration.conftest import OneAtATime, RolloutServer, Server
from tests.integration.refresh import BUCKET, Sync, holds
from tests.support import wait_for
from weight_sync.control import EngineControl
from weight_sync.messages import EngineFailed, WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.shm import SharedMemoryTransport


def kill_scheduler(server: Server) -> None:
    server.scheduler().kill()


def kill_engine(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)


def kill_within(server: Server) -> None:
    """The scheduler dies with the next message in its hands."""
    scheduler = server.scheduler()
    os.kill(scheduler.pid, signal.SIGSTOP)
    threading.Timer(0.5, scheduler.kill).start()


class Doomed(EngineControl):
    """An engine to which something happens before a call of the publisher; buckets are counted."""

    def __init__(self, server: Server, stage: str, kill) -> None:
        super().__init__(server.url, timeout=30)
        self.server, self.stage, self.kill = server, stage, kill

    def at(self, stage: str) -> None:
        if stage == self.stage:
            self.kill(self.server)

    def begin(self, manifest):
        self.at("manifest")
        super().begin(manifest)

    def send_bucket(self, spec, data=None):
        self.at(f"bucket {spec.index}")
        return super().send_bucket(spec, data)

    def commit(self, *arguments):
        self.at("commit")
        super().commit(*arguments)

    def resume(self):
        self.at("resume")
        super().resume()


def fails(server: Server, tiny, mask_likely, stage: str, kill) -> WeightPublisher:
    """Publish to an engine that dies at a stage; the error names both, and the engine is out of the fleet."""
    layout = Sync(server, tiny).layout
    publisher = WeightPublisher(layout, SharedMemoryTransport(), [Doomed(server, stage, kill)], BUCKET)
    with pytest.raises(
        EngineFailed, match=f"version 601 failed at {stage}: engine {server.url} did not answer"
    ) as failure:
        publisher.publish(mask_likely.model.state_dict(), "601")
    assert failure.value.lost == (server.url,) and not failure.value.committed
    assert publisher.status()[server.url].lost and not publisher.engines
    with pytest.raises(WeightSyncError, match="no engine is left"):
        publisher.publish(mask_likely.model.state_dict(), "602")
    wait_for(lambda: server.process.poll() is not None, 60, "the end of the server")
    return publisher


STAGES = [
    ("bucket 2", kill_within),
    ("manifest", kill_engine),
    ("bucket 0", kill_scheduler),
    ("commit", kill_scheduler),
    ("resume", kill_engine),
]


@pytest.mark.parametrize(
    "deaths",
    [STAGES, pytest.param([("bucket 3", kill_engine), ("commit", kill_within)], marks=pytest.mark.slow)],
    ids=["stages", "more stages"],
)
def test_a_killed_engine_is_no_success_and_rejoins(server, heavy: OneAtATime, tiny, mask_likely, tmp_path, deaths):
    """Not only the HTTP process counts: without its scheduler the server ends, and the publisher hears no success.

    Restarted, it has the weights of its checkpoint, and the current ones after ``rejoin``. It is the next one to die.
    """
    engine = server
    try:
        for number, (stage, kill) in enumerate(deaths):
            publisher = fails(engine, tiny, mask_likely, stage, kill)
            heavy.close()
            directory = tmp_path / str(number)
            directory.mkdir()
            engine = heavy.use(f"restarted {number}", partial(RolloutServer, tiny, directory))
            holds(engine, tiny, "default")
            report = publisher.rejoin(EngineControl(engine.url), mask_likely.model.state_dict(), "601")
            assert report is not None and report.checksum == EngineControl(engine.url).checksum()
            holds(engine, mask_likely, "601")
            publisher.publish(tiny.model.state_dict(), "602")
            holds(engine, tiny, "602")
            publisher.close()
    finally:
        heavy.close()
