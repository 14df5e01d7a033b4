"""Rollouts of an earlier run in the place of an engine."""

from __future__ import annotations

import pytest

from dllm.config import ConfigError
from recipes.compose import as_overrides, resolve_run
from rollout.records import RolloutError, write_parquet
from rollout.saved import SavedRollouts, check_saved, saved_steps, step_file
from tests.support import rollout_line, write_lines


def line(seed: int, **changes):
    return rollout_line(input_ids=[1, 2], sampling_params={"seed": seed}, **changes)


@pytest.fixture
def saved(tmp_path):
    """Steps 1 (JSON lines) and 2 (parquet), and a stray 4."""
    write_lines(tmp_path / "1.jsonl", [line(1, reward=1.0), line(2, output=[7, 8, 9])])
    write_parquet(tmp_path / "2.parquet", [line(1, output=[4, 5, 6])])
    write_lines(tmp_path / "4.jsonl", [line(1)])
    return tmp_path


def test_a_sample_is_found_by_step_prompt_and_seed(saved):
    rollouts = SavedRollouts(saved)
    assert rollouts.line(1, [1, 2], 2)["output_ids"] == [7, 8, 9]
    assert rollouts.line(2, [1, 2], 1)["output_ids"] == [4, 5, 6]
    assert "reward" not in rollouts.line(1, [1, 2], 1), "rewards are computed anew"


def test_what_was_not_saved_is_refused(saved):
    with pytest.raises(RolloutError, match="step 1 .* no sample of this prompt and seed: the run that saved them had"):
        SavedRollouts(saved).line(1, [1, 3], 1)
    with pytest.raises(RolloutError, match="has no rollouts of step 3"):
        SavedRollouts(saved).line(3, [1, 2], 1)


def test_steps_of_a_directory(saved, tmp_path):
    assert saved_steps(saved) == 2 and step_file(saved, 4).name == "4.jsonl" and saved_steps(tmp_path / "none") == 0
    check_saved(saved, 2)
    with pytest.raises(ConfigError, match="has the rollouts of 2 steps .*, the run takes 3; lower trainer.total_train"):
        check_saved(saved, 3)


def test_flags_stand_for_keys():
    assert as_overrides(["--save-debug-rollouts", "a", "x=1", "--load-debug-rollouts=b"]) == [
        "x=1",
        "recipe.save_debug_rollouts='a'",
        "recipe.load_debug_rollouts='b'",
    ]
    with pytest.raises(ConfigError, match=r"--load-debug-rollouts: expected one argument; .*--load-debug-rollouts DIR"):
        as_overrides(["--load-debug-rollouts"])


def test_a_run_without_an_engine_cannot_validate(saved, tiny_dir, tmp_path):
    given = [
        f"actor_rollout_ref.model.path={tiny_dir}",
        "recipe.dry_run=true",
        f"recipe.load_debug_rollouts={saved}",
        "trainer.total_training_steps=2",
    ]
    with pytest.raises(ConfigError, match=r"trainer.val_before_train=True needs an engine, .*; set trainer.val_b"):
        resolve_run(given, "cpu")
    with pytest.raises(ConfigError, match=r"trainer.test_freq=7 needs an engine, .*; set trainer.test_freq=-1"):
        resolve_run([*given, "trainer.val_before_train=false"], "cpu")
    run = resolve_run([*given, "trainer.val_before_train=false", "trainer.test_freq=-1"], "cpu")
    settings = run.config.actor_rollout_ref.rollout.engine_kwargs.sglang_dllm
    assert settings.load_debug_rollouts == str(saved)
