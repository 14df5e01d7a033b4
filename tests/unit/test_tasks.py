"""Tasks: disjoint splits, a cache keyed by the parameters, rows as verl wants them, and refusals."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dllm.config import ConfigError
from recipes.tasks import (
    ParquetTask,
    ReasoningGymTask,
    available_tasks,
    build,
    build_task,
    check_task,
    load_rows,
    load_task,
)
from recipes.tasks.build import prompt_text
from tests.support import DATA
from trainers.rewards import compute_score

GSM8K = str(DATA / "gsm8k_50.parquet")
SMALL = dict(source="reasoning_gym", name="chain_sum", val_size=64, sft_size=32, train_size=48, seed=3)


def test_splits_are_disjoint_and_the_cache_is_reused(tmp_path):
    task = check_task(SMALL)
    files = build_task(task, tmp_path)
    texts = [{prompt_text(row) for row in load_rows(part)} for part in (files.val, files.sft, files.train)]
    assert [len(part) for part in texts] == [64, 32, 48]
    assert len(set.union(*texts)) == 64 + 32 + 48
    written = Path(files.train[0]).stat().st_mtime_ns
    assert build_task(task, tmp_path) == files
    assert Path(files.train[0]).stat().st_mtime_ns == written


def test_the_same_parameters_give_the_same_rows_and_others_do_not(tmp_path):
    first, again, other = (
        load_rows(build_task(check_task(SMALL | changes), tmp_path / name).train)
        for name, changes in (("a", {}), ("b", {}), ("c", {"seed": 4}))
    )
    assert first == again
    assert first != other


def test_a_larger_training_set_keeps_the_held_out_prompts(tmp_path):
    small, large = (load_rows(build_task(check_task(SMALL | {"train_size": size}), tmp_path).val) for size in (10, 100))
    assert small == large


def test_rows_have_verls_columns_and_score_their_own_answer(tmp_path):
    train, held_out = build(SMALL, tmp_path)
    for file, split in ((train, "train"), (held_out, "val")):
        frame = pd.read_parquet(file)
        assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} <= set(frame.columns)
        for index, row in enumerate(load_rows([file])):
            assert row["prompt"][0]["role"] == "user"
            assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, index)
            gold = row["reward_model"]["ground_truth"]
            assert compute_score(row["data_source"], gold, gold, row["extra_info"])["score"] == 1
            assert compute_score(row["data_source"], gold + "1", gold, row["extra_info"])["score"] == 0


@pytest.mark.parametrize("name", [name for name in available_tasks() if name != "parquet"])
def test_tasks_of_the_config_group_build(name, tmp_path):
    shipped = load_task(name)
    assert isinstance(shipped, ReasoningGymTask)
    assert shipped.val_size >= 256
    small = ReasoningGymTask(name=shipped.name, params=shipped.params, val_size=4, sft_size=0, train_size=4)
    for row in load_rows(build_task(small, tmp_path).train):
        gold = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], gold, gold, row["extra_info"]) == {
            "score": 1,
            "acc": 1,
            "malformed": 0,
        }


def test_given_parquet_files_are_used_as_they_are(tmp_path):
    held_out = tmp_path / "held_out.parquet"
    train = tmp_path / "train.parquet"
    frame = pd.read_parquet(GSM8K)
    frame.iloc[:40].to_parquet(train)
    frame.iloc[40:].to_parquet(held_out)
    task = {"source": "parquet", "train_files": str(train), "val_files": [str(held_out)]}
    assert build(task, tmp_path) == (str(train), str(held_out))
    assert len(load_rows([str(train)])) == 40


def test_overlapping_parquet_files_are_refused(tmp_path):
    task = ParquetTask(train_files=[GSM8K], val_files=[GSM8K])
    with pytest.raises(ConfigError, match="50 prompts that are also in task.train_files"):
        build_task(task, tmp_path)


def test_parquet_without_a_needed_column_is_refused(tmp_path):
    file = tmp_path / "bad.parquet"
    pd.DataFrame({"prompt": [[{"role": "user", "content": "x"}]]}).to_parquet(file)
    with pytest.raises(ConfigError, match="lacks the column 'data_source'"):
        load_rows([str(file)])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"source": "reasoning_gym", "name": "chainsum"}, "task.name='chainsum' does not exist.*chain_sum"),
        ({"source": "web", "name": "x"}, "task.source='web' does not exist; use one of parquet, reasoning_gym"),
        (SMALL | {"trainsize": 3}, "task.trainsize=3 is not a key"),
        (SMALL | {"params": {"min_term": 2}}, "task.params.min_term=2 is not a parameter of chain_sum; .*min_terms"),
        (SMALL | {"params": {"min_terms": 5, "max_terms": 2}}, "refused by chain_sum: max_terms must be"),
        (SMALL | {"train_size": 0}, "task.train_size=0 is too small"),
        ({"source": "reasoning_gym"}, "incomplete"),
        ({"source": "parquet", "train_files": [], "val_files": []}, "task.train_files is empty"),
        ({"source": "parquet", "train_files": ["no.parquet"], "val_files": [GSM8K]}, "'no.parquet' is not a file"),
    ],
)
def test_tasks_that_cannot_work_are_refused(task, message):
    with pytest.raises(ConfigError, match=message):
        check_task(task)


def test_a_task_that_is_not_in_the_group_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="task='nope' does not exist; use one of chain_sum, "):
        load_task("nope")


def test_too_few_distinct_prompts_are_refused(tmp_path):
    task = check_task(SMALL | {"params": {"min_terms": 2, "max_terms": 2, "max_digits": 1}, "train_size": 500})
    with pytest.raises(ConfigError, match="task.train_size=500 cannot be met: .* only 200 distinct prompts"):
        build_task(task, tmp_path)
    assert not list(tmp_path.iterdir())
