"""Rows to evaluate on: the held-out part of a task of the config group, or a parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dllm.config import ConfigError
from recipes.tasks.build import build_task, load_rows
from recipes.tasks.spec import available_tasks, load_task

FILES_ONLY = ("gsm8k", "math500")
"""Benchmarks whose questions no generator makes."""


def held_out_rows(task: str, cache_dir: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Rows of verl's format.

    Args:
        task: name of the config group ``task``; ``gsm8k`` or ``math500``, read from ``cache_dir``/NAME.parquet; or the
            path of a parquet file.
        limit: the first so many.

    Raises:
        ConfigError: there is no such task or file, or it has no rows.
    """
    names = [name for name in available_tasks() if name != "parquet"]
    if task.endswith(".parquet"):
        file = Path(task)
        if not file.is_file():
            raise ConfigError(f"--task={task!r} is not a file; give the path of a parquet file in verl's format")
        rows = load_rows([str(file)])
    elif task in FILES_ONLY:
        file = Path(cache_dir) / f"{task}.parquet"
        if not file.is_file():
            raise ConfigError(
                f"--task={task} needs its questions as a parquet file in verl's format, and {str(file)!r} does not "
                "exist (nothing is downloaded); give --task FILE.parquet or put the file there"
            )
        rows = load_rows([str(file)])
    elif task in names:
        rows = load_rows(build_task(load_task(task), cache_dir).val)
    else:
        raise ConfigError(
            f"--task={task!r} does not exist; use one of {', '.join(sorted([*names, *FILES_ONLY]))} or FILE.parquet"
        )
    if not rows:
        raise ConfigError(f"--task={task!r} has no rows; give a file with at least one")
    return rows[:limit]
