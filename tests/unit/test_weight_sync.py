"""Weight refresh without an engine: layout, buckets, messages, the loader's state machine, publisher, control."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.models.checkpoint import split_experts
from tests.support import DATA, small_config, small_model
from weight_sync import loader
from weight_sync.buckets import ALIGNMENT, Bucket, fill_buckets, view
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout, LayoutError
from weight_sync.messages import BucketSpec, SyncReport, WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.shm import SharedMemoryTransport

PUBLISHED_CONFIG = json.loads((DATA / "llada2_mini_config.json").read_text())


@pytest.fixture(scope="module")
def index() -> dict:
    with gzip.open(DATA / "llada2_mini_index.json.gz", "rt") as file:
        return json.load(file)


class TestLayout:
    def test_names_are_those_of_the_published_index(self, index):
        names = set(CheckpointLayout.from_config(PUBLISHED_CONFIG).specs)
        assert len(names) == 14813
        assert names == set(index["weight_map"])

    def test_size_is_the_published_one_up_to_the_router(self, index):
        """The published router (weight and bias of 19 layers) is bf16; on the wire it is fp32."""
        layout = CheckpointLayout.from_config(PUBLISHED_CONFIG)
        assert index["metadata"]["total_size"] == 32_511_286_784
        router = sum(s.nbytes for s in layout.specs.values() if s.dtype == torch.float32)
        assert router == 19 * (256 * 2048 + 256) * 4
        assert layout.nbytes == 32_511_286_784 + router // 2
        assert sum(s.nbytes // s.dtype.itemsize * 2 for s in layout.specs.values()) == 32_511_286_784

    def test_wire_dtypes(self):
        sent = dict(CheckpointLayout(small_model(), torch.bfloat16).normalise(small_model().state_dict().items()))
        for name, tensor in sent.items():
            fp32 = name.endswith(("mlp.gate.weight", "mlp.gate.expert_bias"))
            assert tensor.dtype == (torch.float32 if fp32 else torch.bfloat16), name
        assert torch.equal(sent["lm_head.weight"], small_model().lm_head.weight.bfloat16())

    def sent(self, edit):
        state = dict(small_model().state_dict())
        pairs = list(state.items())
        edit(pairs, state)
        return list(CheckpointLayout(small_model(), torch.float32).normalise(pairs))

    def test_missing_tensor(self):
        def edit(pairs, state):
            pairs[:] = [p for p in pairs if not p[0].endswith("expert_bias")]

        message = r"2 of \d+ tensors are missing, e.g. 'model.layers.1.mlp.gate.expert_bias'; send buffers"
        with pytest.raises(LayoutError, match=message):
            self.sent(edit)

    def test_unknown_tensor(self):
        with pytest.raises(LayoutError, match="tensor 'extra' is not part of this checkpoint; send every tensor"):
            self.sent(lambda pairs, state: pairs.append(("extra", torch.zeros(1))))

    def test_tensor_sent_twice(self):
        with pytest.raises(LayoutError, match="tensor 'model.norm.weight' is sent twice; send every tensor"):
            self.sent(lambda pairs, state: pairs.append(("model.norm.weight", state["model.norm.weight"])))

    def test_wrong_shape(self):
        def edit(pairs, state):
            pairs[0] = (pairs[0][0], pairs[0][1][:1])

        with pytest.raises(LayoutError, match=r"has shape \(1, 32\), the engine needs \(40, 32\)"):
            self.sent(edit)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=0, max_size=3), st.sampled_from(DTYPES)), min_size=0, max_size=12
    ),
    limit=st.integers(1, 4096),
)
@settings(deadline=None, max_examples=60)
def test_buckets_hold_every_tensor_and_stay_below_their_size(shapes, limit):
    tensors = {f"t{i}": torch.randint(0, 100, shape).to(dtype) for i, (shape, dtype) in enumerate(shapes)}
    buckets = list(fill_buckets(tensors.items(), limit))
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert [b.last for b in buckets] == [False] * (len(buckets) - 1) + [True]
    seen = []
    for bucket in buckets:
        assert bucket.data.numel() <= limit or len(bucket.placements) == 1
        for placement in bucket.placements:
            assert placement.offset % ALIGNMENT == 0
            got, expected = view(bucket.data, placement), tensors[placement.name]
            assert got.dtype == expected.dtype and torch.equal(got, expected)
            seen.append(placement.name)
    assert seen == list(tensors)


def test_a_sender_holds_one_bucket_at_a_time():
    """Tensors are taken from the stream only when their bucket is being filled."""
    taken = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(10):
            taken.append(i)
            yield f"t{i}", torch.zeros(256, dtype=torch.uint8)

    buckets = fill_buckets(stream(), 512)
    next(buckets)
    assert taken == [0, 1, 2]


def test_header_round_trip():
    bucket = next(iter(fill_buckets([("a", torch.zeros(2, 3)), ("b", torch.zeros((), dtype=torch.bfloat16))], 10**6)))
    spec = BucketSpec("run", "12", 3, True, bucket.placements, "xxh3:0", "/dev/shm/x")
    assert BucketSpec.decode(spec.encode()) == spec


def test_report_metrics():
    report = SyncReport("3", 2, 4 * 10**9, 1, seconds={"gather": 0.5, "total": 2.0})
    metrics = report.as_metrics()
    assert metrics["weight_sync/gather_seconds"] == 0.5 and metrics["weight_sync/total_seconds"] == 2.0
    assert metrics["weight_sync/bytes"] == 4 * 10**9 and metrics["weight_sync/goodput_gbps"] == 2.0


class Receiver:
    """Stands for the engine's model: remembers what it was given."""

    def __init__(self) -> None:
        self.config = self
        self.tensors: dict[str, torch.Tensor] = {}
        self.failure: Exception | None = None

    def to_dict(self) -> dict:
        return {"architectures": ["LLaDA2MoeModelLM"], **asdict(small_config())}

    def load_weights(self, named) -> None:
        if self.failure is not None:
            raise self.failure
        self.tensors.update((name, tensor.clone()) for name, tensor in named)


