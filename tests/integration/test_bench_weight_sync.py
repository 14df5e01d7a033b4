"""The loader on all 14,813 names of LLaDA2-mini, against SGLang's own, in SGLang's own network."""

from __future__ import annotations

import json

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
