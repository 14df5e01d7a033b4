"""A run's checkpoint as a Hugging Face directory: which step, whole tensors from shards, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dllm.config import resolve
from dllm.models import BlockDiffusionLM
from dllm.models.checkpoint import iterate_safetensors, load_model, save_checkpoint
from recipes.export import main
from recipes.run_checkpoint import find_checkpoint, shard_name
from tests.support import write_json, write_tiny_model
from tests.unit.test_push import small_files

STEPS = {7: 0.75, 14: 0.5}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "model"
    write_tiny_model(path, seed=3, layers=2, hidden=32, head_dim=16, experts=6, groups=2)
    return path


def trained(base: Path, step: int) -> BlockDiffusionLM:
    """The policy of a step: other weights than the base model's in every tensor, the buffers too."""
    model = load_model(base)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(step / 8)
    return model


def save_shards(actor: Path, model: BlockDiffusionLM, mesh_shape: tuple[int, ...] = (1,)) -> None:
    """Files as verl's checkpoint manager writes them: one DTensor state dict a rank."""
    names = ("fsdp",) if len(mesh_shape) == 1 else ("ddp", "fsdp")
    size = torch.Size(mesh_shape).numel()
    actor.mkdir(parents=True, exist_ok=True)
    for rank in range(size):
        torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            place = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
            state = {}
            for name, tensor in model.state_dict().items():
                parts = tensor.detach().chunk(mesh_shape[-1])
                at = rank % mesh_shape[-1]
                local = parts[at].clone() if at < len(parts) else tensor.detach()[:0].clone()
                state[name] = tensor if name.endswith("expert_bias") else DTensor.from_local(
                    local, mesh, place, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )  # fmt: skip
            torch.save(state, actor / shard_name(size, rank))
        finally:
            torch.distributed.destroy_process_group()
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))


def save_step(run: Path, base: Path, step: int, mesh_shape: tuple[int, ...] = (1,)) -> Path:
    actor = run / "checkpoints" / f"global_step_{step}" / "actor"
    save_shards(actor, trained(base, step), mesh_shape)
    kept = actor / "huggingface"
    kept.mkdir(parents=True)
    config = json.loads((base / "config.json").read_text())
    del config["auto_map"]
    (kept / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (kept / name).write_text((base / name).read_text())
    return actor


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory) -> Path:
    """A run with two checkpoints, of which the earlier one validates better."""
    run = tmp_path_factory.mktemp("run")
    lines = []
    for step, accuracy in STEPS.items():
        save_step(run, base, step)
        lines.append(json.dumps({"kind": "validation", "step": step, "val/accuracy": accuracy}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "config.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": {"model": {"path": str(base)}}}))
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("14")
    return run


def same(directory: Path, model: BlockDiffusionLM) -> bool:
    loaded = load_model(directory).state_dict()
    return all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("chosen", "step"), [("last", 14), ("best", 7), ("7", 7)])
def test_the_chosen_step_is_exported(finished, base, tmp_path, capsys, chosen, step):
    out = tmp_path / "out"
    assert main([str(finished), "--out", str(out), "--step", chosen]) == 0
    assert f"step {step}: " in capsys.readouterr().out
    assert same(out, trained(base, step)) and not same(out, trained(base, 21 - step))
    names = {file.name for file in out.iterdir()}
    assert names >= {"generation_config.json", "tokenizer.json", "configuration_llada2_moe.py"}
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))
    assert resolve(out) == resolve(base)
    assert json.loads((out / "config.json").read_text())["auto_map"], "stock SGLang asks transformers for the class"


def test_a_step_directory(finished, base, tmp_path):
    assert main([str(finished / "checkpoints" / "global_step_7"), "--out", str(tmp_path / "out")]) == 0
    assert same(tmp_path / "out", trained(base, 7))


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=["2 ranks", "4 ranks", "2 replicas of 2"])
def test_shards_are_put_together(base, tmp_path, mesh):
    """6 experts over 4 ranks: the last rank's share is empty."""
    save_step(tmp_path / "run", base, 3, mesh)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert same(tmp_path / "out", trained(base, 3))


