"""Weight sessions over HTTP with an engine that is nothing but its memory.

The engine here takes buckets as the loader does, holds tensors, computes the real checksum, and fails on demand.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest

from tests.support import small_model, write_tiny_model
from weight_sync.buckets import Bucket, fill_buckets, view
from weight_sync.checksum import TensorSums, host_checksum
from weight_sync.client import ServiceControl, StreamControl
from weight_sync.control import serialise
from weight_sync.frames import frame
from weight_sync.gate import TOKEN_HEADER, Gate
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import CHECKSUM, RESEND, BucketSpec, Manifest, WeightSyncError, refusal
from weight_sync.metrics import RefreshMetrics
from weight_sync.publisher import WeightPublisher
from weight_sync.routes import weight_routes
from weight_sync.service import WeightService
from weight_sync.session import State
from weight_sync.staging import PREFIX, Staging, StagingError, sweep
from weight_sync.transports.directory import DirectoryTransport
from weight_sync.transports.http import HttpTransport
from weight_sync.transports.shm import SharedMemoryTransport

LEASE = 60.0


class Memory:
    """An engine: tensors by name, a version, and a list of what was asked of it."""

    def __init__(self, layout: CheckpointLayout) -> None:
        self.tensors = {name: torch.zeros(s.shape, dtype=s.dtype) for name, s in layout.wire.items()}
        self.version = "0"
        self.calls: list[str] = []
        self.fail_at: list[str] = []
        self.refusal = ""
        self.drain_seconds, self.tp_size = 0.0, 1
        self.client = httpx.Client()
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def called(self, name: str) -> None:
        self.calls.append(name)
        self.entered.set()
        self.go_on.wait(10)
        if name in self.fail_at:
            self.fail_at.remove(name)
            raise refusal(f"{self.refusal}{name} failed")

    def pause(self) -> None:
        self.called("pause")

    def resume(self) -> None:
        self.called("resume")

    def begin(self, manifest: Manifest) -> None:
        self.called("begin")

    def abort(self, run_id: str, version: str) -> None:
        self.called("abort")

    def send_bucket(self, spec: BucketSpec, data: torch.Tensor | None = None) -> str:
        self.called(f"bucket {spec.index}")
        data = torch.from_numpy(np.fromfile(spec.file, dtype=np.uint8))
        for placement in spec.placements:
            count = placement.shape[0]
            self.tensors[placement.name][placement.start : placement.start + count] = view(data, placement)
        return self.checksum() if spec.last else ""

    def deliver(self, payload: list[str], version: str | None = None) -> str:
        """A message as it reaches the loader."""
        [(header, _), *_] = pickle.loads(base64.b64decode(payload[0]))
        held = self.send_bucket(BucketSpec.decode(header)) if json.loads(header)["kind"] == "bucket" else ""
        return held and f"{CHECKSUM}{held}"

    def checksum(self) -> str:
        sums = TensorSums()
        for name, tensor in self.tensors.items():
            sums.add(name, tensor)
        return f"{sums.value():016x}"

    def commit(self, run_id: str, version: str, checksum: str = "") -> None:
        self.called("commit")
        assert checksum == self.checksum()
        self.version = version


class Rig:
    """A service with its engine, behind an application with one generating route."""

    def __init__(self, tmp_path: Path) -> None:
        self.model = small_model(seed=5)
        self.layout = CheckpointLayout(self.model, torch.float32)
        self.engine, self.now = Memory(self.layout), 0.0
        self.root = tmp_path / "staging"
        self.root.mkdir()
        self.registry = CollectorRegistry()
        metrics = RefreshMetrics(True, self.registry)
        self.service = WeightService(self.engine, self.layout, "0", [self.root], lambda: self.now, metrics)
        app = FastAPI()
        app.include_router(weight_routes(self.service))
        app.add_middleware(Gate, service=self.service, generates=lambda scope: scope["path"] == "/generate")

        @app.post("/generate")
        async def generate() -> str:
            return self.engine.version

        @app.get("/health")
        async def health() -> str:
            return "ok"

        @app.post("/update_weights_from_disk")
        @app.post("/continue_generation")
        async def stock() -> str:
            return "stock"

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(generate_latest(self.registry))

        self.http = TestClient(app)

    def metric(self, name: str) -> float:
        """As Prometheus reads it, with its labels in the name; 0 for what has not been counted yet."""
        lines = self.http.get("/metrics").text.splitlines()
        prefix = f"dllm_rollout:weight_sync_{name} "
        return next((float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)), 0.0)

    def client(self, kind: type[ServiceControl] = ServiceControl) -> ServiceControl:
        control = kind("http://testserver")
        control.client = self.http
        return control

    def stream(self, version: int, upto: str = "commit") -> WeightPublisher:
        """Publish straight into the engine; ``upto`` a call of the control that the sender does not survive."""
        control = self.client(StreamControl)
        publisher = WeightPublisher(self.layout, SharedMemoryTransport(self.root), [control], 20_000)
        if upto != "commit":
            control.abort = lambda run_id, version: None
            original, calls = control.call, []

            def call(method, path, **arguments):
                calls.append(path)
                if len([c for c in calls if c.endswith("/messages")]) > int(upto):
                    raise WeightSyncError("the sender died")
                return original(method, path, **arguments)

            control.call = call
        try:
            publisher.publish(self.model.state_dict(), version)
        finally:
            publisher.transport.close()
        return publisher

    def manifest(self, version: str = "1", run: str = "run") -> Manifest:
        return Manifest(run, version, self.layout.tensors(), self.layout.nbytes)

    def buckets(self, size: int = 20_000) -> list[Bucket]:
        return list(fill_buckets(self.layout.normalise(self.model.state_dict().items()), size))

    def put(self, bucket: Bucket, version: str = "1", run: str = "run", **changes) -> httpx.Response:
        spec = BucketSpec(run, version, bucket.index, bucket.last, bucket.placements, host_checksum(bucket.data))
        spec.nbytes = bucket.data.numel()
        data = changes.pop("data", bucket.data.numpy().tobytes())
        for name, value in changes.items():
            setattr(spec, name, value)
        url = f"/weights/v1/sessions/{run}/{version}/buckets/{bucket.index}"
        return self.http.put(url, content=frame(spec.encode()) + data)

    def step(self, name: str, version: str = "1", run: str = "run", **body) -> httpx.Response:
        return self.http.post(f"/weights/v1/sessions/{run}/{version}/{name}", json=body or None)

    def staged(self, version: str = "1", run: str = "run") -> None:
        self.client().open(self.manifest(version, run))
        for bucket in self.buckets():
            assert self.put(bucket, version, run).status_code == 200

    def state(self) -> tuple[str, str | None]:
        answer = self.http.get("/weights/v1/state").json()
        return answer["state"], answer["version"]

    def holds(self) -> bool:
        return all(torch.equal(self.engine.tensors[n], t) for n, t in self.model.state_dict().items())

    def left(self) -> list[Path]:
        return [f for f in self.root.rglob("*") if f.is_file()]


@pytest.fixture
def rig(tmp_path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    with made.http:
        yield made


def test_a_whole_update(rig):
    rig.staged()
    assert rig.state() == ("preparing", "0") and not rig.engine.calls
    sent = rig.step("prepare").json()["checksum"]
    answer = rig.step("commit", checksum=sent)
    assert answer.status_code == 200 and answer.json()["checksum"] == sent
    assert rig.state() == ("serving", "1") and rig.holds() and not rig.left()
    count = len(rig.buckets())
    buckets = [f"bucket {i}" for i in range(count)]
    assert count > 3 and rig.engine.calls == ["pause", "begin", *buckets, "commit", "resume"]


def test_metrics(rig):
    """What an operator plots: where the weights are, what came, what failed and why, how long nobody was served."""
    state = lambda: [s for s in State if rig.metric(f'engine_weight_state{{state="{s}"}}')]
    failures = lambda stage, reason: rig.metric(f'failures_total{{reason="{reason}",stage="{stage}"}}')
    assert state() == ["serving"]
    rig.client().open(rig.manifest())
    assert state() == ["preparing"] and rig.put(rig.buckets()[0], data=b"").status_code == 422
    rig.staged()
    with applying(rig):
        assert state() == ["fenced"]
        rig.now += 7.0
        assert rig.step("abort").status_code == 409
    assert state() == ["serving"] and rig.metric('refreshes_total{mode="staged"}') == 1
    assert rig.metric("bytes_total") == rig.layout.nbytes and rig.metric("closed_seconds_sum") == 7.0
    assert failures("buckets", "StagingError") == rig.metric("retries_total") == 1
    assert failures("abort", "Refused") == 1
    rig.stream(2)
    assert rig.metric('refreshes_total{mode="stream"}') == 1 and rig.metric("closed_seconds_count") == 2
    rig.staged("3")
    rig.engine.fail_at = ["bucket 0", "bucket 0"]
    assert rig.step("commit", "3").status_code == 502
    assert state() == ["broken"] and failures("commit", "Rejected") == 1
    assert rig.metric("retries_total") == 2, "it was applied twice"
    assert rig.step("abort", "3").status_code == 200
    rig.staged("3", "other")
    rig.now += LEASE
    assert rig.state()[0] == "broken" and failures("lease", "WriterGone") == 1


def test_the_publisher_and_its_transports(rig, tmp_path):
    """The same calls as on an engine itself, by request bodies and by a directory that both sides see."""
    base = tmp_path / "base"
    rig.model = write_tiny_model(base, seed=3, layers=2, hidden=32, head_dim=16)
    rig.layout = CheckpointLayout(rig.model, torch.float32)
    rig.service.layout, rig.engine.tensors = rig.layout, Memory(rig.layout).tensors
    for version, transport in enumerate((HttpTransport(), DirectoryTransport(tmp_path / "versions", base)), 1):
        publisher = WeightPublisher(rig.layout, transport, [rig.client()], 20_000)
        with torch.no_grad():
            rig.model.lm_head.weight.add_(1)
        report = publisher.publish(rig.model.state_dict(), version)
        assert report.buckets > 3 and report.checksum == rig.engine.checksum()
        assert rig.state() == ("serving", str(version)) and rig.holds() and not rig.left()


def test_lost_reordered_and_repeated_buckets(rig):
    client, buckets = rig.client(), rig.buckets()
    client.open(rig.manifest())
    for bucket in (buckets[-1], buckets[1], buckets[1], buckets[0]):
        assert rig.put(bucket).status_code == 200
    lost = list(range(2, len(buckets) - 1))
    assert client.open(rig.manifest()) == lost
    answer = rig.step("commit")
    assert answer.status_code == 409 and f"buckets {lost[:8]} of version 1 are missing" in answer.json()["error"]
    for index in lost:
        assert rig.put(buckets[index]).json()["new"] is True
    assert rig.step("commit").status_code == 200 and rig.holds()


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty"])
def test_damaged_on_the_way(rig, damage):
    bucket = rig.buckets()[0]
    rig.client().open(rig.manifest())
    data = bytearray(bucket.data.numpy().tobytes())
    data[77] ^= 4
    sent = {"flipped": bytes(data), "short": bytes(data[:-1]), "long": bytes(data) + b"1", "empty": b""}[damage]
    answer = rig.put(bucket, data=sent)
    assert answer.status_code == 422 and "bucket 0" in answer.json()["error"]
    assert not rig.left() and rig.put(bucket).json()["new"] is True


def test_damaged_after_it_arrived(rig):
    """Memory that fails between arrival and commit: the bucket is asked for again."""
    rig.staged()
    file = next(f for f in rig.left() if f.name == "1.bin")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    answer = rig.step("commit")
    assert answer.status_code == 422 and "bucket 1 was damaged" in answer.json()["error"]
    assert rig.client().open(rig.manifest()) == [1] and rig.state() == ("preparing", "0")
    rig.put(rig.buckets()[1])
    assert rig.step("commit").status_code == 200 and rig.holds()


def test_refused_before_a_byte_is_taken(rig):
    wrong = rig.manifest()
    tensors = [(n, s, "bfloat16" if n.endswith("gate.weight") else d) for n, s, d in wrong.tensors]
    with pytest.raises(WeightSyncError, match=r"\(422\): .*gate.weight.*"):
        rig.client().open(Manifest("run", "1", tuple(tensors), wrong.nbytes))
    for lost in (wrong.tensors[1:], (*wrong.tensors, wrong.tensors[0]), (*wrong.tensors, ("extra", (1,), "float32"))):
        with pytest.raises(WeightSyncError, match="tensors of the manifest are not those of this engine"):
            rig.client().open(Manifest("run", "1", lost, wrong.nbytes))
    for nbytes in (0, wrong.nbytes - 1, 10**30):
        with pytest.raises(WeightSyncError, match=f"nbytes={nbytes} of the manifest are not those of its tensors"):
            rig.client().open(Manifest("run", "1", wrong.tensors, nbytes))
    rig.client().open(wrong)
    first = rig.buckets()[0]
    p = first.placements[0]
    for change in (
        {"name": "other"},
        {"dtype": "float16"},
        {"shape": (1, 1, 1, 1)},
        {"start": 10**6},
        {"offset": 1 << 40},
    ):
        placements = [type(p)(**{**p.__dict__, **change})]
        answer = rig.put(first, placements=placements)
        assert answer.status_code == 422, change
    assert rig.put(first, run_id="another").status_code == 422
    assert rig.put(first, nbytes=1 << 40).status_code == 422
    assert not rig.left() and not rig.engine.calls


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\xff" * 8,
        frame("[]"),
        frame("{}"),
        frame("no json"),
        frame("[" * 100_000),
        b"\5" + bytes(7) + b"{",
    ],
)
def test_nonsense_as_a_bucket(rig, body):
    rig.client().open(rig.manifest())
    answer = rig.http.put("/weights/v1/sessions/run/1/buckets/0", content=body)
    assert answer.status_code == 422 and not rig.left()


def test_nonsense_elsewhere(rig):
    for body in ({}, {"run_id": "a/b", "version": "1", "tensors": [], "nbytes": 0}, {"run_id": "r", "version": "x"}):
        assert rig.http.post("/weights/v1/sessions", json=body).status_code == 422
    good = json.loads(rig.manifest().encode())
    for change in ({"run_id": ".."}, {"version": "0001"}, {"version": "1" * 19}):
        assert rig.http.post("/weights/v1/sessions", json=good | change).status_code == 422
    for name in ("prepare", "commit"):
        assert rig.step(name).status_code == 404
    assert rig.step("abort").status_code == 200 and rig.state() == ("serving", "0")


def test_tensors_that_never_arrive(rig):
    """A sender that calls a bucket the last one too early."""
    rig.client().open(rig.manifest())
    assert rig.put(rig.buckets()[0], last=True).status_code == 200
    answer = rig.step("commit")
    assert answer.status_code == 422 and "tensors never arrived, e.g. " in answer.json()["error"]
    assert rig.state() == ("preparing", "0") and not rig.engine.calls


@contextmanager
def applying(rig: Rig) -> Iterator[threading.Thread]:
    """The block runs while the commit of a staged update is held in its first step."""
    rig.engine.entered.clear()
    rig.engine.go_on.clear()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(rig.step("commit")))
    thread.answers = answers  # type: ignore[attr-defined]
    thread.start()
    assert rig.engine.entered.wait(10)
    try:
        yield thread
    finally:
        rig.engine.go_on.set()
        thread.join(10)


def test_admission_while_fenced(rig):
    rig.staged()
    assert rig.http.post("/generate").json() == "0"
    with applying(rig) as thread:
        refused = rig.http.post("/generate")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["weight_state"] == "fenced"
        assert rig.http.get("/health").status_code == 200, "a liveness probe does not end a server that refreshes"
        assert rig.step("abort").status_code == 409
        assert rig.http.post("/continue_generation").status_code == 409, "nobody else opens the door"
        with pytest.raises(WeightSyncError, match=r"\(409\): .*is being applied; wait for its end"):
            rig.client().open(rig.manifest("2", "other"))
        assert rig.state()[0] == "fenced"
    assert thread.answers[0].status_code == 200
    assert rig.http.post("/generate").json() == "1"


def test_a_commit_that_is_asked_for_twice(rig):
    """A client whose answer was lost: the second call waits for the same end, a third one finds it done."""
    rig.staged()
    with applying(rig):
        second: list[httpx.Response] = []
        again = threading.Thread(target=lambda: second.append(rig.step("commit")))
        again.start()
        rig.engine.go_on.set()
        again.join(10)
    assert second[0].status_code == 200 and rig.engine.calls.count("begin") == 1
    assert rig.step("commit").status_code == 200 and rig.client().open(rig.manifest()) is None


def test_two_commits_at_once_without_prepare(rig, monkeypatch):
    """Both verify, one applies, and the other waits for the same end."""
    rig.staged()
    verify, verifying, go_on = Staging.verify, threading.Event(), threading.Event()

    def slowly(staging: Staging) -> str:
        verifying.set()
        go_on.wait(10)
        return verify(staging)

    monkeypatch.setattr(Staging, "verify", slowly)
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(rig.step("commit"))) for _ in range(2)]
    threads[0].start()
    assert verifying.wait(10)
    threads[1].start()
    time.sleep(0.1)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [answer.status_code for answer in answers] == [200, 200] and rig.engine.calls.count("begin") == 1


@pytest.mark.parametrize("stage", ["pause", "begin"])
def test_a_failure_before_the_first_byte(rig, stage):
    rig.staged()
    rig.engine.fail_at = [stage]
    answer = rig.step("commit")
    assert answer.status_code == 504 and f"{stage} failed" in answer.json()["error"]
    assert rig.state() == ("preparing", "0") and rig.http.post("/generate").json() == "0"
    assert rig.engine.calls[-1] == "resume", "the engine goes on"
    assert rig.step("commit").status_code == 200 and rig.holds()


@pytest.mark.parametrize("stage", ["bucket 0", "bucket 2", "commit"])
def test_a_failure_in_the_middle_is_repaired_from_the_staging_area(rig, stage):
    rig.staged()
    rig.engine.fail_at = [stage]
    assert rig.step("commit").status_code == 200
    assert rig.state() == ("serving", "1") and rig.holds() and rig.engine.calls.count("begin") == 2


@pytest.mark.parametrize("stage", ["bucket 0", "bucket 2", "commit", "resume"])
def test_broken_until_a_complete_update(rig, stage):
    rig.staged()
    rig.engine.fail_at = [stage] * (1 if stage == "resume" else 2)
    answer = rig.step("commit")
    assert answer.status_code == 502 and rig.state() == ("broken", None)
    for path, call in (("/generate", rig.http.post), ("/health", rig.http.get)):
        assert call(path).status_code == 503
    assert "was not applied completely" in rig.http.post("/generate").json()["error"]
    assert rig.step("abort").status_code == 200 and rig.state() == ("broken", None)
    rig.staged("1", "repair")
    assert rig.http.post("/generate").status_code == 503
    assert rig.step("commit", run="repair").status_code == 200
    assert rig.state() == ("serving", "1") and rig.holds() and rig.http.post("/generate").json() == "1"


def test_two_runs(rig):
    rig.staged()
    with pytest.raises(WeightSyncError, match="version 1 of run run is open for another 60 s; abort it or wait"):
        rig.client().open(rig.manifest("1", "other"))
    assert len(rig.left()) == len(rig.buckets()), "a refused writer takes nothing away"
    rig.now += LEASE
    assert rig.state() == ("serving", "0") and not rig.left(), "a dead writer leaves nothing behind"
    rig.staged("1", "other")
    assert rig.step("commit", run="other").status_code == 200
    with pytest.raises(WeightSyncError, match=r"\(409\): version 1 is not newer than 1, which is served"):
        rig.client().open(rig.manifest("1"))


def test_updates_by_other_endpoints_wait(rig):
    rig.staged()
    assert rig.http.post("/update_weights_from_disk").status_code == 409
    headers = {TOKEN_HEADER: rig.service.token}
    assert rig.http.post("/update_weights_from_disk", headers=headers).json() == "stock"
    assert rig.http.post("/continue_generation").json() == "stock"
    rig.step("abort")
    assert rig.http.post("/update_weights_from_disk").json() == "stock"


def test_work_that_takes_longer_than_the_lease(rig):
    """The writer waits for the server: that is no reason to drop its update."""
    rig.staged()
    verify = rig.service.staging.verify

    def slow() -> str:
        rig.now += 10 * LEASE
        rig.service.tidy()
        return verify()

    rig.service.staging.verify = slow
    assert rig.step("commit").status_code == 200 and rig.holds()
    pause = rig.engine.pause

    def drains() -> None:
        rig.now += 10 * LEASE
        rig.service.tidy()
        pause()

    rig.engine.pause = drains
    rig.stream(2)
    assert rig.state() == ("serving", "2")


def test_a_wrong_checksum_of_the_sender(rig):
    rig.staged()
    answer = rig.step("commit", checksum="0" * 16)
    assert answer.status_code == 422 and "the sender has" in answer.json()["error"]
    assert rig.state() == ("preparing", "0") and not rig.engine.calls


def test_no_room(rig, tmp_path, monkeypatch):
    with pytest.raises(
        StagingError, match=r"an update of .* bytes needs room: .* has [\d,]+; free some of it"
    ) as error:
        Staging(Manifest("r", "1", (), 1 << 60), [tmp_path])
    assert error.value.full
    monkeypatch.setattr("weight_sync.staging.shutil.disk_usage", lambda root: SimpleNamespace(free=rig.layout.nbytes))
    answer = rig.http.post("/weights/v1/sessions", json=json.loads(rig.manifest().encode()))
    assert answer.status_code == 507 and rig.state() == ("serving", "0")


def test_what_killed_servers_leave_is_swept(tmp_path):
    (tmp_path / f"{PREFIX}999999999_x").mkdir()
    (tmp_path / f"{PREFIX}1_x").mkdir()
    (tmp_path / "other").mkdir()
    sweep([tmp_path])
    assert sorted(d.name for d in tmp_path.iterdir()) == ["other", f"{PREFIX}1_x"]


def test_what_killed_trainers_leave_is_swept(tmp_path):
    (tmp_path / "weight_sync_999999999_x").mkdir()
    (tmp_path / "weight_sync_999999999_x" / "0.bin").write_bytes(b"1")
    (tmp_path / "weight_sync_1_x").mkdir()
    transport = SharedMemoryTransport(tmp_path)
    assert sorted(d.name for d in tmp_path.iterdir()) == sorted(["weight_sync_1_x", transport.directory.name])
    transport.close()


def test_a_streamed_update(rig):
    """Nothing is admitted from its beginning, and nothing waits anywhere."""
    seen = []
    rig.engine.called, called = lambda name: (seen.append((name, rig.state()[0])), called(name)), rig.engine.called
    rig.stream(1)
    assert rig.state() == ("serving", "1") and rig.holds() and rig.service.staging is None
    names = [name for name, _ in seen]
    assert names[:3] == ["pause", "begin", "bucket 0"] and names[-2:] == ["commit", "resume"]
    assert {state for _, state in seen} == {"fenced"}
    assert rig.http.get("/weights/v1/state").json()["checksum"] == rig.engine.checksum()


def test_a_streaming_sender_that_dies(rig):
    """Before its first bucket the old weights come back; after it nothing is served until a complete update."""
    with pytest.raises(WeightSyncError, match="died"):
        rig.stream(1, upto="0")
    assert rig.state() == ("fenced", "0")
    rig.now += LEASE
    assert rig.state() == ("serving", "0") and rig.http.post("/generate").json() == "0"
    with pytest.raises(WeightSyncError, match="died"):
        rig.stream(1, upto="2")
    assert rig.state() == ("fenced", None)
    rig.now += LEASE
    assert rig.state() == ("broken", None) and rig.http.post("/generate").status_code == 503
    rig.stream(1)
    assert rig.state() == ("serving", "1") and rig.holds()


def as_message(header: dict[str, Any], payload: Any = None) -> dict[str, Any]:
    """Body of a message whose payload is what its header says, or another's."""
    text = json.dumps(header if payload is None else payload)
    return {"header": header, "payload": [serialise(text, [torch.empty(0, dtype=torch.uint8)])]}


