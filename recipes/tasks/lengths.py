"""Do the prompts of a task fit? Measured with the model's tokenizer and chat template, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dllm.config import ConfigError
from recipes.tasks.build import load_rows
from recipes.tokenizer import prompt_ids


def prompt_lengths(files: Sequence[str], tokenizer: Any) -> list[int]:
    """Tokens of every prompt of parquet files in verl's format, with the chat template and its opening of the answer.

    Raises:
        ConfigError: see ``load_rows``.
    """
    return [len(prompt_ids(tokenizer, row["prompt"])) for row in load_rows(list(files))]


def check_prompt_lengths(files: Sequence[str], tokenizer: Any, limit: int, task: str) -> None:
    """Refuse prompts that verl would fail on in its first batch that has one.

    Raises:
        ConfigError: a prompt is longer than ``limit`` tokens.
    """
    lengths = prompt_lengths(files, tokenizer)
    if (longest := max(lengths, default=0)) > limit:
        over = sum(length > limit for length in lengths)
        raise ConfigError(
            f"data.max_prompt_length={limit} is too short for {over} of the {len(lengths)} prompts of task={task}: the "
            f"longest has {longest} tokens; set data.max_prompt_length={-(-longest // 32) * 32}, or "
            "data.filter_overlong_prompts=true to leave them out"
        )