@pytest.fixture
def receiver(monkeypatch) -> Receiver:
    monkeypatch.setattr(loader, "STATE", loader.LoaderState())
    return Receiver()


def parts(version: str = "1", run: str = "run", size: int = 4096) -> list[tuple[BucketSpec, torch.Tensor]]:
    layout = CheckpointLayout(small_model(), torch.float32)
    buckets = fill_buckets(layout.normalise(small_model().state_dict().items()), size)
    return [(BucketSpec(run, version, b.index, b.last, b.placements), b.data) for b in buckets]


def deliver(receiver: Receiver, spec: BucketSpec, data: torch.Tensor):
    loader.load(receiver, [(spec.encode(), data)])
    return loader.STATE.status


class TestLoader:
    def test_a_complete_update(self, receiver):
        update = parts()
        assert len(update) > 5
        for spec, data in update:
            status = deliver(receiver, spec, data)
            assert status.ok and status.tensors == len(spec.placements) and status.nbytes == data.numel()
        expected = dict(split_experts(small_model().state_dict().items()))
        assert receiver.tensors.keys() == expected.keys()
        assert all(torch.equal(receiver.tensors[n], t) for n, t in expected.items())
        assert loader.STATE.session is None

    def test_a_bucket_out_of_order(self, receiver):
        update = parts()
        deliver(receiver, *update[0])
        status = deliver(receiver, *update[2])
        assert not status.ok and status.message == "bucket 2 arrived where 1 was due; start over"

    def test_a_bucket_without_a_beginning(self, receiver):
        status = deliver(receiver, *parts()[1])
        assert not status.ok and status.message == "bucket 1 of version 1 has no open update; start over"

    @pytest.mark.parametrize("other", [{"version": "2"}, {"run": "another"}])
    def test_buckets_of_two_updates(self, receiver, other):
        deliver(receiver, *parts()[0])
        status = deliver(receiver, *parts(**other)[1])
        assert not status.ok and "has no open update" in status.message

    def test_a_new_beginning_replaces_an_unfinished_update(self, receiver):
        for spec, data in parts()[:3]:
            deliver(receiver, spec, data)
        for spec, data in parts(version="2", run="again"):
            assert deliver(receiver, spec, data).ok

    def test_a_tensor_that_arrives_twice(self, receiver):
        update = parts()
        deliver(receiver, *update[0])
        spec = replace(update[1][0], placements=update[0][0].placements)
        status = deliver(receiver, spec, update[0][1])
        assert not status.ok and "arrived twice" in status.message

    def test_a_tensor_that_never_arrives(self, receiver):
        update = parts()
        missing = update[2][0].placements.pop()
        statuses = [deliver(receiver, spec, data) for spec, data in update]
        assert all(status.ok for status in statuses[:-1]) and not statuses[-1].ok
        assert statuses[-1].message == f"1 tensors never arrived, e.g. {missing.name!r}"

    def test_an_error_in_the_model_does_not_kill_the_scheduler(self, receiver):
        update = parts()
        deliver(receiver, *update[0])
        receiver.failure = KeyError("no such parameter")
        status = deliver(receiver, *update[1])
        assert not status.ok and status.message == "KeyError: 'no such parameter'"
        receiver.failure = None
        for part in update[1:3]:
            assert not deliver(receiver, *part).ok, "a broken update cannot be continued"
        assert all(deliver(receiver, *part).ok for part in parts(run="again"))

    @pytest.mark.parametrize("payload", [[], [("{", torch.zeros(1))], [("{}", torch.zeros(1))], [("a",)], None])
    def test_a_garbled_payload(self, receiver, payload):
        loader.load(receiver, payload)
        assert not loader.STATE.status.ok

    def test_bytes_in_a_file(self, receiver, tmp_path):
        for spec, data in parts():
            file = tmp_path / f"{spec.index}.bin"
            data.numpy().tofile(file)
            assert deliver(receiver, replace(spec, file=str(file)), torch.empty(0, dtype=torch.uint8)).ok
        assert torch.equal(receiver.tensors["lm_head.weight"], small_model().lm_head.weight)