BUCKET_HEADER = json.loads(BucketSpec("run", "1", 0, False, checksum="xxh3:0").encode())
SLOTS_HEADER = {"kind": "slots", "run_id": "run", "version": "1"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"header": SLOTS_HEADER, "payload": ["AAAA"]}, "the payload is no message"),
        ({"header": SLOTS_HEADER, "payload": ["ü"]}, "the payload is no message"),
        ({"header": SLOTS_HEADER, "payload": [""]}, "the payload is no message"),
        ({"header": SLOTS_HEADER, "payload": []}, "0 payloads for 1 tensor-parallel ranks"),
        ({"header": SLOTS_HEADER, "payload": as_message(SLOTS_HEADER)["payload"] * 2}, "2 payloads for 1"),
        (as_message(SLOTS_HEADER, BUCKET_HEADER), "the payload for rank 0 is not that of its header"),
        (as_message(BUCKET_HEADER, BUCKET_HEADER | {"index": 1}), "the payload for rank 0 is not that of its header"),
        (as_message(SLOTS_HEADER, []), "the payload for rank 0 is not that of its header"),
        (as_message({"kind": "commit", "run_id": "run", "version": "1"}), "message of kind 'commit'"),
        (as_message({"kind": ["bucket"]}), "message of kind"),
        (as_message({}), "message of kind None"),
        (as_message(SLOTS_HEADER | {"version": "2"}), "the message's header and its address disagree"),
        (as_message({"kind": "bucket", "run_id": "run", "version": "1"}), "the header of the bucket is not one"),
        (as_message(BUCKET_HEADER | {"slot": "x"}), "the header of the bucket is not one: slot is 'x'"),
        (as_message(BUCKET_HEADER | {"index": True}), "the header of the bucket is not one: index is True"),
        (as_message(BUCKET_HEADER | {"checksum": None}), "the header of the bucket is not one: checksum is None"),
        (as_message(BUCKET_HEADER | {"more": 1}), "the header of the bucket is not one"),
        (as_message(BUCKET_HEADER | {"placements": [{"name": ["x"]}]}), "the header of the bucket is not one"),
        (as_message(BUCKET_HEADER | {"placements": 3}), "the header of the bucket is not one"),
    ],
)
def test_nonsense_as_a_message(rig, body, why):
    """Refused before the engine hears of it; the update goes on."""
    rig.client(StreamControl).open(rig.manifest())
    answer = rig.http.post("/weights/v1/sessions/run/1/messages", json=body)
    assert answer.status_code == 422 and why in answer.json()["error"]
    assert rig.engine.calls == ["pause", "begin"] and rig.state() == ("fenced", "0")
    assert rig.step("abort").status_code == 200 and rig.state() == ("serving", "0")


