"""Checkpoints as versions in a directory, and what a push refuses before it sends a byte."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.models.checkpoint import load_model
from tests.support import write_tiny_model
from tests.unit.test_weight_service import Memory, Rig
from weight_sync.client import ServiceControl
from weight_sync.layout import CheckpointLayout, LayoutError
from weight_sync.messages import WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.push import main, push, run_id
from weight_sync.staging import Staging
from weight_sync.transports.directory import INDEX, DirectoryTransport, headers, tensors, verify, versions

BUCKET = 40_000


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "base"
    write_tiny_model(path, seed=3, layers=2, hidden=32, head_dim=16)
    return path


@pytest.fixture
def rig(tmp_path, base) -> Iterator[Rig]:
    made = Rig(tmp_path)
    made.model = load_model(base)
    made.layout = made.service.layout = CheckpointLayout(made.model, torch.float32)
    made.engine.tensors = Memory(made.layout).tensors
    with made.http:
        yield made


def writer(base: Path, root: Path, **options) -> WeightPublisher:
    """A publisher without engines, whose buckets cut tensors."""
    layout = CheckpointLayout.from_config(json.loads((base / "config.json").read_text()), torch.float32)
    return WeightPublisher(layout, DirectoryTransport(root, base, **options), [], 10_000)


def test_versions_lie_side_by_side(base, tmp_path):
    root, model = tmp_path / "versions", load_model(base)
    publisher = writer(base, root)
    for version in (1, 2, 3):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        publisher.publish(model.state_dict(), version)
    assert versions(root) == [2, 3] and sorted(d.name for d in root.iterdir()) == ["v2", "v3"]
    assert verify(root / "v3")["version"] == "3"
    state = load_model(root / "v3").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert {name for name, _ in tensors(root / "v3")} == {name for name, _ in tensors(base)}, "published names"
    assert (root / "v3" / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond ``nbytes``, as a full disk or a quota would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_version_that_is_damaged_behind_the_check_of_its_server(rig, base, tmp_path, monkeypatch):
    """The server asks for it again and reads the same files, which are there already."""
    transport = DirectoryTransport(tmp_path / "versions", base)
    publisher = WeightPublisher(rig.layout, transport, [rig.client()], 20_000)
    verify, damaged = Staging.verify, []

    def damaging(staging: Staging) -> str:
        if not damaged:
            damaged.append(max(staging.specs))
            content = bytearray(staging.file(damaged[0]).read_bytes())
            content[9] ^= 1
            staging.file(damaged[0]).write_bytes(content)
        return verify(staging)

    monkeypatch.setattr(Staging, "verify", damaging)
    report = publisher.publish(rig.model.state_dict(), 1)
    assert report.resent == 1 and damaged and report.checksum == rig.engine.checksum()
    assert rig.state() == ("serving", "1") and rig.holds() and versions(tmp_path / "versions") == [1]
    assert publisher.publish(rig.model.state_dict(), 2).resent == 0 and rig.state() == ("serving", "2")


@pytest.mark.parametrize("between", [False, True])
def test_a_writer_that_was_killed_while_it_replaced_a_version(base, tmp_path, between):
    root, model = tmp_path / "versions", load_model(base)
    publisher = writer(base, root)
    publisher.publish(model.state_dict(), 1)
    if between:
        (root / "v1").rename(root / ".v1.replaced")
    else:
        shutil.copytree(root / "v1", root / ".v1.replaced")
    for version in (2, 1):
        publisher.publish(model.state_dict(), version)
        assert versions(root) == [1, 2] and not list(root.glob(".*")) and verify(root / "v1")


def test_a_full_disk_leaves_the_old_version(base, tmp_path):
    root, model = tmp_path / "versions", load_model(base)
    publisher = writer(base, root)
    publisher.publish(model.state_dict(), 1)
    before = dict(tensors(root / "v1"))
    with (
        small_files(8_000),
        pytest.raises(WeightSyncError, match=r"version 2 cannot be written to .*versions: .*; .*v1"),
    ):
        publisher.publish(model.state_dict(), 2)
    assert sorted(d.name for d in root.iterdir()) == ["v1"]
    verify(root / "v1")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(root / "v1"))
    publisher.publish(model.state_dict(), 2)
    assert versions(root) == [1, 2]


def test_a_full_disk_where_buckets_wait(rig, base):
    """The server refuses the bucket by name and serves on; there is no trace of what was begun."""
    with small_files(8_000), pytest.raises(WeightSyncError, match=r"\(507\): bucket 0 cannot be written to .*staging"):
        push(rig.client(), base, 1, BUCKET)
    assert rig.state() == ("serving", "0") and not rig.left()
    push(rig.client(), base, 1, BUCKET)
    assert rig.state() == ("serving", "1") and rig.holds()


@pytest.mark.parametrize("damage", ["flip", "cut", "lost", "extra"])
def test_a_damaged_version_is_refused(rig, base, tmp_path, damage):
    writer(base, tmp_path / "versions").publish(load_model(base).state_dict(), 1)
    path = tmp_path / "versions" / "v1"
    file = sorted(path.glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-5] ^= 16
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-8])
    elif damage == "lost":
        file.unlink()
    else:
        (path / "zzz.safetensors").write_bytes(content)
    with pytest.raises(WeightSyncError, match="is damaged|cannot be read|not part of version 1"):
        push(rig.client(), path, 1)
    rig.client().open(rig.manifest())
    answer = rig.step("directory", path=str(path))
    assert answer.status_code == 422 and rig.state() == ("preparing", "0") and not rig.engine.calls


@pytest.mark.parametrize("shared", [False, True])
def test_a_checkpoint_is_pushed(rig, base, shared):
    made = push(rig.client(), base, 1, BUCKET, shared)
    assert rig.state() == ("serving", "1") and rig.holds() and not rig.left()
    assert made.checksum == rig.engine.checksum() and (made.sent == 0) is shared
    again = push(rig.client(), base, 1, BUCKET, shared)
    assert again.sent == 0 and rig.engine.calls.count("commit") == 1, "a repeated push is a no-op"


def test_an_interrupted_push_goes_on(rig, base):
    """Nothing is sent twice."""
    client = rig.client()
    put, allowed = client.put_bucket, [2]

    def dies(spec, data):
        if not allowed[0]:
            raise KeyboardInterrupt
        allowed[0] -= 1
        put(spec, data)

    client.put_bucket = dies
    with pytest.raises(KeyboardInterrupt):
        push(client, base, 1, BUCKET)
    assert rig.state() == ("preparing", "0") and len(rig.left()) == 2
    first = sum(file.stat().st_size for file in rig.left())
    made = push(rig.client(), base, 1, BUCKET)
    assert rig.state() == ("serving", "1") and rig.holds()
    whole = push(rig.client(), base, 2, BUCKET).sent
    assert made.sent == whole - first


def test_what_was_damaged_is_sent_again(rig, base):
    client = rig.client()
    put, spoil = client.put_bucket, [1, 3]

    def flips(spec, data):
        if spec.index in spoil:
            spoil.remove(spec.index)
            data = data.clone()
            data[9] ^= 1
        put(spec, data)

    client.put_bucket = flips
    push(client, base, 1, BUCKET)
    assert not spoil and rig.state() == ("serving", "1") and rig.holds()


def rewritten(base: Path, out: Path, change) -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    out.mkdir()
    (out / "config.json").write_text((base / "config.json").read_text())
    state = load_file(base / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, str(out / "model.safetensors"))
    return out


GATE, BIAS, EXPERT = (
    f"model.layers.1.mlp.{name}" for name in ("gate.weight", "gate.expert_bias", "experts.0.up_proj.weight")
)
CHANGES = {
    "missing": (lambda s: s.pop(BIAS), "1 of .* tensors are missing, e.g. .*expert_bias"),
    "unexpected": (lambda s: s.update(extra=torch.zeros(1)), "'extra' is not part of this checkpoint"),
    "prefixed": (lambda s: s.update({f"module.{EXPERT}": s.pop(EXPERT)}), "'module.* is not part of this checkpoint"),
    "mis-shaped": (lambda s: s.update({EXPERT: s[EXPERT][:-1]}), "up_proj.weight' has shape"),
    "mis-typed": (lambda s: s.update({GATE: s[GATE].int()}), "gate.weight' has dtype"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refused_before_the_first_byte(rig, base, tmp_path, name):
    change, message = CHANGES[name]
    with pytest.raises(LayoutError, match=message):
        push(rig.client(), rewritten(base, tmp_path / "other", change), 1)
    assert rig.state() == ("serving", "0") and rig.service.staging is None and not rig.engine.calls


def test_a_tensor_in_two_files(rig, base):
    state = load_file(base / "model.safetensors")
    save_file({EXPERT: state[EXPERT]}, str(base / "second.safetensors"))
    with pytest.raises(LayoutError, match="'.*up_proj.weight' is sent twice"):
        push(rig.client(), base, 1)


def test_a_checkpoint_of_another_size(rig, tmp_path):
    write_tiny_model(tmp_path / "larger", layers=3, hidden=32, head_dim=16)
    with pytest.raises(WeightSyncError, match=r"\(422\): \d+ tensors of the manifest are not those of this engine"):
        push(rig.client(), tmp_path / "larger", 1)
    assert rig.state() == ("serving", "0")


def test_fused_experts_are_taken(rig, base, tmp_path):
    """One tensor per projection, as some trainers write: the stock engine would leave them out."""

    def fuse(state):
        prefix = "model.layers.1.mlp.experts"
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = sorted(
                (n for n in state if n.startswith(prefix) and projection in n), key=lambda n: int(n.split(".")[5])
            )
            state[f"{prefix}.{projection}"] = torch.stack([state.pop(n) for n in names])

    push(rig.client(), rewritten(base, tmp_path / "fused", fuse), 1, BUCKET)
    assert rig.holds()


def test_no_checkpoint(rig, tmp_path, base):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(WeightSyncError, match=r"has no \*.safetensors file"):
        push(rig.client(), tmp_path / "none", 1)
    (base / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(WeightSyncError, match="model.safetensors cannot be read"):
        push(rig.client(), base, 1)


def test_something_else_answers(rig, base):
    client = rig.client()
    for body in ({"ok": True}, ["nonsense"], "<html>"):
        given = {"json": body} if not isinstance(body, str) else {"text": body}
        client.client = httpx.Client(
            base_url="http://web", transport=httpx.MockTransport(lambda _, given=given: httpx.Response(200, **given))
        )
        with pytest.raises(WeightSyncError, match="has no weight sessions; start it with `python -m rollout.server`"):
            push(client, base, 1)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", INDEX])
@pytest.mark.parametrize(("content", "why"), [("{", "Expecting"), ("{}", "it lacks"), ("7", "no JSON object")])
def test_a_damaged_index(rig, base, name, content, why):
    (base / name).write_text(content)
    with pytest.raises(WeightSyncError, match=f"{name} is damaged: .*{why}.*; copy the checkpoint again"):
        push(rig.client(), base, 1)
    assert not rig.engine.calls


WEIGHTS = {"bytes": 3, "xxh3": "0"}
INDICES = [
    ("model.safetensors.index.json", [], "it is no JSON object"),
    ("model.safetensors.index.json", {"weight_map": []}, r"its weight_map=\[\] is no object with names of files"),
    ("model.safetensors.index.json", {"weight_map": {}}, "its weight_map={} is no object with names of files"),
    ("model.safetensors.index.json", {"weight_map": {"a": 3}}, "its weight_map has 'a': 3"),
    ("model.safetensors.index.json", {"weight_map": {"a": "../x"}}, "its weight_map has 'a': '../x'"),
    ("model.safetensors.index.json", {"weight_map": {"a": "/x"}}, "its weight_map has 'a': '/x'"),
    (INDEX, {"version": "1", "files": []}, r"its files=\[\] is no object with names of files"),
    (INDEX, {"version": "1", "files": {"a": {"xxh3": "0"}}}, "its files has 'a': {'xxh3': '0'}"),
    (INDEX, {"version": "1", "files": {"a": 3}}, "its files has 'a': 3"),
    (INDEX, {"version": "1", "files": {"../x": WEIGHTS}}, "its files has '../x'"),
    (INDEX, {"version": "1", "files": {"/x": WEIGHTS}}, "its files has '/x'"),
]


@pytest.mark.parametrize(("name", "content", "why"), INDICES)
def test_an_index_that_is_none(rig, base, capsys, name, content, why):
    """By name, before a byte moves, and as the sender's fault where a server reads the directory itself."""
    (base.parent / "x").write_text("abc")
    (base / name).write_text(json.dumps(content))
    with pytest.raises(WeightSyncError, match=f"{name} is damaged: {why}.*; copy the checkpoint again"):
        push(rig.client(), base, 1)
    rig.client().open(rig.manifest())
    answer = rig.step("directory", path=str(base))
    assert answer.status_code == 422 and "is damaged" in answer.json()["error"] and not rig.engine.calls


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"], ids=["long", "zero", "surrogate"])
def test_names_that_no_file_can_have(base, name):
    (base / INDEX).write_text(json.dumps({"version": "1", "files": {name: WEIGHTS}}))
    with pytest.raises(WeightSyncError, match="cannot be read"):
        verify(base)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightSyncError, match="lacks .*, which its index names"):
        list(headers(base))


