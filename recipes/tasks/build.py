"""Build the parquet files of a task, or check those that exist."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from dllm.config import ConfigError
from recipes.tasks.spec import ParquetTask, ReasoningGymTask, Task, task_from_config

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
# A generator with few distinct prompts repeats itself: stop when this many draws in a row were all known.
_DRAWS_WITHOUT_A_NEW_PROMPT = 5000


@dataclass(frozen=True)
class TaskFiles:
    """Parquet files of a task; ``sft`` is empty where a task has no prompts for a warm start."""

    train: list[str]
    val: list[str]
    sft: list[str]


def check_task(config: Mapping[str, Any]) -> Task:
    """The typed form of a (resolved) config group ``task``.

    Raises:
        ConfigError: the task does not exist, or a key or value of it cannot work.
    """
    return task_from_config(config)


def build(config: Mapping[str, Any], cache_dir: str | Path) -> tuple[str | list[str], str | list[str]]:
    """Train and held-out files of the config group ``task``, as verl's ``data.train_files`` takes them.

    Raises:
        ConfigError: see ``check_task`` and ``build_task``.
    """
    files = build_task(check_task(config), cache_dir)
    train, held_out = (part[0] if len(part) == 1 else part for part in (files.train, files.val))
    return train, held_out


def is_built(config: Mapping[str, Any], cache_dir: str | Path) -> bool:
    """Whether the files of the config group ``task`` exist, so that ``build`` would only read them."""
    task = check_task(config)
    return isinstance(task, ParquetTask) or _folder(task, cache_dir).is_dir()


def _folder(task: ReasoningGymTask, cache_dir: str | Path) -> Path:
    return Path(cache_dir) / f"{task.name}-{task.key}"


def build_task(task: Task, cache_dir: str | Path) -> TaskFiles:
    """The parquet files of ``task``: read from the cache if they were built before, built otherwise.

    Training and held-out prompts are disjoint by text.

    Raises:
        ConfigError: the generator has too few distinct prompts, a file lacks a column, or given files overlap.
    """
    if isinstance(task, ParquetTask):
        _check_disjoint(task)
        return TaskFiles(train=list(task.train_files), val=list(task.val_files), sft=[])
    folder = _folder(task, cache_dir)
    if not folder.is_dir():
        _build(task, folder)
    sft = [str(folder / "sft.parquet")] if task.sft_size else []
    return TaskFiles(train=[str(folder / "train.parquet")], val=[str(folder / "val.parquet")], sft=sft)


def load_rows(files: list[str]) -> list[dict[str, Any]]:
    """Rows of parquet files in verl's format, with plain lists and dicts inside.

    Raises:
        ConfigError: a file cannot be read or lacks a column.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            frame = pd.read_parquet(file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file!r} is not a readable parquet file ({error}); give one in verl's format"
            ) from error
        if missing := [column for column in COLUMNS if column not in frame.columns]:
            raise ConfigError(
                f"{file!r} lacks the column {missing[0]!r} of verl's format; it needs {', '.join(COLUMNS)}"
            )
        for row in frame.to_dict("records"):
            row["prompt"] = [dict(message) for message in row["prompt"]]
            rows.append(row)
    return rows


def prompt_text(row: Mapping[str, Any]) -> str:
    """The conversation of a row as one string, by which prompts are told apart."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in row["prompt"])


def distinct_entries(task: ReasoningGymTask) -> Iterator[dict[str, Any]]:
    """Entries of the generator with distinct questions, in the order of its stream."""
    from reasoning_gym import create_dataset

    needed = task.val_size + task.sft_size + task.train_size
    limit = needed * 20 + _DRAWS_WITHOUT_A_NEW_PROMPT
    stream = create_dataset(task.name, seed=task.seed, size=limit, **task.params)
    seen: set[str] = set()
    last_new = 0
    for index in range(limit):
        try:
            entry = stream[index]
        except ValueError:
            # Some generators search at random and give up now and then; the next index has another chance.
            entry = None
        if entry is not None and entry["question"] not in seen:
            seen.add(entry["question"])
            last_new = index
            yield entry
        elif index - last_new > _DRAWS_WITHOUT_A_NEW_PROMPT:
            return


def _row(task: ReasoningGymTask, split: str, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "data_source": f"reasoning_gym/{task.name}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        "extra_info": {"split": split, "index": index, "metadata": json.dumps(entry["metadata"], default=str)},
    }


def _build(task: ReasoningGymTask, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        entries = distinct_entries(task)
        known: set[str] = set()
        for split, size in (("val", task.val_size), ("sft", task.sft_size), ("train", task.train_size)):
            rows = [_row(task, split, index, entry) for index, entry in enumerate(islice(entries, size))]
            if len(rows) < size:
                raise ConfigError(
                    f"task.{split}_size={size} cannot be met: {task.name} with {dict(task.params)} has only "
                    f"{len(known) + len(rows)} distinct prompts; lower the sizes or widen task.params"
                )
            texts = {prompt_text(row) for row in rows}
            assert len(texts) == size and not texts & known, f"prompts of {split} are not disjoint"
            known |= texts
            if rows:
                pd.DataFrame(rows).to_parquet(scratch / f"{split}.parquet")
        try:
            os.replace(scratch, folder)
        except OSError:
            # Another process built the same files meanwhile; theirs are equal.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_disjoint(task: ParquetTask) -> None:
    train = {prompt_text(row) for row in load_rows(task.train_files)}
    shared = [row for row in load_rows(task.val_files) if prompt_text(row) in train]
    if shared:
        raise ConfigError(
            f"task.val_files={task.val_files} has {len(shared)} prompts that are also in task.train_files; "
            "remove them from one side, or the held-out accuracy measures memory"
        )
