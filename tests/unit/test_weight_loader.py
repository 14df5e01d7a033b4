"""Weight refresh without an engine, the engine's side: plan of copies, checksums, the loader's state machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import DATA, ROOT, small_config, small_model
from tests.unit.receiver import Receiver, engine_shapes, say, status_of
from weight_sync import loader
from weight_sync.buckets import fill_buckets
from weight_sync.checksum import MODULUS, TensorSums, box_sum, factors, wire_checksum
from weight_sync.layout import CheckpointLayout, LLaDA2Layout
from weight_sync.messages import Abort, BucketSpec, Commit, Manifest, Slots, mixture
from weight_sync.plan import Heads, PlanError, make_plan

LAYOUT = CheckpointLayout(small_model(), torch.float32)
WIRE = {name: spec.shape for name, spec in LAYOUT.wire.items()}


def heads_of(config) -> Heads:
    return Heads(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])


def read(name: str) -> dict:
    return json.loads((DATA / f"{name}_config.json").read_text())


class TestPlan:
    @pytest.mark.parametrize(
        ("name", "names", "parameters", "billions"),
        [("llada2_mini", 14813, 239, 16.256), ("llada2_flash", 24161, 383, 102.890)],
    )
    def test_published_sizes(self, name, names, parameters, billions):
        config = read(name)
        layout = LLaDA2Layout.from_config(config)
        wire = {n: spec.shape for n, spec in layout.wire.items()}
        plan = make_plan(wire, engine_shapes(wire, config), heads_of(config))
        assert len(layout.specs) == names and len(plan.elements) == parameters
        assert round(sum(plan.elements.values()) / 1e9, 3) == billions

    @pytest.mark.parametrize("name", ["llada2_mini", "llada2_flash", "sdar_30b_a3b", "sdar_8b"])
    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_ranks_together_hold_everything_once(self, name, size):
        """Counted parts of all ranks are the whole checkpoint; with more ranks than key-value heads, heads repeat."""
        config = read(name)
        wire = {n: spec.shape for n, spec in CheckpointLayout.from_config(config).wire.items()}
        shapes = engine_shapes(wire, config, size)
        counted = dict.fromkeys(wire, 0)
        for rank in range(size):
            plan = make_plan(wire, shapes, heads_of(config), rank, size)
            for tensor, parts in plan.parts.items():
                for part in parts:
                    count = 1
                    for extent in part.shape:
                        count *= extent
                    counted[tensor] += part.first * count
        for tensor, shape in wire.items():
            expected = 1
            for extent in shape:
                expected *= extent
            assert counted[tensor] == expected, tensor

    def test_a_parameter_without_a_tensor(self):
        shapes = engine_shapes(WIRE, asdict(small_config())) | {"extra.weight": (3,)}
        with pytest.raises(PlanError, match=r"no tensor fills parameter 'extra.weight'"):
            make_plan(WIRE, shapes, heads_of(asdict(small_config())))

    def test_a_tensor_without_a_parameter(self):
        shapes = engine_shapes(WIRE, asdict(small_config()))
        del shapes["model.norm.weight"]
        with pytest.raises(PlanError, match="'model.norm.weight', which the engine does not have"):
            make_plan(WIRE, shapes, heads_of(asdict(small_config())))

    def test_transposed_experts(self):
        shapes = engine_shapes(WIRE, asdict(small_config()))
        name = "model.layers.1.mlp.experts.w2_weight"
        shapes[name] = (shapes[name][0], shapes[name][2], shapes[name][1])
        with pytest.raises(PlanError, match="transposed experts"):
            make_plan(WIRE, shapes, heads_of(asdict(small_config())))

    def test_experts_of_another_rank_only(self):
        shapes = engine_shapes(WIRE, asdict(small_config()))
        name = "model.layers.1.mlp.experts.w13_weight"
        shapes[name] = (shapes[name][0] // 2, *shapes[name][1:])
        with pytest.raises(PlanError, match="expert parallelism"):
            make_plan(WIRE, shapes, heads_of(asdict(small_config())))

    def test_up_before_gate(self):
        shapes = engine_shapes(WIRE, asdict(small_config()))
        name = "model.layers.1.mlp.experts.gate_up_proj"
        plan = make_plan(WIRE, shapes, heads_of(asdict(small_config())), up_first=True)
        half = WIRE[name][1] // 2
        assert [(p.source[1].start, p.target[1].start) for p in plan.parts[name]] == [(0, half), (half, 0)]

    def test_two_ranks_put_together(self):
        """Copies of both ranks, glued as SGLang shards them, are the tensors."""
        config, state = asdict(small_config()), small_model().state_dict()
        shapes = engine_shapes(WIRE, config, 2)
        held: list[dict[str, torch.Tensor]] = []
        for rank in (0, 1):
            plan = make_plan(WIRE, shapes, heads_of(config), rank, 2)
            held.append({name: torch.full(shape, -7.0) for name, shape in shapes.items()})
            for name, parts in plan.parts.items():
                for part in parts:
                    held[rank][part.parameter][part.target] = state[name][part.source]
        a, b = held
        name = "model.layers.1.mlp.experts.gate_up_proj"
        gate_up = [t["model.layers.1.mlp.experts.w13_weight"].chunk(2, 1) for t in held]
        assert torch.equal(torch.cat([half for i in (0, 1) for half in (gate_up[0][i], gate_up[1][i])], 1), state[name])
        name = "model.layers.0.attention.query_key_value.weight"
        d, q, kv = config["head_dim"], config["num_attention_heads"] // 2, config["num_key_value_heads"] // 2
        sizes = [q * d, kv * d, kv * d]
        pieces = [torch.cat(pair) for pair in zip(a[name].split(sizes), b[name].split(sizes), strict=True)]
        assert torch.equal(torch.cat(pieces), state[name])
        for name, dim in (
            ("model.layers.1.mlp.experts.down_proj", 2),
            ("model.layers.0.attention.dense.weight", 1),
            ("lm_head.weight", 0),
        ):
            parameter = name.replace("experts.down_proj", "experts.w2_weight")
            glued = torch.cat([a[parameter], b[parameter]], dim)
            assert torch.equal(glued[: len(state[name])], state[name]), name


def plain_sum(tensor: torch.Tensor) -> int:
    """The formula, word by word."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    a, b = (factors(which, 64, torch.device("cpu")).tolist() for which in (0, 1))
    total = 0
    for r, row in enumerate(rows):
        data = row.contiguous().view(torch.uint8).numpy().tobytes()
        data += b"\0" * (-len(data) % 8)
        for c in range(len(data) // 8):
            total += a[r] * b[c] * int.from_bytes(data[8 * c : 8 * c + 8], "little", signed=True)
    return total % MODULUS


class TestChecksum:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(), (1,), (5,), (16,), (3, 7), (4, 8), (2, 3, 5), (3, 4, 16)])
    def test_formula(self, shape, dtype):
        tensor = torch.randn(shape).to(dtype)
        assert int(box_sum(tensor)) % MODULUS == plain_sum(tensor)

    @given(st.data())
    @settings(deadline=None, max_examples=40)
    def test_parts_add_up(self, data):
        """However a tensor is cut (columns at whole words), also where the parts lie strided in something larger."""
        shape = [data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), 4 * data.draw(st.integers(1, 5))]
        tensor = torch.randn(shape).bfloat16()
        cuts = [data.draw(st.integers(0, n)) for n in (shape[0], shape[1], shape[2] // 4)]
        cuts[2] *= 4
        total = 0
        for corner in range(8):
            box = [
                slice(0, c) if corner >> i & 1 else slice(c, n)
                for i, (c, n) in enumerate(zip(cuts, shape, strict=True))
            ]
            total += int(box_sum(tensor[tuple(box)], [s.start for s in box], shape[1]))
        assert total % MODULUS == int(box_sum(tensor)) % MODULUS

    @pytest.mark.parametrize("where", [(0, 0, 0), (3, 4, 15), (1, 2, 3)])
    def test_every_flipped_bit_shows(self, where):
        tensor = torch.randn(4, 5, 16).bfloat16()
        before = int(box_sum(tensor))
        for bit in range(16):
            tensor.view(torch.int16)[where] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert int(box_sum(tensor)) != before
            tensor.view(torch.int16)[where] ^= 1 << bit if bit < 15 else -(1 << 15)
        assert int(box_sum(tensor)) == before

    def test_exchanged_things_show(self):
        tensor = torch.randn(4, 6, 16)
        experts, halves = tensor[[1, 0, 2, 3]], tensor[:, [3, 4, 5, 0, 1, 2]]
        assert len({int(box_sum(t)) for t in (tensor, experts, halves, -tensor)}) == 4
        sums = []
        for names in (("a", "b"), ("b", "a")):
            both = TensorSums()
            for name, part in zip(names, (tensor, experts), strict=True):
                both.add(name, part)
            sums.append(both.value())
        assert sums[0] != sums[1]

    def test_a_part_within_a_word(self):
        with pytest.raises(ValueError, match="begins within an 8-byte word"):
            box_sum(torch.zeros(2, 3), (0, 1))

    def test_large_tensors_in_pieces(self, monkeypatch):
        tensor = torch.randn(3, 40, 24)
        whole = int(box_sum(tensor))
        monkeypatch.setattr("weight_sync.checksum.CHUNK", 64)
        assert int(box_sum(tensor)) == whole

    def test_the_kernel_for_gpus_computes_the_same(self):
        """In Triton's interpreter, in a process of its own because it has to be chosen before the import."""
        code = (
            "import torch\n"
            "from weight_sync.checksum import _sum_words, factors\n"
            "from weight_sync.triton_sum import sum_words\n"
            "a, b = (factors(i, 4096, torch.device('cpu')) for i in (0, 1))\n"
            "for shape, first, per in (((1, 1, 1), 0, 1), ((3, 50, 300), 7, 60), ((2, 33, 128), 5, 33)):\n"
            "    words = torch.randint(-2**62, 2**62, (shape[0], shape[1] + 2, shape[2] + 8))[:, 1:-1, 3:-5]\n"
            "    expected = _sum_words(words, a, b[: shape[2]], first, per)\n"
            "    assert int(sum_words(words, a, b[: shape[2]], first, per)) == int(expected), shape\n"
        )
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def receiver(monkeypatch) -> Receiver:
    monkeypatch.setattr(loader, "STATE", loader.LoaderState())
    return Receiver(WIRE)


def manifest(version: str = "1", run: str = "run", **changes) -> Manifest:
    return replace(Manifest(run, version, LAYOUT.tensors(), LAYOUT.nbytes), **changes)


def parts(
    version: str = "1", run: str = "run", size: int = 4096, seed: int = 0
) -> list[tuple[BucketSpec, torch.Tensor]]:
    buckets = fill_buckets(LAYOUT.normalise(small_model(seed).state_dict().items()), size)
    return [
        (
            BucketSpec(
                run, version, b.index, b.last, b.placements, wire_checksum(b.data, b.placements), nbytes=b.data.numel()
            ),
            b.data,
        )
        for b in buckets
    ]


def deliver(receiver: Receiver, spec: BucketSpec, data: torch.Tensor):
    return status_of(receiver, spec, [data])


class TestLoader:
    def test_a_complete_update(self, receiver):
        update = parts()
        assert len(update) > 5
        say(receiver, manifest())
        assert loader.STATE.label is None
        for spec, data in update:
            answer = say(receiver, spec, [data])
            assert loader.STATE.status.tensors == len(spec.placements) and loader.STATE.label == "torn:start->1"
        say(receiver, Commit("run", "1", answer.partition("checksum: ")[2]))
        assert receiver.holds(small_model().state_dict())
        assert loader.STATE.session is None and loader.STATE.label == "1"

    def test_a_manifest_of_another_model(self, receiver):
        tensors = tuple((n, s, "bfloat16" if n == "lm_head.weight" else d) for n, s, d in LAYOUT.tensors())
        status = status_of(receiver, manifest(tensors=tensors))
        assert (
            not status.ok and "2 tensors of the manifest are not those of this engine, e.g. ('lm_head" in status.message
        )
        assert not deliver(receiver, *parts()[0]).ok and loader.STATE.label is None

    def test_another_base_version(self, receiver):
        loader.STATE.label = "4"
        assert status_of(receiver, manifest("5", base_version="4")).ok
        status = status_of(receiver, manifest("6", base_version="5"))
        assert not status.ok and status.message == "the engine holds 4, not the base version 5; start over"

    def test_a_bucket_out_of_order_can_be_sent_again(self, receiver):
        update = parts()
        say(receiver, manifest())
        deliver(receiver, *update[0])
        status = deliver(receiver, *update[2])
        assert not status.ok and status.resend and status.message == "bucket 2 arrived where 1 was due"
        assert all(deliver(receiver, *part).ok for part in update[1:])

    def test_a_bucket_without_a_beginning(self, receiver):
        status = deliver(receiver, *parts()[0])
        assert not status.ok and not status.resend
        assert status.message == "bucket 0 of version 1 has no open update; start over"

    @pytest.mark.parametrize("other", [{"version": "2"}, {"run": "another"}])
    def test_buckets_of_two_updates(self, receiver, other):
        """The stranger is turned away, and the open update is not disturbed."""
        say(receiver, manifest())
        deliver(receiver, *parts()[0])
        status = deliver(receiver, *parts(**other)[1])
        assert not status.ok and "has no open update" in status.message
        assert all(deliver(receiver, *part).ok for part in parts()[1:])

    def test_a_new_beginning_replaces_an_unfinished_update(self, receiver):
        say(receiver, manifest())
        for part in parts()[:3]:
            assert deliver(receiver, *part).ok
        say(receiver, manifest("2", "again"))
        for part in parts("2", "again", seed=3):
            assert deliver(receiver, *part).ok
        assert loader.STATE.label == "torn:start->2"
        say(receiver, Commit("again", "2"))
        assert receiver.holds(small_model(3).state_dict())

    @pytest.mark.parametrize("at", [0, 100, -1])
    def test_a_flipped_bit(self, receiver, at):
        """Refused before any of it is used: the first bucket leaves the old weights as they were."""
        say(receiver, manifest())
        [(spec, data), *_] = parts()
        used = spec.placements[-1]
        wrong = data.clone()
        wrong[at if at >= 0 else used.offset + used.nbytes - 1] ^= 64
        status = deliver(receiver, spec, wrong)
        assert not status.ok and status.resend and "damaged" in status.message
        assert loader.STATE.label is None and all(bool((p == -7).all()) for p in receiver.held.values())
        assert deliver(receiver, spec, data).ok

    def test_a_device_checksum_on_the_host(self, receiver):
        """What a GPU sender computes is checked by a CPU engine as well."""
        from weight_sync.checksum import placement_sums, sums_checksum

        say(receiver, manifest())
        [(spec, data), *_] = parts()
        wrong = data.clone()
        wrong[8] ^= 1
        spec = replace(spec, checksum=sums_checksum(spec.placements, placement_sums(data, spec.placements)))
        assert deliver(receiver, spec, wrong).resend and deliver(receiver, spec, data).ok

    def test_one_byte_short(self, receiver):
        say(receiver, manifest())
        spec, data = parts()[0]
        status = deliver(receiver, spec, data[:-1])
        assert status.resend and f"has {spec.nbytes - 1} bytes, {spec.nbytes} were sent" in status.message

    def test_a_duplicate_changes_nothing(self, receiver):
        update = parts()
        say(receiver, manifest())
        for part in update:
            first = deliver(receiver, *part)
            again = deliver(receiver, *part)
            assert again.ok and again.message == "duplicate" and again.checksum == first.checksum
        say(receiver, Commit("run", "1"))
        assert status_of(receiver, Commit("run", "1")).message == "duplicate"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (dict(name="nonsense"), "'nonsense' is not part of this checkpoint"),
            (dict(dtype="int32"), "arrived as int32, the engine needs torch.float32"),
            (dict(offset=13), "start at multiples of 256"),
            (dict(offset=1 << 30), "end within the bucket"),
            (dict(start=1), "needs|continues at row 1"),
            (dict(shape=(1, 1)), "the engine needs"),
        ],
    )
    def test_a_wrong_placement(self, receiver, change, message):
        """A sender's mistake, with a checksum that fits: nothing is written."""
        say(receiver, manifest())
        spec, data = parts()[0]
        spec.placements[0] = replace(spec.placements[0], **change)
        status = deliver(receiver, spec, data)
        assert not status.ok and not status.resend
        import re

        assert re.search(message, status.message), status.message
        assert all(bool((p == -7).all()) for p in receiver.held.values())

    def test_a_tensor_that_arrives_twice(self, receiver):
        update = parts()
        say(receiver, manifest())
        deliver(receiver, *update[0])
        spec = replace(update[0][0], index=1)
        status = deliver(receiver, spec, update[0][1])
        assert not status.ok and "arrived twice" in status.message

    def test_a_tensor_that_never_arrives(self, receiver):
        update = parts()
        say(receiver, manifest())
        missing = update[2][0].placements.pop()
        statuses = [deliver(receiver, spec, data) for spec, data in update]
        bad = next(status for status in statuses if not status.ok)
        assert missing.name in bad.message and ("never arrived" in bad.message or "continues at row" in bad.message)
        assert not status_of(receiver, Commit("run", "1")).ok and loader.STATE.label == "torn:start->1"

    def test_a_commit_too_early(self, receiver):
        say(receiver, manifest())
        for part in parts()[:-1]:
            deliver(receiver, *part)
        status = status_of(receiver, Commit("run", "1"))
        assert not status.ok and "is not complete" in status.message
        assert deliver(receiver, *parts()[-1]).ok, "the update goes on"

    def test_a_commit_with_another_checksum(self, receiver):
        say(receiver, manifest())
        for part in parts():
            say(receiver, part[0], [part[1]])
        status = status_of(receiver, Commit("run", "1", "0" * 16))
        assert not status.ok and "the engine's weights have checksum" in status.message
        assert loader.STATE.label == "torn:start->1"

    def test_a_commit_while_requests_run(self, receiver):
        say(receiver, manifest())
        for part in parts():
            say(receiver, part[0], [part[1]])
        loader.STATE.flush = lambda: False
        assert status_of(receiver, Commit("run", "1")).resend and loader.STATE.label == "torn:start->1"
        loader.STATE.flush = lambda: True
        assert status_of(receiver, Commit("run", "1")).ok and loader.STATE.label == "1"

    def test_abort(self, receiver):
        say(receiver, manifest())
        say(receiver, Abort("another", "1"))
        assert loader.STATE.session is not None
        say(receiver, Abort("run", "1"))
        assert loader.STATE.session is None and not deliver(receiver, *parts()[0]).ok

    def test_an_error_does_not_kill_the_scheduler(self, receiver, monkeypatch):
        update = parts()
        say(receiver, manifest())
        deliver(receiver, *update[0])

        def broken(*args):
            raise KeyError("no such parameter")

        with monkeypatch.context() as patch:
            patch.setattr("weight_sync.target.Progress.copy", broken)
            status = deliver(receiver, *update[1])
        assert not status.ok and status.message == "KeyError: 'no such parameter'; start over"
        assert not deliver(receiver, *update[1]).ok, "a broken update cannot be continued"
        say(receiver, manifest("1", "again"))
        assert all(deliver(receiver, *part).ok for part in parts(run="again"))

    @pytest.mark.parametrize("payload", [[], [("{", torch.zeros(1))], [("{}", torch.zeros(1))], [("a",)], None, 7])
    def test_a_garbled_payload(self, receiver, payload):
        loader.load(receiver, payload)
        assert not loader.STATE.status.ok

    def test_bytes_in_a_file(self, receiver, tmp_path):
        say(receiver, manifest())
        for spec, data in parts():
            file = tmp_path / f"{spec.index}.bin"
            missing = status_of(receiver, replace(spec, file=str(file)))
            assert missing.resend and "No such file" in missing.message
            data.numpy().tofile(file)
            assert status_of(receiver, replace(spec, file=str(file))).ok
        assert receiver.holds(small_model().state_dict())

    def test_bytes_in_the_senders_buffers(self, receiver):
        """Two buffers are announced once; the sender fills them in turn."""
        buffers = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
        say(receiver, manifest())
        spec, data = parts()[0]
        assert status_of(receiver, replace(spec, slot=0)).resend, "not announced"
        say(receiver, Slots("run", "1"), buffers)
        for spec, data in parts():
            buffers[spec.index % 2][: len(data)] = data
            assert status_of(receiver, replace(spec, slot=spec.index % 2)).ok
        assert receiver.holds(small_model().state_dict())
        say(receiver, Commit("run", "1"))

    def test_one_rank_of_several(self):
        """The answer is that of the rank that failed, and a rank without a status has failed."""
        good = loader.LoaderStatus(True, checksum=5)
        assert loader.answer([good, loader.LoaderStatus(False, "broken")]) == (False, "rank 1: broken")
        labels = [loader.LoaderStatus(True, label=label, held=label) for label in ("1", "torn:1->2")]
        assert loader.answer(labels)[1].endswith("; holds torn:1->2"), "one rank's mixture is the engine's"
        refused = loader.LoaderStatus(False, "odd", resend=True, label="1")
        for said in (loader.answer([refused, labels[1]]), loader.answer([labels[1], good])):
            assert mixture(said[1]) == "torn:1->2", "and in whatever it answers"
        assert loader.answer([refused, labels[1]])[1] == "resend: rank 0: odd; holds torn:1->2"
        assert mixture("applied in 0.1 s; holds torn:1->2; checksum: 00") == "torn:1->2"
        assert not mixture(loader.answer(labels[:1] * 2)[1]) and not mixture("rank 0: odd")
        assert loader.answer(labels[:1] * 2)[1].endswith("; holds 1")
        assert loader.answer([good, None]) == (False, "rank 1: the loader did not run")
        assert loader.answer([loader.LoaderStatus(False, "odd", resend=True), good]) == (False, "resend: rank 0: odd")

    def test_checksums_of_ranks_add_up(self, receiver):
        say(receiver, manifest())
        loader.STATE.session.share = 17
        shares = [loader.LoaderStatus(True, checksum=MODULUS - 1), loader.LoaderStatus(True, checksum=17)]
        assert loader.answer(shares) == (True, f"applied in 0.000000 s; checksum: {16:016x}")
        assert loader.STATE.session.total == 16