class Loopback:
    """Transport into a loader of this process."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver, self.specs = receiver, []

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list) -> None:
        self.specs.append(spec)
        status = deliver(self.receiver, spec, bucket.data)
        if not status.ok:
            raise WeightSyncError(status.message)

    def close(self) -> None: ...


class TestPublisher:
    def publisher(self, receiver, bucket_bytes=8192):
        transport = Loopback(receiver)
        return WeightPublisher(CheckpointLayout(small_model(), torch.float32), transport, [], bucket_bytes), transport

    def test_publish(self, receiver):
        publisher, transport = self.publisher(receiver)
        model = small_model(seed=5)
        report = publisher.publish(model.state_dict().items(), "7")
        expected = dict(split_experts(model.state_dict().items()))
        assert all(torch.equal(receiver.tensors[n], t) for n, t in expected.items())
        assert (report.version, report.tensors, report.buckets) == ("7", len(expected), len(transport.specs))
        assert report.nbytes >= CheckpointLayout(small_model(), torch.float32).nbytes
        assert {s.version for s in transport.specs} == {"7"} and len({s.run_id for s in transport.specs}) == 1

    def test_every_publish_is_an_update_of_its_own(self, receiver):
        publisher, transport = self.publisher(receiver)
        for version in ("1", "2"):
            publisher.publish(small_model().state_dict().items(), version)
        assert len({s.run_id for s in transport.specs}) == 2

    def test_a_missing_buffer_never_completes_the_update(self, receiver):
        """What ``named_parameters()`` alone would send."""
        publisher, transport = self.publisher(receiver)
        with pytest.raises(LayoutError, match="expert_bias"):
            publisher.publish(small_model().named_parameters(), "1")
        assert not any(spec.last for spec in transport.specs)
        publisher.publish(small_model().state_dict().items(), "2")


def control(handler) -> EngineControl:
    engine = EngineControl("http://engine:1/")
    engine.client = httpx.Client(base_url=engine.url, transport=httpx.MockTransport(handler))
    return engine


class TestControl:
    def test_an_unreachable_engine_is_named(self):
        engine = EngineControl("http://127.0.0.1:9", timeout=2)
        with pytest.raises(WeightSyncError, match=r"engine http://127.0.0.1:9 did not answer /flush_cache: "):
            engine.post("/flush_cache")

    @pytest.mark.parametrize(
        ("status", "body", "message"),
        [
            (
                200,
                {"success": False, "message": "rank 1: bucket 2 is missing"},
                r"\(200\): rank 1: bucket 2 is missing",
            ),
            (400, {"message": "bad request"}, r"\(400\): bad request"),
            (500, "it broke", r"\(500\): it broke"),
        ],
    )
    def test_a_refusal_is_an_error(self, status, body, message):
        def answer(request):
            return httpx.Response(status, **({"json": body} if isinstance(body, dict) else {"text": body}))

        with pytest.raises(WeightSyncError, match="engine http://engine:1 refused /x " + message):
            control(answer).post("/x")

    @pytest.mark.parametrize("last", [False, True])
    def test_only_the_last_bucket_flips_the_version(self, last):
        bodies = []

        def answer(request):
            bodies.append(json.loads(request.content))
            return httpx.Response(200, json={"success": True})

        control(answer).send_bucket(BucketSpec("run", "9", 0, last, []), torch.empty(0, dtype=torch.uint8))
        assert bodies[0]["flush_cache"] is last
        assert bodies[0]["weight_version"] == ("9" if last else None)
        assert bodies[0]["load_format"] == "weight_sync.loader.load"


def test_shared_memory_files_do_not_stay(receiver):
    seen = []

    class Engine:
        def send_bucket(self, spec, data):
            seen.append(spec.file)
            assert deliver(receiver, spec, data).ok

        def close(self): ...

    transport = SharedMemoryTransport()
    publisher = WeightPublisher(CheckpointLayout(small_model(), torch.float32), transport, [Engine()], 8192)
    publisher.publish(small_model().state_dict().items(), "1")
    assert len(seen) > 3 and not list(transport.directory.iterdir())
    publisher.close()
    assert not transport.directory.exists()