@pytest.mark.parametrize("refusal", [RESEND, ""])
def test_a_streamed_bucket_that_the_loader_refuses(rig, refusal):
    """One that was damaged comes again; after any other refusal the engine is broken."""
    rig.engine.refusal, rig.engine.fail_at = refusal, ["bucket 1"]
    if refusal:
        rig.stream(1)
        assert rig.state() == ("serving", "1") and rig.engine.calls.count("bucket 1") == 2
    else:
        with pytest.raises(WeightSyncError, match="bucket 1 failed"):
            rig.stream(1)
        assert rig.state() == ("broken", None)
        rig.staged("1", "repair")
        assert rig.step("commit", run="repair").status_code == 200 and rig.holds()


def test_an_update_behind_a_dead_writer_begins_when_the_engine_was_opened(rig):
    """What opens the engine for the old weights must not do so under the buckets of the next update."""
    rig.client(StreamControl).open(rig.manifest("1", "dead"))
    called = rig.engine.called

    def slowly(name: str) -> None:
        time.sleep(0.05 if name in ("abort", "resume") else 0)
        called(name)

    rig.engine.called = slowly
    rig.now += LEASE
    rig.engine.calls.clear()
    rig.stream(2)
    assert rig.engine.calls[:4] == ["abort", "resume", "pause", "begin"] and rig.engine.calls.count("resume") == 2
    assert rig.state() == ("serving", "2") and rig.holds()


