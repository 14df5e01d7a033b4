"""The files of a run: metrics as they come, readable at any moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dllm.config import ConfigError, is_whole


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's."""
    return value.item() if hasattr(value, "item") else value


class RunRecorder:
    """Listener that appends every step and every validation to ``metrics.jsonl``."""

    def __init__(self, directory: Path) -> None:
        path = directory / "metrics.jsonl"
        cut = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self.file = path.open("a", encoding="utf-8")
        if cut:  # half a line of a killed run: the next record starts behind it
            self.file.write("\n")

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        if event == "step_end":
            self._write({"kind": "step", "step": details["step"], **details["metrics"]})
        elif event == "validate_end":
            self._write({"kind": "validation", "step": details["step"], **details["metrics"]})

    def _write(self, record: dict[str, Any]) -> None:
        plain = {key: _plain(value) for key, value in record.items()}
        self.file.write(json.dumps(plain, default=str) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """Records of ``metrics.jsonl``. A step that was run twice (after a resume) appears once, the later one.

    Raises:
        ConfigError: a line is not what ``RunRecorder`` writes, other than one that a killed run left cut.
    """
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    path = directory / "metrics.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                record = json.loads(text.decode())
            except json.JSONDecodeError:
                continue  # the last line of a killed run may be cut
            except (UnicodeDecodeError, RecursionError):
                record = None
            known = isinstance(record, dict) and isinstance(record.get("kind"), str)
            if not known or not is_whole(record.get("step"), 0):
                raise ConfigError(
                    f"line {number} of {path} is no record of a step or a validation: {text.strip()[:100]!r}; remove it"
                )
            latest[record["kind"], record["step"]] = record
    yield from sorted(latest.values(), key=lambda r: (r["step"], r["kind"]))


def read_rollouts(directory: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(step, lines) of every rollout file, in order."""
    files = (directory / "rollouts").glob("*.jsonl")
    for file in sorted((f for f in files if f.stem.isdigit()), key=lambda f: int(f.stem)):
        with file.open(encoding="utf-8") as lines:
            yield int(file.stem), [json.loads(line) for line in lines if line.strip()]
