"""The real engine with two tensor-parallel ranks (gloo): refreshed by sessions and by its own endpoint.

SGLang's CPU engine binds the ranks to cores itself: SGLANG_CPU_OMP_THREADS_BIND names them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dllm.models.checkpoint import load_model
from tests.integration.conftest import OneAtATime, RolloutServer, Server
from tests.integration.oracle import TinyModel, make
from tests.integration.refresh import BUCKET, Sync, holds
from tests.support import wait_for
from weight_sync.checksum import TensorSums
from weight_sync.client import ServiceControl, StreamControl
from weight_sync.control import EngineControl, serialise
from weight_sync.layout import LayoutError
from weight_sync.messages import BucketSpec, EngineFailed, Message
from weight_sync.publisher import WeightPublisher
from weight_sync.push import push
from weight_sync.transports.http import HttpTransport
from weight_sync.transports.shm import SharedMemoryTransport

EVEN = {"heads": 4, "kv_heads": 2, "expert_intermediate": 64}
"""Sizes that divide: SGLang's CPU engine pads heads and experts of others, and such an engine refuses the manifest."""


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory) -> tuple[TinyModel, TinyModel]:
    return tuple(make(tmp_path_factory.mktemp("two_heads"), seed, **EVEN) for seed in (4, 5))  # type: ignore[return-value]


@pytest.fixture
def tiny(two_heads) -> TinyModel:
    return two_heads[0]


@pytest.fixture
def other(two_heads) -> TinyModel:
    return two_heads[1]


@pytest.fixture
def pair(heavy: OneAtATime, tiny: TinyModel, tmp_path_factory, monkeypatch) -> Server:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    return heavy.use("pair", lambda: RolloutServer(tiny, tmp_path_factory.mktemp("pair"), **{"tp-size": 2}))


def test_sessions(pair, tiny, other):
    """By request bodies, from a directory, and streamed; the checksum is that of the checkpoint, whatever the ranks."""
    holds(pair, tiny, "default")
    sums = TensorSums()
    for name, tensor in load_model(other.path).state_dict().items():
        sums.add(name, tensor)
    assert push(ServiceControl(pair.url), other.path, 1, BUCKET).checksum == f"{sums.value():016x}"
    holds(pair, other, "1")
    push(ServiceControl(pair.url), tiny.path, 2, BUCKET, shared=True)
    holds(pair, tiny, "2")
    layout = Sync(pair, tiny).layout
    for version, model, transport, control in (
        (3, other, HttpTransport(), ServiceControl),
        (4, tiny, SharedMemoryTransport(), StreamControl),
        (5, other, SharedMemoryTransport(), StreamControl),
    ):
        publisher = WeightPublisher(layout, transport, [control(pair.url)], BUCKET)
        assert publisher.publish(model.model.state_dict(), version).buckets > 3
        publisher.close()
        holds(pair, model, str(version))


class Unequal(EngineControl):
    """Damages one message on its way to one rank, once or always."""

    at: int | None = None
    rank, lasting = 1, False

    def message(
        self, header: Message, tensors: Sequence[Tensor] = (), version: str | None = None, timeout: float | None = None
    ) -> str:
        if not isinstance(header, BucketSpec) or header.index != self.at:
            return super().message(header, tensors, version, timeout)
        self.at = self.at if self.lasting else None
        sent, self.deliver = self.deliver, self.unequal  # type: ignore[method-assign]
        try:
            return super().message(header, tensors, version, timeout)
        finally:
            self.deliver = sent  # type: ignore[method-assign]

    def unequal(self, payload: Sequence[str], version: str | None = None, timeout: float | None = None) -> str:
        spec = BucketSpec("stranger", "1", 0, False) if self.wrong == "stranger" else BucketSpec(*self.key, 99, False)
        wrong = serialise(spec.encode(), [torch.empty(0, dtype=torch.uint8)])
        unequal = list(payload)
        unequal[self.rank] = "AAAA" if self.wrong == "unreadable" else wrong
        return super().deliver(unequal, version, timeout)

    wrong, key = "another", ("", "")

    def begin(self, manifest):
        self.key = (manifest.run_id, manifest.version)
        super().begin(manifest)


def test_one_rank_that_fails(pair, tiny, other):
    """What rank 1 refuses is no success of rank 0: sent again where that helps, and closed where it does not."""
    control = Unequal(pair.url, tp_size=2)
    publisher = WeightPublisher(Sync(pair, tiny).layout, SharedMemoryTransport(), [control], BUCKET)
    control.at = 2
    assert publisher.publish(tiny.model.state_dict(), "20").resent == 1
    holds(pair, tiny, "20")
    control.at, control.wrong = 2, "unreadable"
    assert publisher.publish(other.model.state_dict(), "21").resent == 1
    holds(pair, other, "21")
    control.at, control.wrong = 2, "stranger"
    with pytest.raises(EngineFailed, match="bucket 2: .*rank 1: bucket 0 of version 1 has no open update"):
        publisher.publish(tiny.model.state_dict(), "22")
    assert publisher.status()[pair.url].closed
    publisher.publish(tiny.model.state_dict(), "23")
    holds(pair, tiny, "23")
    publisher.close()


def test_a_mixture_of_rank_1_alone(pair, tiny, other):
    """Rank 0 has used nothing; the engine is a mixture all the same, and no other trainer opens it half-way."""
    sync = Sync(pair, tiny)
    sync.control.tp_size = 2
    sync.publish(tiny, "24")
    control = Unequal(pair.url, tp_size=2)
    publisher = WeightPublisher(sync.layout, sync.publisher.transport, [control], BUCKET)
    control.at, control.rank, control.lasting, control.wrong = 0, 0, True, "unreadable"
    with pytest.raises(EngineFailed, match="failed at bucket 0: .*resend: rank 0: the message cannot be read"):
        publisher.publish(other.model.state_dict(), "25")
    with pytest.raises(LayoutError):
        sync.publisher.publish(iter([("nobody.knows", torch.zeros(1))]), "26")
    assert sync.publisher.status()[pair.url].closed and sync.closed()
    sync.publish(tiny, "27")
    holds(pair, tiny, "27")


def test_a_killed_rank(pair, heavy, tiny):
    """Rank 1 alone is gone: no success, and the server ends."""

    class Killing(StreamControl):
        def send_bucket(self, spec, data=None):
            if spec.index == 1:
                _, rank = pair.schedulers()
                rank.kill()
            return super().send_bucket(spec, data)

    transport = SharedMemoryTransport()
    publisher = WeightPublisher(Sync(pair, tiny).layout, transport, [Killing(pair.url, timeout=30)], BUCKET)
    try:
        with pytest.raises(EngineFailed, match="version 30 failed at bucket 1"):
            publisher.publish(tiny.model.state_dict(), 30)
        wait_for(lambda: pair.process.poll() is not None, 60, "the end of the server")
        publisher.close()
    finally:
        heavy.close()
