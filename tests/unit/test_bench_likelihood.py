"""The benchmark of likelihoods: its tables, its file, what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dllm.likelihood import Exact
from dllm.likelihood.states import forward_tokens
from recipes import bench_likelihood as bench

SMALL = ["--device", "cpu", "--prompt", "5", "--response", "11", "--block-size", "8", "--repeats", "1"]


@pytest.fixture
def fewer(monkeypatch):
    """Two estimators instead of seven."""
    chosen = {name: e for name, e in bench.estimators().items() if name in ("elbo, coupled, 1", "one_step")}
    monkeypatch.setattr(bench, "estimators", lambda: chosen)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--response", "12"],
            "--prompt 5 and --response 12 do not end on the grid of block size 8; make the response 19",
        ),
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
