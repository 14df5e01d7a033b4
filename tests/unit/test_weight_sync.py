"""Weight refresh without an engine, the trainer's side: layout, buckets, messages, publisher, control."""

from __future__ import annotations

import gzip
import json
import re
import weakref
from collections.abc import Iterator

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.models.checkpoint import split_experts
from tests.support import DATA, small_model
from tests.unit.receiver import LocalEngine, Receiver
from weight_sync import loader
from weight_sync.buckets import ALIGNMENT, fill_buckets, largest_bucket, new_buffer, view
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout, LayoutError
from weight_sync.messages import BucketSpec, EngineFailed, Manifest, SyncReport, WeightSyncError
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
        sent = self.arrived(CheckpointLayout(small_model(), torch.bfloat16), small_model().state_dict().items())
        for name, tensor in sent.items():
            fp32 = name.endswith(("mlp.gate.weight", "mlp.gate.expert_bias"))
            assert tensor.dtype == (torch.float32 if fp32 else torch.bfloat16), name
        assert torch.equal(sent["lm_head.weight"], small_model().lm_head.weight.bfloat16())

    def arrived(self, layout, named, size=1 << 30) -> dict[str, torch.Tensor]:
        """What a receiver finds in the buckets, pieces put together."""
        whole: dict[str, list[torch.Tensor]] = {}
        for bucket in fill_buckets(layout.normalise(named), size):
            for placement in bucket.placements:
                whole.setdefault(placement.name, []).append(view(bucket.data, placement))
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in whole.items()}

    def per_projection(self):
        for name, tensor in small_model().state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                gate, up = tensor.chunk(2, 1)
                yield name.replace("gate_up_proj", "up_proj"), up
                yield name.replace("gate_up_proj", "gate_proj"), gate
            else:
                yield name, tensor

    @pytest.mark.parametrize("size", [300, 4096, 1 << 30])
    def test_every_published_layout_of_the_experts(self, size):
        """One by one, per projection, gate and up fused: the same tensors arrive, and the order does not matter."""
        layout, expected = CheckpointLayout(small_model(), torch.float32), small_model().state_dict()
        per_expert = list(split_experts(expected.items()))
        for named in (expected.items(), reversed(per_expert), self.per_projection()):
            arrived = self.arrived(layout, named, size)
            assert arrived.keys() == expected.keys()
            assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())

    def test_a_name_in_two_layouts(self):
        named = [*small_model().state_dict().items(), *self.per_projection()]
        with pytest.raises(LayoutError, match="is sent twice"):
            list(CheckpointLayout(small_model(), torch.float32).normalise(named))

    @pytest.mark.parametrize("suffix", ["mlp.gate.weight", "mlp.gate.expert_bias"])
    def test_a_rounded_router(self, suffix):
        layout = CheckpointLayout(small_model(), torch.float32)
        rounded = [(n, t.bfloat16() if n.endswith(suffix) else t) for n, t in small_model().state_dict().items()]
        with pytest.raises(LayoutError, match="has dtype torch.bfloat16, the engine needs torch.float32: a rounded"):
            list(layout.normalise(rounded))
        assert len(list(layout.normalise(rounded, rounded_router=True))) == len(layout.wire)

    def test_an_integer_tensor(self):
        named = [(n, t.int() if n == "lm_head.weight" else t) for n, t in small_model().state_dict().items()]
        with pytest.raises(LayoutError, match="'lm_head.weight' has dtype torch.int32, the engine needs torch.float32"):
            list(CheckpointLayout(small_model(), torch.float32).normalise(named))

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
    largest = largest_bucket([(tuple(shape), dtype) for shape, dtype in shapes], limit)
    buckets = list(fill_buckets(tensors.items(), limit, capacity=largest))
    for ours, other in zip(buckets, fill_buckets(tensors.items(), limit), strict=True):
        assert ours.placements == other.placements
        assert torch.equal(ours.data, other.data), "whatever the buffers' size"
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert [b.last for b in buckets] == [False] * (len(buckets) - 1) + [True]
    pieces: dict[str, list[torch.Tensor]] = {}
    rows: dict[str, int] = {}
    for bucket in buckets:
        assert bucket.data.numel() <= limit or len(bucket.placements) == 1
        assert bucket.data.numel() <= largest
        for placement in bucket.placements:
            assert placement.offset % ALIGNMENT == 0
            assert placement.start == rows.get(placement.name, 0), "rows come in order"
            got = view(bucket.data, placement)
            assert got.dtype == tensors[placement.name].dtype
            rows[placement.name] = placement.start + (len(got) if got.dim() else 1)
            pieces.setdefault(placement.name, []).append(got)
    assert list(pieces) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat(pieces[name]) if len(pieces[name]) > 1 else pieces[name][0], tensor)


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


