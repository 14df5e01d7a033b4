"""The recipe with trainer and engine on devices of their own: three steps, weights over gloo through a receiver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.records import read_metrics, read_rollouts
from tests.support import ROOT, child_environment

PROMPTS, GROUP, STEPS = 4, 4, 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(heavy, tmp_path_factory) -> Path:
    """Directory of a finished run."""
    heavy.close()
    root = tmp_path_factory.mktemp("separate")
    arguments = [
        "hardware=separate_cpu",
        "recipe.run=run",
        f"recipe.output_dir={root}",
        f"recipe.cache_dir={root / 'cache'}",
        f"actor_rollout_ref.rollout.n={GROUP}",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "task.val_size=8",
        "task.sft_size=0",
        "task.train_size=64",
        "data.max_prompt_length=128",
        "dllm.max_logprob_diff=1e-3",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=-1",
    ]
    environment = child_environment(WANDB_MODE="offline", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "recipes.grpo_llada2", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    log = root / "run" / "driver.log"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr + (log.read_text()[-3000:] if log.is_file() else "")
    return root / "run"


def steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run) if record["kind"] == "step"]


def test_every_step_decodes_with_the_weights_that_the_last_one_made(run):
    for step, lines in read_rollouts(run):
        assert len(lines) == PROMPTS * GROUP
        assert {version for line in lines for version in line["weight_versions"]} == {str(step - 1)}
    records = steps(run)
    assert [record["weight_sync/version"] for record in records] == [1, 2, 3]
    assert all(record["weight_sync/lag"] == 0 for record in records)


def test_engine_and_trainer_are_one_policy(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["device"] == "separate_cpu"
    assert 0 < summary["logprob_abs_diff_p999"] <= 1e-4 and summary["logprob_abs_diff_max_without_ties"] <= 1e-4
    assert summary["weight_versions"] == ["0", "1", "2"]
    assert all(record["actor/grad_norm"] > 0 for record in steps(run))


def test_the_refresh_has_its_metrics(run):
    for record in steps(run):
        assert all(record[f"weight_sync/{s}_seconds"] >= 0 for s in ("pause", "stream", "finish", "resume", "total"))
        assert record["weight_sync/bytes"] > 0 and record["weight_sync/resent"] == 0