def test_bfloat16_keeps_the_router(finished, base, tmp_path):
    assert main([str(finished), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    dtypes = {name: tensor.dtype for name, tensor in iterate_safetensors(tmp_path / "out")}
    assert {n for n, d in dtypes.items() if d == torch.float32} == {n for n in dtypes if ".mlp.gate." in n}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_without_the_model_it_started_from(base, tmp_path):
    """Nothing but the checkpoint is left: the configuration class is ours."""
    save_step(tmp_path / "run", base, 3)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "configuration_llada2_moe.py").is_file()


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_refusals(finished, base, tmp_path, capsys):
    out, taken = str(tmp_path / "out"), tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert "no checkpoint (checkpoints/global_step_*)" in refused(capsys, str(taken), "--out", out)
    assert "does not exist" in refused(capsys, str(tmp_path / "nothing"), "--out", out)
    assert "exists and is not empty" in refused(capsys, str(finished), "--out", str(taken))
    assert "--step=9 is not one of [7, 14], last or best" in refused(capsys, str(finished), "--out", out, "--step", "9")
    run = tmp_path / "run"
    save_step(run, base, 3)
    message = "--step=best needs a validated checkpoint"
    assert message in refused(capsys, str(run), "--out", out, "--step", "best")
    assert not Path(out).exists() and [f.name for f in taken.iterdir()] == ["notes.txt"]


def test_unfinished_checkpoints(base, tmp_path, capsys):
    run, out = tmp_path / "run", str(tmp_path / "out")
    save_step(run, base, 3)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    actor = save_step(run, base, 6, (2,))
    assert find_checkpoint(run).step == 3, "the last one that is complete"
    message = refused(capsys, str(run), "--out", out, "--step", "6")
    assert "is unfinished: it is newer than the last complete one, 3" in message
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("6")
    whole = (actor / shard_name(2, 1)).read_bytes()
    (actor / shard_name(2, 1)).write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refused(capsys, str(run), "--out", out)
    (actor / shard_name(2, 1)).unlink()
    assert f"is unfinished: it lacks {shard_name(2, 1)}" in refused(capsys, str(run), "--out", out)
    (actor / "fsdp_config.json").unlink()
    assert "lacks fsdp_config.json" in refused(capsys, str(run), "--out", out)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_weights_of_another_model(base, tmp_path, capsys):
    actor = save_step(tmp_path / "run", base, 3)
    state = torch.load(actor / shard_name(1, 0), weights_only=True)
    moved = {("lora." + n if n == "lm_head.weight" else n): t for n, t in state.items()}
    torch.save(moved, actor / shard_name(1, 0))
    message = refused(capsys, str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert "lacks 1 tensors, e.g. lm_head.weight" in message


def test_no_code_runs_from_a_checkpoint(base, tmp_path, capsys):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    actor = save_step(tmp_path / "run", base, 3)
    torch.save({"model.norm.weight": Payload()}, actor / shard_name(1, 0))
    assert "cannot be read" in refused(capsys, str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "ran").exists()


def test_large_weights_go_into_several_files(base, tmp_path):
    model, config = load_model(base), json.loads((base / "config.json").read_text())
    save_checkpoint(tmp_path, model.state_dict(), config, shard_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and {f.name for f in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in dict(iterate_safetensors(tmp_path)).values())
    assert same(tmp_path, model)


def test_weights_are_readable_by_others(base, tmp_path):
    before = os.umask(0o022)
    try:
        save_checkpoint(tmp_path, load_model(base).state_dict(), json.loads((base / "config.json").read_text()))
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.fixture
def run(base, tmp_path) -> Path:
    save_step(tmp_path / "run", base, 3)
    return tmp_path / "run"


DAMAGED = [
    ("config.yaml", b"a: [", "config.yaml is not valid YAML"),
    ("config.yaml", b"a: \xff", "config.yaml is not valid YAML"),
    ("config.yaml", b"a: 2001-13-45", "config.yaml is not valid YAML"),
    ("config.yaml", b"- 1", "config.yaml is [1], not a mapping; correct or remove"),
    ("config.yaml", b"actor_rollout_ref: [1]", "actor_rollout_ref of "),
    ("config.yaml", b"actor_rollout_ref: {model: x}", "actor_rollout_ref.model of "),
    ("config.yaml", b"actor_rollout_ref: {model: {path: 3}}", "config.yaml is 3, not a path; correct it"),
    ("checkpoints/latest_checkpointed_iteration.txt", b"\xff", "iteration.txt holds b'\\xff', not the number of the"),
    ("checkpoints/latest_checkpointed_iteration.txt", b"9" * 5000, ", not the number of the last complete step"),
    ("metrics.jsonl", b"\xff\n", "line 1 of "),
    ("metrics.jsonl", b"[]\n", "metrics.jsonl is no record of a step or a validation: b'[]'; remove it"),
    ("metrics.jsonl", b'\n{"kind": "validation"}\n', "line 2 of "),
    ("metrics.jsonl", b'{"kind": [], "step": 3}\n', "line 1 of "),
    ("metrics.jsonl", b'{"kind": "validation", "step": [3]}\n', "line 1 of "),
    ("metrics.jsonl", b'{"kind": "validation", "step": 3, "val/accuracy": "x"}\n', "metrics.jsonl is no number"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=lambda value: str(value)[:40])
def test_a_damaged_file_of_a_run(run, tmp_path, capsys, name, content, message):
    (run / name).write_bytes(content)
    error = refused(capsys, str(run), "--out", str(tmp_path / "out"), "--step", "best" if "metrics" in name else "last")
    assert error.startswith("error: ") and str(run / name) in error and message in error


@pytest.mark.parametrize("size", ["1", -1, 0, 1.0, True, None, 10**9, [1]], ids=repr)
def test_a_wrong_number_of_ranks(run, tmp_path, capsys, size):
    write_json(run / "checkpoints" / "global_step_3" / "actor" / "fsdp_config.json", {"world_size": size})
    error = refused(capsys, str(run), "--out", str(tmp_path / "out"))
    assert "error: world_size of " in error and "fsdp_config.json is " in error and "restore the file" in error


SHARDS = [
    ([torch.zeros(1)], "holds a list, no tensors by name; use another step"),
    ({"a": 3}, "holds 'a': int, no tensor by name; use another step"),
    ({3: torch.zeros(1)}, "holds 3: Tensor, no tensor by name; use another step"),
    (torch.zeros(1), "holds a Tensor, no tensors by name"),
]


@pytest.mark.parametrize(("content", "message"), SHARDS, ids=lambda value: str(value)[:20])
def test_a_shard_of_something_else(run, tmp_path, capsys, content, message):
    torch.save(content, run / "checkpoints" / "global_step_3" / "actor" / shard_name(1, 0))
    assert f"{shard_name(1, 0)} {message}" in refused(capsys, str(run), "--out", str(tmp_path / "out"))


def test_shards_of_several_kinds(base, tmp_path, capsys):
    actor = save_step(tmp_path / "run", base, 3, (2,))
    state = torch.load(actor / shard_name(2, 1), weights_only=True)
    torch.save(dict.fromkeys(state, torch.zeros(1)), actor / shard_name(2, 1))
    assert "do not fit together" in refused(capsys, str(tmp_path / "run"), "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("place", ["below a file", "dangling link", "link to an empty directory", "long", "full"])
def test_a_place_that_cannot_be_written(run, tmp_path, capsys, place):
    out = tmp_path / ("out" if place != "long" else "o" * 300)
    if place == "below a file":
        out.write_text("mine")
        out = out / "deep" / "model"
    elif "link" in place:
        out.symlink_to(tmp_path / "target")
    if place == "link to an empty directory":
        (tmp_path / "target").mkdir()
    before = sorted(os.listdir(tmp_path))
    with small_files(8_000 if place == "full" else 1 << 40):
        error = refused(capsys, str(run), "--out", str(out))
    why = "is a symbolic link; choose a directory that is none" if "link" in place else "cannot be written: "
    assert error.startswith(f"error: --out={str(out)!r} {why}") and sorted(os.listdir(tmp_path)) == before


def test_a_run_that_cannot_be(tmp_path, capsys):
    assert "does not exist" in refused(capsys, "r" * 300, "--out", str(tmp_path / "out"))
