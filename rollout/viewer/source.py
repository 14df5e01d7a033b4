"""Where rollouts lie: the files of a run directory or one file, and what the run says of its model."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dllm.config import ConfigError
from dllm.trace import TraceError
from rollout.records import read_parquet
from rollout.saved import SUFFIXES

MAX_STEPS = 1_000_000
"""Longest range of training steps that is spelt out."""


@dataclass(frozen=True)
class Rollouts:
    """Rollout files and where they come from.

    Attributes:
        name: of the run or the file, for the page's title.
        files: (training step, file) in order; the step is None where the file name does not say.
        default_out: the HTML file, unless another is asked for.
        model_paths: where a tokenizer may be, the best place first.
    """

    name: str
    files: list[tuple[int | None, Path]]
    default_out: Path
    model_paths: list[Path]


def parse_steps(text: str) -> set[int]:
    """The numbers of a list such as ``1,5,10-20``.

    Raises:
        ConfigError: a part is neither a number nor a range.
    """
    steps: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"steps={text!r}: {part.strip()!r} is no step; write for instance 1,5,10-20")
        chosen = range(int(first), int(last or first) + 1)
        if chosen.stop - chosen.start > MAX_STEPS:
            raise ConfigError(f"steps={text!r}: {part.strip()!r} is more than {MAX_STEPS} steps; write a shorter range")
        steps.update(chosen)
    return steps


def find_rollouts(path: str | Path, steps: Collection[int] | None = None) -> Rollouts:
    """The rollout files at ``path``: a run directory (``rollouts/<step>.jsonl``), that folder itself, or one file.

    Args:
        steps: training steps to keep of a directory; None for all.

    Raises:
        ConfigError: there are none.
    """
    root = Path(path)
    if root.is_file():
        if steps is not None:
            raise ConfigError(
                f"steps={sorted(steps)} need a run directory, and {str(path)!r} is a file; remove --steps"
            )
        return Rollouts(root.name, [(None, root)], root.with_suffix(".html"), [])
    if not root.is_dir():
        raise ConfigError(f"run {str(path)!r} does not exist; pass a run directory or a .jsonl file of rollouts")
    folder = root / "rollouts" if (root / "rollouts").is_dir() else root
    files = [file for suffix in reversed(SUFFIXES) for file in folder.glob(f"*{suffix}") if file.stem.isdecimal()]
    found = sorted({int(file.stem): file for file in files}.items())  # JSON lines, where a step has both
    if not found:
        raise ConfigError(
            f"run {str(path)!r} has no rollouts/<step>.jsonl or .parquet; pass the directory of a training run that "
            "finished a step, or a .jsonl file of rollout.generate"
        )
    files: list[tuple[int | None, Path]] = [(step, file) for step, file in found if steps is None or step in steps]
    if not files:
        raise ConfigError(
            f"none of steps={sorted(steps or ())} is in {str(path)!r}, which has {found[0][0]} to {found[-1][0]}"
        )
    run = folder.resolve().parent if folder.name == "rollouts" else root.resolve()
    return Rollouts(run.name, files, root / "viewer.html", model_paths(run))


def model_paths(run: Path) -> list[Path]:
    """Directories in which a run's tokenizer may be: its model, then its own checkpoints, the newest first."""
    paths = []
    if (run / "config.yaml").is_file():
        try:
            config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
            named = config["actor_rollout_ref"]["model"]["path"]
        except (yaml.YAMLError, KeyError, TypeError):
            named = None  # not a config of a training run: there may still be checkpoints
        if isinstance(named, str):
            paths.append(Path(named).expanduser())
    saved = run.glob("checkpoints/global_step_*/actor/huggingface")
    paths += sorted(saved, key=lambda p: -int("0" + p.parts[-3].removeprefix("global_step_")))
    return [path for path in paths if path.is_dir()]


def texts_of(path: Path) -> Iterator[str]:
    """The lines of a rollout file as JSON texts, each with the end that it has in the file.

    Raises:
        TraceError: a parquet file that is none.
    """
    if path.suffix == ".parquet":
        for line in read_parquet(path):
            yield json.dumps(line) + "\n"
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def parse_line(path: Path, number: int, text: str) -> dict[str, Any] | None:
    """The JSON object of one line; None for a last line that was cut when its writer died.

    Raises:
        TraceError: it is not a JSON object; the message has its number.
    """
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        if not text.endswith("\n") and number > 1:
            return None
        raise TraceError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise TraceError(f"{path} line {number} is not a JSON object")
    return line
