"""Every bucket lost, repeated, delayed, damaged or exchanged, alone and in any combination: mended, or no success."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import small_model
from tests.unit.receiver import LocalEngine, Receiver
from tests.unit.test_weight_service import Rig
from weight_sync import loader
from weight_sync.buckets import fill_buckets, new_buffer
from weight_sync.checksum import wire_checksum
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import EngineFailed
from weight_sync.publisher import WeightPublisher
from weight_sync.transports import fan_out

LAYOUT = CheckpointLayout(small_model(), torch.float32)
STATES = [small_model(seed).state_dict() for seed in range(3)]
SIZE = 44 << 10
COUNT = len(list(fill_buckets(LAYOUT.normalise(STATES[0].items()), SIZE)))

MENDED = ("flipped", "short", "twice", "delayed", "early")
"""Faults after which an update goes on by itself."""

FATAL = ("lost", "stranger", "forged", "always flipped")


class Loopback:
    def buffer(self, index, size, device):
        return new_buffer(index, size, device)

    def send(self, bucket, spec, engines):
        return fan_out(engines, lambda engine: engine.send_bucket(spec, bucket.data))

    def release(self): ...

    def close(self): ...


class Way:
    """Between publisher and loader; does to a bucket what ``faults`` says of its index, the first time it passes."""

    def __init__(self, faults: dict[int, tuple[str, int]]) -> None:
        self.faults, self.held = dict(faults), None

    def __call__(self, engine: LocalEngine, spec: Any, data: torch.Tensor) -> str:
        fault, at = self.faults.get(spec.index, ("", 0))
        if fault != "always flipped":
            self.faults.pop(spec.index, None)
        if fault in ("flipped", "always flipped"):
            data = flipped(spec, data, at)
        elif fault == "short":
            data = data[: at % len(data)]
        elif fault == "twice":
            engine.deliver(spec, data)
        elif fault == "early":
            spec = replace(spec, index=spec.index + 1)
        elif fault == "stranger":
            spec = replace(spec, run_id="stranger")
        elif fault == "forged":
            # Other bytes with a checksum that fits them: only the checksum of the whole can tell.
            data = flipped(spec, data, at)
            spec = replace(spec, checksum=wire_checksum(data, spec.placements))
        elif fault == "delayed" and not spec.last:
            self.held = (spec, data.clone())
            return ""
        elif fault == "lost":
            return "0" * 16 if spec.last else ""
        try:
            return engine.deliver(spec, data)
        finally:
            if self.held is not None and spec.index > self.held[0].index:
                held, self.held = self.held, None
                engine.deliver(*held)


def flipped(spec: Any, data: torch.Tensor, at: int) -> torch.Tensor:
    """One bit of a tensor in the bucket."""
    placement = spec.placements[at % len(spec.placements)]
    wrong = data.clone()
    wrong[placement.offset + at % placement.nbytes] ^= 1 << at % 8
    return wrong


def publish(faults: dict[int, tuple[str, int]]) -> None:
    """An update with faults, and one without; what the engine holds, and what it says, is checked after both."""
    loader.STATE = loader.LoaderState()
    engine = LocalEngine(Receiver({name: spec.shape for name, spec in LAYOUT.wire.items()}))
    publisher = WeightPublisher(LAYOUT, Loopback(), [engine], SIZE)
    publisher.publish(STATES[0], 0)
    engine.tamper = Way(faults)
    fatal = any(fault in FATAL for fault, _ in faults.values())
    engine.calls.clear()
    try:
        publisher.publish(STATES[1], 1)
        assert not fatal, "success, though something did not arrive as it was sent"
        assert engine.receiver.holds(STATES[1]) and loader.STATE.label == "1" and engine.calls[-1] == "resume"
    except EngineFailed as error:
        assert fatal and (error.stage.startswith("bucket") or error.stage == "checksum")
        assert "resume" not in engine.calls and "commit" not in engine.calls
        assert loader.STATE.label in ("0", "torn:0->1") and publisher.status()["local"].closed
    engine.tamper = None
    publisher.publish(STATES[2], 2)
    assert engine.receiver.holds(STATES[2]) and loader.STATE.label == "2" and engine.calls[-1] == "resume"
    publisher.close()


@pytest.fixture(autouse=True)
def own_state(monkeypatch):
    monkeypatch.setattr(loader, "STATE", loader.LoaderState())


@pytest.mark.parametrize("fault", MENDED + FATAL)
def test_every_bucket(fault):
    assert COUNT > 3
    for index in range(COUNT):
        publish({index: (fault, 12345 + index)})


where = st.dictionaries(
    st.integers(0, COUNT - 1), st.tuples(st.sampled_from(MENDED + FATAL[:1]), st.integers(0, 1 << 20)), max_size=COUNT
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where)
def test_any_combination(faults):
    late = {i for i, (fault, _) in faults.items() if fault == "delayed"}
    if any(i + 1 in faults for i in late):
        # A bucket that overtakes another must itself arrive.
        faults = {i: f for i, f in faults.items() if i - 1 not in late}
    publish(faults)


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    made = Rig(tmp_path_factory.mktemp("rig"))
    with made.http:
        yield made


arrivals = st.lists(
    st.tuples(st.integers(0, 99), st.sampled_from(["good", "good", "good", "flipped", "short"])), max_size=30
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=arrivals, rest=st.randoms(use_true_random=False))
def test_staged_in_any_order(rig, arrivals, rest):
    """Over HTTP: buckets in any order, again and again, many of them damaged; then those that the server asks for."""
    version = str(int(rig.service.machine.version) + 1)
    before = rig.state()[1]
    rig.client().open(rig.manifest(version))
    buckets = rig.buckets(SIZE)
    there: set[int] = set()
    for number, how in arrivals:
        bucket = buckets[number % len(buckets)]
        data = bytearray(bucket.data.numpy().tobytes())
        if how == "flipped":
            data[number * 7 % len(data)] ^= 4
        answer = rig.put(bucket, version, data=bytes(data[:-1] if how == "short" else data))
        if how == "good":
            assert answer.status_code == 200 and answer.json()["new"] == (bucket.index not in there)
            there.add(bucket.index)
        elif bucket.index not in there:
            assert answer.status_code == 422
        assert rig.state() == ("preparing", before)
    if len(there) < len(buckets):
        assert rig.step("commit", version).status_code == 409 and rig.state() == ("preparing", before)
    missing = [bucket for bucket in buckets if bucket.index not in there]
    rest.shuffle(missing)
    for bucket in missing:
        assert rig.put(bucket, version).status_code == 200
    assert rig.step("commit", version).status_code == 200
    assert rig.state() == ("serving", version) and rig.holds()
