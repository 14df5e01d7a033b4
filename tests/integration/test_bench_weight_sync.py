"""The loader on all 14,813 names of LLaDA2-mini, against SGLang's own, in SGLang's own network."""

from __future__ import annotations

import json

import pytest
import torch

from recipes import bench_weight_sync
from rollout.plugin.cpu import cpu_environment
from tests.support import run_module


def test_a_loader_pass_is_at_least_twenty_times_faster(tmp_path):
    """Checksums, reading everything back and the comparison with the sender included."""
    file = tmp_path / "names.json"
    options = ["--device", "cpu", "--names-only", "--json", str(file)]
    done = run_module("recipes.bench_weight_sync", *options, **cpu_environment(), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(file.read_text())["loader pass"]
    assert result["names"] == 14813 and result["parameters"] == 239 and result["same_weights"]
    assert result["speedup"] >= 20, result


@pytest.mark.parametrize("option", [["--device", "cuda"], ["--json", "nowhere/x.json"], ["--config", "nowhere"]])
def test_wrong_options(option, monkeypatch, capsys):
    """Refused before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_weight_sync", "--names-only", *option])
    assert bench_weight_sync.main() == 2
    assert capsys.readouterr().err.startswith(f"error: {option[0]}")
