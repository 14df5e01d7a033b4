"""What goes wrong during a refresh of a running engine, and that it is noticed and mended."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from tests.integration.conftest import Request
from tests.integration.oracle import assert_same
from tests.integration.refresh import BUCKET, GREEDY, Faulty, greedy, killed_trainer
from weight_sync.control import EngineControl
from weight_sync.messages import EngineFailed, WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.shm import SharedMemoryTransport


def publisher(sync, fault, index: int) -> WeightPublisher:
    return WeightPublisher(sync.layout, Faulty(fault, index), [sync.control], BUCKET)


def flipped(send, bucket, spec, engines):
    """A bit of the payload, after the checksum was taken; only the first time."""
    if not hasattr(spec, "flipped"):
        spec.flipped = True
        data = bucket.data.clone()
        data[len(data) // 2] ^= 1
        bucket = dataclasses.replace(bucket, data=data)
    return send(bucket, spec, engines)


def short(send, bucket, spec, engines):
    if not hasattr(spec, "shortened"):
        spec.shortened = True
        bucket = dataclasses.replace(bucket, data=bucket.data[:-1])
    return send(bucket, spec, engines)


def twice(send, bucket, spec, engines):
    send(bucket, spec, engines)
    return send(bucket, spec, engines)


def unanswered(send, bucket, spec, engines):
    """It arrived, but the answer was lost; the sender tries again."""
    return twice(send, bucket, spec, engines)


@pytest.mark.parametrize(("fault", "index"), [(flipped, 0), (flipped, 3), (short, 2), (twice, 1), (unanswered, 4)])
def test_mended_on_the_way(server, tiny, mask_likely, sync, fault, index):
    case = mask_likely.case(33, GREEDY)
    faulty = publisher(sync, fault, index)
    report = faulty.publish(mask_likely.model.state_dict(), "301")
    assert report.resent == (fault in (flipped, short))
    trace = greedy(server, [case.prompt])[0]
    assert_same(trace, case.trace)
    assert set(trace.weight_versions) == {"301"}
    faulty.transport.close()


def lost(send, bucket, spec, engines):
    return [""]


def too_early(send, bucket, spec, engines):
    """As if two buckets had changed places."""
    return send(bucket, dataclasses.replace(spec, index=spec.index + 1), engines)


def another_run(send, bucket, spec, engines):
    return send(bucket, dataclasses.replace(spec, run_id="stranger"), engines)


@pytest.mark.parametrize(
    ("fault", "index", "message"),
    [
        (lost, 0, "bucket 1 arrived where 0 was due"),
        (lost, 2, "bucket 3 arrived where 2 was due"),
        (lost, -1, "holds weights with checksum unknown"),
        (too_early, 1, "bucket 2 arrived where 1 was due"),
        (another_run, 1, "has no open update"),
    ],
)
def test_noticed_and_mended_by_a_resend(server, tiny, mask_likely, sync, fault, index, message):
    """The engine serves nothing until a complete update has arrived; nothing is ever decoded with a mixture."""
    count = sync.publish(tiny, "310").buckets
    faulty = publisher(sync, fault, index % count)
    with pytest.raises(WeightSyncError, match=message):
        faulty.publish(mask_likely.model.state_dict(), "311")
    assert faulty.status()[server.url].closed and sync.closed()
    case = mask_likely.case(33, GREEDY)
    sync.publish(mask_likely, "312")
    trace = greedy(server, [case.prompt])[0]
    assert_same(trace, case.trace)
    assert set(trace.weight_versions) == {"312"}
    faulty.transport.close()


@pytest.mark.parametrize(
    ("stage", "index"), [("begin", 0), ("send_bucket", 0), ("send_bucket", 2), ("commit", 0), ("resume", 0)]
)
def test_a_killed_trainer(server, tiny, mask_likely, sync, stage, index):
    """At every stage: the engine stays closed, its weights are no version, and a new trainer brings it back."""
    sync.publish(tiny, "320")
    killed_trainer(sync, mask_likely, "321", stage, index)
    assert sync.closed()
    if stage == "send_bucket" and index:
        # Another trainer gives up before its first byte: that is no reason to let requests at the mixture.
        engines = [EngineControl(server.url), EngineControl("http://127.0.0.1:9")]
        other = WeightPublisher(sync.layout, SharedMemoryTransport(), engines)
        with pytest.raises(EngineFailed, match="version 321 failed at pause: .*did not answer"):
            other.publish(tiny.model.state_dict(), "321")
        assert other.status()[server.url].closed and sync.closed()
        other.close()
    case = mask_likely.case(33, GREEDY)
    sync.publish(mask_likely, "322")
    trace = greedy(server, [case.prompt])[0]
    assert_same(trace, case.trace)
    assert set(trace.weight_versions) == {"322"}


def test_a_trainer_killed_before_it_begins(server, tiny, mask_likely, sync):
    killed_trainer(sync, mask_likely, "331", "pause")
    case = tiny.case(33, GREEDY)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pauses_that_corrupt_block_diffusion_are_refused(server, tiny, sync, mode):
    with pytest.raises(WeightSyncError, match=f"{mode}|400"):
        sync.control.post("/pause_generation", {"mode": mode})
    case = tiny.case(33, GREEDY)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


@pytest.mark.parametrize("drain", [60.0, 0.0])
def test_a_refresh_while_requests_run(server, tiny, mask_likely, sync, drain):
    """With time to drain none is cut short; without, each ends at a block boundary. None sees two versions."""
    sync.publish(tiny, "340")
    requests = [Request(tiny.prompt(10 + n), seed=n, max_new_tokens=64) for n in range(6)]
    samples = []
    clients = [threading.Thread(target=lambda r=r: samples.append(server.generate([r])[0])) for r in requests]
    for client in clients:
        client.start()
    time.sleep(0.4)
    before, sync.control.drain_seconds = sync.control.drain_seconds, drain
    try:
        report = sync.publish(mask_likely, "341")
    finally:
        sync.control.drain_seconds = before
    for client in clients:
        client.join()
    assert len(samples) == len(requests)
    block = tiny.config.block_size
    for sample in samples:
        assert len(set(sample.trace.weight_versions)) <= 1
        if drain:
            assert len(sample.trace.replay_ids) >= 64 or sample.finish_reason == "stop"
        else:
            assert (len(sample.trace.prompt_ids) + len(sample.trace.replay_ids)) % block == 0 or not len(
                sample.trace.replay_ids
            )
    assert {v for s in samples for v in s.trace.weight_versions} <= {"340", "341"}
    if not drain:
        assert report.seconds["pause"] < 5
    case = mask_likely.case(33, GREEDY)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


def test_weights_are_those_of_a_load_from_disk(server, tiny, mask_likely, sync):
    """SGLang's own loader reads the same checkpoints; the engine's checksum of everything it holds must agree."""
    loaded = {}
    for model in (mask_likely, tiny):
        sync.control.post("/update_weights_from_disk", {"model_path": str(model.path)})
        loaded[model.path] = sync.control.checksum()
    assert loaded[tiny.path] != loaded[mask_likely.path]
    for version, model in (("350", mask_likely), ("351", tiny), ("352", mask_likely)):
        assert sync.publish(model, version).checksum == loaded[model.path]
        assert sync.control.checksum() == loaded[model.path]
