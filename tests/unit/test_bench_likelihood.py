"""The benchmark of likelihoods: its tables, its file, what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from dllm.likelihood import Exact
from dllm.likelihood.states import forward_tokens
from recipes import bench_likelihood as bench
from recipes import likelihood_accuracy
from tests.support import small_config

SMALL = ["--device", "cpu", "--prompt", "5", "--response", "11", "--block-size", "8", "--repeats", "1"]


@pytest.fixture
def fewer(monkeypatch):
    """Two estimators instead of seven."""
    chosen = {
        name: e for name, e in likelihood_accuracy.estimators().items() if name in ("elbo, coupled, 1", "one_step")
    }
    monkeypatch.setattr(likelihood_accuracy, "estimators", lambda: chosen)


def test_tables_and_file(fewer, tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert bench.main([*SMALL, "--samples", "2", "--draws", "200", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "x (P + R)" in shown and "- decoder" in shown
    record = json.loads(file.read_text())
    costs = {row["method"]: row for row in record["cost"]}
    assert costs["one_step"]["tokens"] == 2 * (8 + 2 * 8) and costs["one_step"]["multiple"] == 1.5
    assert costs["exact"]["tokens"] < costs["exact, a row per step"]["tokens"]
    assert costs["exact, keep=0.25"]["tokens"] < costs["exact"]["tokens"]
    assert all(row["forward_s"] > 0 and row["update_s"] > 0 for row in record["cost"])
    coupled, one_step = record["accuracy"]
    assert abs(coupled["bias"]) < 3 * coupled["bias_error"]
    assert one_step["deviation"] == 0 and abs(one_step["bias"]) > 0.1
    assert record["settings"]["block_size"] == 8


def test_a_random_trace_is_a_trace():
    trace = bench.random_trace(np.random.default_rng(0), 40, 120, 32, 2.5, 48, 47)
    trace.validate()
    assert trace.tokens_per_forward == pytest.approx(2.5, rel=0.1)
    assert 47 not in trace.prompt_ids and 47 not in trace.replay_ids


def test_a_row_per_step_repeats_the_clean_tokens():
    trace = bench.random_trace(np.random.default_rng(0), 5, 11, 8, 2, 48, 47)
    states = Exact().states(trace, 47)
    rows = bench.row_per_step(states)
    assert len(rows) == max(trace.steps_per_block) > 1
    assert sum(len(r.sample.slices) for r in rows) == len(states.sample.slices)
    tokens, multiple = forward_tokens(rows, 16)
    assert tokens == 8 * len(rows) + 8 * len(states.sample.slices) and multiple == tokens / 16


def test_random_weights_have_the_shape_of_a_config(tmp_path):
    write_config(tmp_path)
    model = bench.random_weights(str(tmp_path), torch.bfloat16, "cpu", 0).requires_grad_(False)
    router = next(model.routers())
    assert (router.weight.dtype, model.lm_head.weight.dtype) == (torch.float32, torch.bfloat16)
    assert model.lm_head.weight.float().std().item() == pytest.approx(32**-0.5, rel=0.05)
    assert float(router.expert_bias.abs().max()) == 0
    assert all((parameter == 1).all() for parameter in model.parameters() if parameter.dim() == 1)
    again = bench.random_weights(str(tmp_path), torch.bfloat16, "cpu", 0)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def write_config(directory) -> None:
    shape = asdict(small_config()) | {"architectures": ["LLaDA2MoeModelLM"]}
    (directory / "config.json").write_text(json.dumps(shape))


def test_split_rows_are_passes_of_their_own(fewer, tmp_path, monkeypatch):
    """Layers are recomputed, and the rows of a method that splits come one by one."""
    write_config(tmp_path)
    keys = {"block_size": 8, "mask_token_id": 1, "eos_token_id": 2}
    config = json.loads((tmp_path / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen, original = [], bench.pack_states
    monkeypatch.setattr(bench, "pack_states", lambda states, *rest: seen.append(len(states)) or original(states, *rest))
    more = ["--model-path", str(tmp_path), "--random-weights", "--checkpoint-layers", "--samples", "2", "--row", "16"]
    assert bench.main([*SMALL, *more, "--draws", "2"]) == 0
    pieces = 2 * len(bench.split(Exact().states(a_trace(), 1), 16))
    assert pieces > 4 and seen.count(1) >= 3 * pieces, "warm-up, forward and update"


def a_trace():
    return bench.random_trace(np.random.default_rng(0), 5, 11, 8, 2.55, 64, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--response", "12"],
            "--prompt 5 and --response 12 do not end on the grid of block size 8; make the response 19",
        ),
        (["--row", "0"], "--row 0 is below 1; give a positive number"),
        (["--random-weights"], "--random-weights needs --model-path"),
        (["--samples", "0"], "--samples 0 is below 1; give a positive number"),
        (["--draws", "1"], "--draws 1 leaves no deviation to compute; give at least 2"),
        (["--tokens-per-step", "0.5"], "--tokens-per-step 0.5 is below 1; a step reveals at least one token"),
        (["--json", "no/such/file.json"], "lies in a directory that does not exist; create it first"),
        (["--model-path", "nowhere"], "model path 'nowhere' is not a directory"),
    ],
)
def test_refusals(arguments, message, capsys):
    assert bench.main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and not captured.out


def test_help(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert "--tokens-per-step" in capsys.readouterr().out