def test_a_sender_holds_one_gathered_tensor_at_a_time():
    """What has been copied is gone before the next tensor is made; gathering it anew takes as much memory again."""
    held: list[weakref.ref] = []
    most = 0

    def gathered(named) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in named:
            most = max(most, sum(each() is not None for each in held))
            memory = tensor.double().numpy().copy()
            held.append(weakref.ref(memory))  # a view of it, as a detached tensor, keeps it alive
            fresh = torch.from_numpy(memory)
            del memory
            yield name, fresh
            del fresh

    layout, state = CheckpointLayout(small_model(), torch.float32), small_model().state_dict()
    for size in (1 << 10, 1 << 14, 1 << 30):
        for _ in fill_buckets(layout.normalise(gathered(state.items())), size):
            pass
        assert most == 0, size
        held.clear()
    for _ in fill_buckets(layout.normalise(gathered(split_experts(state.items()))), 1 << 14):
        pass
    layers = {name.partition(".mlp.experts.")[0] for name in layout.specs if ".mlp.experts." in name}
    experts = sum(".mlp.experts." in name for name in layout.specs) // len(layers)
    assert len(layers) > 1
    assert 0 < most < experts, "one by one they wait for those of their layer, no longer"


def test_header_round_trip():
    bucket = next(iter(fill_buckets([("a", torch.zeros(2, 3)), ("b", torch.zeros((), dtype=torch.bfloat16))], 10**6)))
    spec = BucketSpec("run", "12", 3, True, bucket.placements, "xxh3:0", "/dev/shm/x")
    assert BucketSpec.decode(spec.encode()) == spec


def test_manifest_round_trip():
    manifest = Manifest("run", "12", (("a", (2, 3), "float32"), ("b", (), "bfloat16")), 26, "11")
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.digest == Manifest("other", "1", tuple(reversed(manifest.tensors)), 26).digest
    assert manifest.digest != Manifest("run", "12", (("a", (3, 2), "float32"), manifest.tensors[1]), 26).digest


def test_report_metrics():
    report = SyncReport("3", 2, 4 * 10**9, 1, seconds={"gather": 0.5, "total": 2.0})
    metrics = report.as_metrics()
    assert metrics["weight_sync/gather_seconds"] == 0.5 and metrics["weight_sync/total_seconds"] == 2.0
    assert metrics["weight_sync/bytes"] == 4 * 10**9 and metrics["weight_sync/goodput_gbps"] == 2.0


class Loopback:
    """Transport into a loader of this process; counts the buffers that are not free."""

    def __init__(self) -> None:
        self.released = 0

    def buffer(self, index, size, device):
        return new_buffer(index, size, device)

    def send(self, bucket, spec, engines):
        return [engine.send_bucket(spec, bucket.data) for engine in engines]

    def release(self):
        self.released += 1

    def close(self): ...


@pytest.fixture
def layout() -> CheckpointLayout:
    return CheckpointLayout(small_model(), torch.float32)


@pytest.fixture
def engine(monkeypatch, layout) -> LocalEngine:
    monkeypatch.setattr(loader, "STATE", loader.LoaderState())
    return LocalEngine(Receiver({name: spec.shape for name, spec in layout.wire.items()}))


@pytest.fixture
def publisher(layout, engine) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(layout, Loopback(), [engine], 8192)
    yield publisher
    publisher.close()