def test_what_breaks_within_a_file(rig, base):
    """A dtype that safetensors reads the name of and not the values."""
    header = json.dumps({"lm_head.weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(WeightSyncError, match=r"model\.safetensors cannot be read"):
        list(tensors(base))
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(WeightSyncError, match=r"model\.safetensors cannot be read"):
        push(rig.client(), base, 1)


REFUSED = [
    (["--engine", "http://localhost:abc"], "engine address 'http://localhost:abc' is no URL of a server; write http:"),
    (["--engine", "localhost:9"], "engine address 'localhost:9' is no URL"),
    (["--engine", "ftp://localhost:9"], "engine address 'ftp://localhost:9' is no URL"),
    (["--engine", "http://"], "engine address 'http:' is no URL"),
    (["--engine", "http://[::1"], "is no URL"),
    (["--engine", "http://localhost:99999"], "is no URL"),
    (["--engine", f"http://{'a' * 70}"], "is no URL"),
    (["--admin-api-key", "ü"], "admin API key of 1 characters cannot travel in a header"),
    (["--admin-api-key", "secret\nX-Other: b"], "admin API key of 17 characters cannot travel in a header"),
    (["--drain-seconds", "nan"], "drain_seconds=nan is not in 0 to 3600"),
    (["--drain-seconds=-1"], "drain_seconds=-1.0 is not in 0 to 3600"),
    (["--drain-seconds", "7200"], "drain_seconds=7200.0 is not in 0 to 3600"),
    (["--timeout", "nan"], "timeout=nan is not a number of seconds in 0 to 86400"),
    (["--timeout", "0"], "timeout=0.0 is not a number"),
    (["--timeout=-1"], "timeout=-1.0 is not a number"),
    (["--timeout", "inf"], "timeout=inf is not a number"),
    (["--model-path", "config.json"], "model path 'config.json' is not a directory"),
    (["--model-path", "a" * 300], "is not a directory"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_flag_that_cannot_work(base, monkeypatch, capsys, flags, message):
    """Nobody listens at the address: it is not asked."""
    monkeypatch.chdir(base)
    assert main(["--engine", "http://127.0.0.1:9", "--model-path", ".", "--version", "1", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "secret" not in error


CONFIGS = [
    ({"vocab_size": -1}, "vocab_size of config.json is -1, not a positive integer"),
    ({"n_group": 0}, "n_group of config.json is 0, not a positive integer"),
    ({"hidden_size": "x"}, "hidden_size of config.json is 'x', not a positive integer"),
    ({"num_hidden_layers": 10**30}, "not at most 512"),
    ({"architectures": -1}, "architectures of config.json is -1, not a list of names"),
    ({"architectures": [3]}, "architectures of config.json is [3], not a list of names"),
    ({"architectures": ["Other"]}, "config.json has no trainer model; use one of"),
]


@pytest.mark.parametrize(("change", "message"), CONFIGS, ids=lambda value: str(value)[:40])
def test_a_config_that_is_no_network(base, capsys, change, message):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | change))
    assert main(["--engine", "http://127.0.0.1:9", "--model-path", str(base), "--version", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_a_bucket_larger_than_memory(rig, base):
    """A limit and no size: what is made is as large as what there is."""
    push(rig.client(), base, 1, 1 << 90)
    assert rig.holds()


def test_addresses_that_work():
    for url in ("http://localhost", "https://10.0.0.7:30000/", "http://[::1]:30000", "http://engine.local./prefix"):
        ServiceControl(url, "a key~", 0.5, 3600).close()


def test_the_index_says_which_files_count(base, tmp_path):
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "lost.safetensors"}}))
    with pytest.raises(WeightSyncError, match=r"lacks lost\.safetensors, which its index names"):
        list(headers(base))


def test_runs_are_named_after_their_files(base):
    first = run_id(base, BUCKET)
    assert first == run_id(base, BUCKET) != run_id(base, 2 * BUCKET)
    save_file({"a": torch.zeros(1)}, str(base / "model.safetensors"))
    assert run_id(base, BUCKET) != first
    assert not (base / INDEX).exists() and verify(base) is None
