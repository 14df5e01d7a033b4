"""Saved rollouts in the place of an engine: the same prompts and seeds find the samples that were decoded before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm.config import ConfigError
from rollout.records import RolloutError, engine_line, read_lines

SUFFIXES = (".jsonl", ".parquet")


def step_file(directory: str | Path, step: int) -> Path | None:
    """File of a step's rollouts, JSON lines or parquet; None if there is none."""
    files = [Path(directory) / f"{step}{suffix}" for suffix in SUFFIXES]
    return next((file for file in files if file.is_file()), None)


def saved_steps(directory: str | Path) -> int:
    """Number of the last step such that it and all before it are saved."""
    step = 0
    while step_file(directory, step + 1) is not None:
        step += 1
    return step


def check_saved(directory: str | Path, steps: int) -> None:
    """Refuse a directory that does not hold the steps of a run.

    Raises:
        ConfigError: steps 1 to ``steps`` are not all there.
    """
    if (found := saved_steps(directory)) < steps:
        raise ConfigError(
            f"load_debug_rollouts={str(directory)!r} has the rollouts of {found} steps (1{SUFFIXES[0]}, ...), the run "
            f"takes {steps}; lower trainer.total_training_steps or give the directory of a longer run"
        )


class SavedRollouts:
    """Rollouts of a run by step, prompt and seed; one step is held at a time."""

    def __init__(self, directory: str | Path) -> None:
        self.directory, self.step = Path(directory), 0
        self.lines: dict[tuple[tuple[int, ...], int | None], dict[str, Any]] = {}

    def line(self, step: int, prompt_ids: Sequence[int], seed: int) -> dict[str, Any]:
        """The line of one sample as the engine made it.

        Raises:
            RolloutError: there is none.
        """
        if step != self.step:
            file = step_file(self.directory, step)
            if file is None:
                raise RolloutError(f"{self.directory} has no rollouts of step {step}")
            self.lines = {
                (tuple(line["input_ids"]), line["sampling_params"].get("seed")): engine_line(line)
                for line in read_lines(file)
            }
            self.step = step
        found = self.lines.get((tuple(prompt_ids), seed))
        if found is None:
            raise RolloutError(
                f"the rollouts of step {step} in {self.directory} have no sample of this prompt and seed: the run that "
                "saved them had another recipe.seed, task, data.train_batch_size or rollout.n"
            )
        return found
