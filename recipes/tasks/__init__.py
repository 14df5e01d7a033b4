"""Tasks: prompts with verifiable answers, as verl-format parquet files."""

from recipes.tasks.build import TaskFiles, build, build_task, check_task, load_rows
from recipes.tasks.spec import ParquetTask, ReasoningGymTask, available_tasks, load_task, task_from_config

__all__ = [
    "ParquetTask",
    "ReasoningGymTask",
    "TaskFiles",
    "available_tasks",
    "build",
    "build_task",
    "check_task",
    "load_rows",
    "load_task",
    "task_from_config",
]
