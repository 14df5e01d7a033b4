"""A training step whose engine and trainer disagree ends the run, after its rollouts are on disk."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.support import rollout_line, verl_on_cpu

with verl_on_cpu():
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from trainers.flips import MEASURE, NO_FLIPS
    from trainers.trainer import BlockDiffusionTrainer, LogprobMismatch


@pytest.fixture
def step(tmp_path, monkeypatch):
    """``step(trainer's log-probs, **settings)``: the metrics of a step between verl's pass and the update."""
    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", lambda trainer, batch, metrics: batch)

    def run(logprob: list[float], **changes) -> tuple[dict, SimpleNamespace]:
        settings = {"max_logprob_diff": 1e-3, "measure_every": 5, "measure_states": 64, "measure_routing": 0} | changes
        trainer = object.__new__(BlockDiffusionTrainer)
        trainer.exact, trainer.threshold, trainer.global_steps, trainer.reward_seconds = True, None, 1, []
        trainer.listener = lambda event, details: None
        trainer.rollout_lines = lambda batch: [rollout_line(trainer=logprob)]
        trainer.config = SimpleNamespace(
            dllm=SimpleNamespace(**settings),
            trainer=SimpleNamespace(rollout_data_dir=str(tmp_path / "rollouts")),
            recipe=SimpleNamespace(save_debug_rollouts=None),
        )
        batch, metrics = SimpleNamespace(extra_info={}), {}
        trainer._compute_old_log_prob(batch, metrics)
        return metrics, batch

    return run


def test_a_run_stops_by_name(step, tmp_path):
    with pytest.raises(
        LogprobMismatch, match=r"step 1: .* differ by 0.\d+ nats .*dllm.max_logprob_diff=0.001.*check_log"
    ):
        step([-1.0, -2.0, -3.0, -4.5])
    (line,) = (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()
    assert json.loads(line)["trainer_logprob"][-1] == -4.5


def test_it_goes_on_below_the_limit_or_without_one(step, tmp_path):
    assert step([-1.0, -2.0, -3.0, -4.0005])[0]["rollout_corr/logprob_abs_diff/max"] == pytest.approx(5e-4)
    assert step([-1.0, -2.0, -3.0, -4.5], max_logprob_diff=None)[0]["rollout_corr/logprob_abs_diff/max"] == 0.5
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, 64),
        ({"measure_states": 0}, NO_FLIPS),
        ({"measure_states": 0, "measure_routing": 2}, 0),
        ({"measure_every": 0, "measure_routing": 2}, NO_FLIPS),
    ],
)
def test_what_is_measured(step, changes, asked):
    assert step([-1.0, -2.0, -3.0, -4.0], **changes)[1].extra_info[MEASURE] == asked
