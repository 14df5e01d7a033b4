"""A receiver process beside the real engine: staged while the engine serves, and a trainer or receiver that dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.integration.conftest import Server
from tests.integration.refresh import BUCKET, Sync, holds
from tests.support import ROOT, child_environment
from tests.unit.engines import free_port
from weight_sync.messages import EngineFailed
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.collective import Channel, CollectiveTransport

SECONDS = 8.0
"""Patience of trainer and receiver with each other."""


class Beside:
    """A receiver beside the engine, and the trainers that it serves one after the other."""

    def __init__(self, server: Server) -> None:
        self.port = free_port()
        arguments = ["--engine", server.url, "--meet", f"127.0.0.1:{self.port}", "--rank", "1", "--size", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weight_sync.receiver", *arguments, "--backend", "gloo", "--timeout", str(SECONDS)],
            env=child_environment(OMP_NUM_THREADS="1"),
            cwd=ROOT,
        )

    def publisher(self, sync: Sync, at_bucket: dict[int, Callable[[], object]] | None = None) -> WeightPublisher:
        """A trainer's; ``at_bucket``: what happens before a bucket's header, or (negative) between it and its bytes."""
        given = at_bucket or {}

        class Interrupted(CollectiveTransport):
            def send(self, bucket, spec, engines):
                given.get(bucket.index, lambda: None)()
                if (spoil := given.get(-bucket.index)) is not None:
                    self.channel.broadcast = lambda data: spoil()
                return super().send(bucket, spec, engines)

        transport = Interrupted(Channel("127.0.0.1", self.port, 0, 2, timeout=SECONDS))
        return WeightPublisher(sync.layout, transport, transport.engines(), BUCKET)


@pytest.fixture
def beside(server) -> Iterator[Beside]:
    running = Beside(server)
    yield running
    running.process.kill()
    running.process.wait()


def test_the_engine_serves_until_its_receiver_has_everything(server, tiny, mask_likely, sync, beside):
    sync.publish(tiny, "500")
    asked = []
    publisher = beside.publisher(sync, {3: lambda: asked.append(holds(server, tiny, "500"))})
    report = publisher.publish(mask_likely.model.state_dict(), "501")
    assert len(asked) == 1 and report.buckets > 4 and report.checksum == sync.control.checksum()
    holds(server, mask_likely, "501")

    def dies() -> None:
        """A trainer that is killed when the header of a bucket is out and its bytes are not."""
        beside.publisher(sync, {-2: lambda: os.kill(os.getpid(), signal.SIGKILL)}).publish(
            tiny.model.state_dict(), "502"
        )

    # The store that listens for receivers goes with the last reference to it.
    del publisher
    gc.collect()
    trainer = multiprocessing.get_context("fork").Process(target=dies)
    trainer.start()
    trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    holds(server, mask_likely, "501")

    # The next trainer at the same address; this time the receiver dies, after everything was sent.
    publisher = beside.publisher(sync)
    [engine] = publisher.engines
    commit = engine.commit

    def without_receiver(*arguments: str) -> None:
        beside.process.kill()
        engine.channel.timeout = 0.5
        commit(*arguments)

    engine.commit = without_receiver  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="version 503 failed at commit: receiver 1 does not answer") as failure:
        publisher.publish(tiny.model.state_dict(), "503")
    assert failure.value.lost == ("receiver 1",)
    holds(server, mask_likely, "501")
    assert not sync.closed()