@pytest.mark.parametrize("stage", ["abort", "resume"])
def test_an_engine_that_is_not_known_to_hold_the_old_weights_stays_closed(rig, stage):
    rig.staged()
    rig.engine.fail_at = ["begin", stage]
    assert rig.step("commit").status_code == 502 and rig.state() == ("broken", None)
    assert rig.http.post("/generate").status_code == 503 and ("resume" in rig.engine.calls) == (stage == "resume")
    assert rig.step("commit").status_code == 200 and rig.state() == ("serving", "1") and rig.holds()


def test_an_update_by_other_means_ends_what_was_committed(rig, monkeypatch):
    """SGLang keeps its label if an update names none; the same version is sent again, and compared."""
    rig.staged()
    sent = rig.step("commit").json()["checksum"]
    assert rig.step("commit", checksum="0" * 16).status_code == 422, "other weights than are served"
    assert rig.step("commit", checksum=sent).status_code == 200 and rig.client().open(rig.manifest()) is None
    told = SimpleNamespace(json=lambda: {"weight_version": "1"})
    monkeypatch.setattr(rig.engine.client, "get", lambda path: told)
    assert rig.http.post("/update_weights_from_disk").status_code == 200
    assert rig.http.get("/weights/v1/state").json()["checksum"] is None
    with pytest.raises(WeightSyncError, match="version 1 is not newer than 1"):
        rig.client().open(rig.manifest())
    rig.staged("2")
    assert rig.step("commit", "2").status_code == 200 and rig.holds()


@pytest.mark.parametrize("stage", ["pause", "begin", "commit", "resume"])
def test_a_streamed_update_that_fails(rig, stage):
    rig.engine.fail_at = [stage]
    with pytest.raises(WeightSyncError, match=f"{stage} failed"):
        rig.stream(1)
    early = stage in ("pause", "begin")
    assert rig.state() == (("serving", "0") if early else ("broken", None))
    rig.stream(1)
    assert rig.state() == ("serving", "1") and rig.holds()