class TestPublisher:
    def test_publish(self, publisher, engine, layout):
        model = small_model(seed=5)
        report = publisher.publish(model.state_dict(), "7")
        assert engine.receiver.holds(model.state_dict())
        assert (report.version, report.tensors, report.buckets) == ("7", len(layout.wire), len(engine.specs))
        assert report.nbytes >= layout.nbytes and report.buckets > 5
        assert {s.version for s in engine.specs} == {"7"} and len({s.run_id for s in engine.specs}) == 1
        assert engine.calls[:2] == ["pause", "begin"] and engine.calls[-2:] == ["commit", "resume"]
        assert loader.STATE.label == "7" and loader.STATE.session is None
        assert publisher.status()["local"].version == "7" and publisher.transport.released == 1
        within = ("gather", "checksum", "transfer", "apply")
        assert sum(v for k, v in report.seconds.items() if k not in (*within, "total")) <= report.seconds["total"]

    def test_every_publish_is_an_update_of_its_own(self, publisher, engine):
        checksums = [publisher.publish(small_model(seed).state_dict(), seed).checksum for seed in (1, 2, 1)]
        assert len({s.run_id for s in engine.specs}) == 3
        assert checksums[0] == checksums[2] != checksums[1]

    def test_the_checksum_does_not_depend_on_buckets_or_layout(self, publisher, engine, layout):
        state = small_model().state_dict()
        sums = {publisher.publish(named, "1").checksum for named in (state, dict(split_experts(state.items())))}
        for size in (512, 1 << 20):
            sums.add(WeightPublisher(layout, Loopback(), [engine], size).publish(state, "1").checksum)
        assert len(sums) == 1

    @pytest.mark.parametrize("what", ["missing", "extra", "prefix", "rounded", "half", "half expert", "twice"])
    def test_refused_before_the_engine_hears_of_it(self, publisher, engine, what):
        state = small_model().state_dict()
        edits = {
            "missing": {n: t for n, t in state.items() if not n.endswith("expert_bias")},
            "extra": state | {"extra": torch.zeros(1)},
            "prefix": {f"module.{n}": t for n, t in state.items()},
            "rounded": {n: t.bfloat16() if n.endswith("expert_bias") else t for n, t in state.items()},
            "half": {n: t[:, : t.shape[1] // 2] if n.endswith("gate_up_proj") else t for n, t in state.items()},
        }
        one_by_one = dict(split_experts(state.items()))
        halves = {n: t[: len(t) // 2] if n.endswith("experts.0.up_proj.weight") else t for n, t in one_by_one.items()}
        edits |= {"half expert": halves, "twice": {**one_by_one, **state}}
        for named in (edits[what], list(edits[what].items())):
            with pytest.raises(LayoutError):
                publisher.publish(named, "1")
        assert not engine.calls

    def test_gate_and_up_exchanged(self, publisher, engine):
        """They have one shape. Under exchanged names both arrive as they are named: nothing can tell, and two updates
        differ in their checksums alone. A mixture of both names is refused."""
        one_by_one = dict(split_experts(small_model().state_dict().items()))
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        swap = lambda name: re.sub(r"(gate_proj|up_proj)(?=\.weight$)", lambda match: other[match[1]], name)
        right = publisher.publish(one_by_one, 1)
        wrong = publisher.publish({swap(name): tensor for name, tensor in one_by_one.items()}, 2)
        assert wrong.checksum != right.checksum
        half = [(swap(name) if ".gate_proj" in name else name, tensor) for name, tensor in one_by_one.items()]
        with pytest.raises(LayoutError, match="is sent twice"):
            publisher.publish(half, 3)

    def test_a_stream_that_lacks_a_buffer_leaves_the_engine_closed(self, publisher, engine):
        """What ``named_parameters()`` alone would send."""
        with pytest.raises(LayoutError, match="expert_bias"):
            publisher.publish(small_model().named_parameters(), "1")
        assert "resume" not in engine.calls and "commit" not in engine.calls and engine.calls[-1] == "abort"
        assert loader.STATE.label == "torn:start->1" and publisher.status()["local"].closed
        publisher.publish(small_model().state_dict(), "2")
        assert engine.calls[-1] == "resume" and loader.STATE.label == "2" and not publisher.status()["local"].closed

    def test_an_engine_that_refuses_the_manifest_goes_on(self, publisher, engine):
        engine.begin = lambda manifest: (_ for _ in ()).throw(WeightSyncError("no"))
        with pytest.raises(WeightSyncError, match="no"):
            publisher.publish(small_model().state_dict(), "1")
        assert engine.calls == ["pause", "abort", "resume"] and not publisher.status()["local"].closed

    def test_a_bucket_damaged_on_the_way_is_sent_again(self, publisher, engine):
        damaged = []

        def flip(engine, spec, data):
            if spec.index in (0, 2, 3) and spec.index not in damaged:
                damaged.append(spec.index)
                data = data.clone()
                data[data.numel() // 3] ^= 1
            return engine.deliver(spec, data)

        engine.tamper = flip
        model = small_model(seed=8)
        assert publisher.publish(model.state_dict(), "1").resent == 3
        assert engine.receiver.holds(model.state_dict())

    def test_a_bucket_that_is_always_damaged(self, publisher, engine):
        def short(engine, spec, data):
            return engine.deliver(spec, data[:-1] if spec.index == 1 else data)

        engine.tamper = short
        with pytest.raises(WeightSyncError, match="bucket 1 has .* bytes, .* were sent"):
            publisher.publish(small_model().state_dict(), "1")
        assert engine.calls.count("bucket 1") == 3 and "resume" not in engine.calls

    @pytest.mark.parametrize("at", [0, 2, "last"])
    def test_a_lost_bucket(self, publisher, engine, at):
        """Said to have arrived, but it never did."""

        def lose(engine, spec, data):
            lost = spec.last if at == "last" else spec.index == at
            return "0" * 16 if lost else engine.deliver(spec, data)

        engine.tamper = lose
        with pytest.raises(WeightSyncError, match="was due|holds weights with checksum 0000"):
            publisher.publish(small_model().state_dict(), "1")
        assert "commit" not in engine.calls and "resume" not in engine.calls and loader.STATE.label != "1"

    def test_a_bucket_that_arrives_twice_counts_once(self, publisher, engine):
        def twice(engine, spec, data):
            engine.deliver(spec, data)
            return engine.deliver(spec, data)

        engine.tamper = twice
        model = small_model(seed=9)
        assert publisher.publish(model.state_dict(), "1").resent == 0
        assert engine.receiver.holds(model.state_dict())

    def test_weights_that_change_after_the_copy_are_noticed(self, publisher, engine):
        """Something else writes into the engine's memory while the update goes on."""

        def overwrite(engine, spec, data):
            if spec.last:
                engine.receiver.held["model.layers.1.mlp.experts.w2_weight"].data[0, 0, 0] += 1
            return engine.deliver(spec, data)

        engine.tamper = overwrite
        with pytest.raises(WeightSyncError, match="holds weights with checksum .*, the trainer sent"):
            publisher.publish(small_model().state_dict(), "1")
        assert "commit" not in engine.calls

    def test_an_engine_that_was_restarted(self, publisher, engine):
        for version in (1, 2):
            assert not publisher.publish(small_model().state_dict(), version).strayed
        loader.STATE = loader.LoaderState()
        assert publisher.publish(small_model().state_dict(), 3).strayed == {"local": ""}
        loader.STATE.label = "99"
        assert publisher.publish(small_model().state_dict(), 4).strayed == {"local": "99"}
        loader.STATE = loader.LoaderState()
        publisher.rejoin(engine)
        assert not publisher.publish(small_model().state_dict(), 5).strayed, "it was announced"

    def test_an_engine_joins(self, publisher, engine, layout):
        other = LocalEngine(Receiver({name: spec.shape for name, spec in layout.wire.items()}), "other")
        assert publisher.rejoin(other) is None
        assert publisher.status()["other"].version is None
        # Both engines of this test share one loader, so only one of them is kept.
        publisher.engines.remove(other)
        loader.STATE.target = None
        model = small_model(seed=3)
        assert publisher.rejoin(other, model.state_dict(), "4").version == "4"
        assert other.receiver.holds(model.state_dict()) and not engine.calls
        assert publisher.status()["other"].version == "4"


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

    def test_only_the_commit_flips_the_version(self):
        bodies = []

        def answer(request):
            bodies.append(json.loads(request.content))
            return httpx.Response(
                200, json={"success": True, "message": "applied in 0.500000 s; checksum: 0123456789abcdef"}
            )

        engine = control(answer)
        assert engine.send_bucket(BucketSpec("run", "9", 0, True)) == "0123456789abcdef"
        assert engine.applied_seconds == 0.5
        engine.commit("run", "9")
        assert [body["weight_version"] for body in bodies] == [None, "9"]
        assert not any(body["flush_cache"] for body in bodies)
        assert {body["load_format"] for body in bodies} == {"weight_sync.loader.load"}

    def test_a_commit_waits_for_requests_to_leave(self):
        answers = iter([False, False, True])

        def answer(request):
            good = next(answers)
            message = "" if good else "resend: rank 0: version 9 cannot take over while requests are running"
            return httpx.Response(200 if good else 400, json={"success": good, "message": message})

        control(answer).commit("run", "9")
        assert next(answers, None) is None

    @pytest.mark.parametrize("fault", ["hangs", "dies", "refuses", "answers late"])
    def test_a_bucket_without_success(self, layout, fault):
        """Sent once, and the engine is not opened again: it may hold a part of it."""
        calls = []

        def answer(request):
            path = request.url.path
            header = json.loads(request.content).get("serialized_named_tensors")
            calls.append((path, header[0] if header else ""))
            updates = sum(path == "/update_weights_from_tensor" for path, _ in calls)
            if updates == 3 or (updates > 3 and fault in ("hangs", "dies")):
                if fault == "refuses":
                    return httpx.Response(400, json={"success": False, "message": "rank 1: KeyError: 'w13'"})
                raise httpx.ConnectError("gone") if fault == "dies" else httpx.ReadTimeout("timed out")
            return httpx.Response(200, json={"success": True, "message": ""})

        publisher = WeightPublisher(layout, SharedMemoryTransport(), [control(answer)], 8192)
        with pytest.raises(EngineFailed, match="version 1 failed at bucket 1: engine http://engine:1") as failure:
            publisher.publish(small_model().state_dict(), 1)
        status = publisher.status()["http://engine:1"]
        assert status.closed and "/continue_generation" not in [path for path, _ in calls]
        assert bool(failure.value.lost) == status.lost == (fault in ("hangs", "dies"))
        # Manifest, two buckets, the end of the update.
        payloads = [payload for path, payload in calls if path == "/update_weights_from_tensor"]
        assert len(payloads) == len(set(payloads)) == 4
        publisher.close()

    def test_every_rank_gets_its_own_payload(self):
        bodies = []

        def answer(request):
            bodies.append(json.loads(request.content))
            return httpx.Response(200, json={"success": True})

        engine = control(answer)
        engine.tp_size = 2
        engine.abort("run", "9")
        assert len(bodies[0]["serialized_named_tensors"]) == 2


class TestSharedMemory:
    def test_files_do_not_stay(self, layout, engine):
        seen = []

        def note(engine, spec, data):
            seen.append(spec.file)
            return engine.deliver(spec, data)

        engine.tamper = note
        transport = SharedMemoryTransport()
        publisher = WeightPublisher(layout, transport, [engine], 8192)
        model = small_model(seed=2)
        publisher.publish(model.state_dict(), "1")
        assert engine.receiver.holds(model.state_dict())
        assert len(seen) > 3 and not list(transport.directory.iterdir())
        publisher.close()
        assert not transport.directory.exists()

    def test_no_room(self, layout, engine):
        """A device that is always full, in the place of the first bucket's file."""
        transport = SharedMemoryTransport()
        (transport.directory / "0.bin").symlink_to("/dev/full")
        with pytest.raises(WeightSyncError, match="bucket 0 of .* bytes cannot be written .*; make room"):
            WeightPublisher(layout, transport, [engine], 8192).publish(small_model().state_dict(), "1")
        transport.close()
