"""What a person sees while a run goes on: a bar per phase, a line per step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tqdm import tqdm

PHASES = ("rollout", "log-probs", "update", "weight refresh")
_TIMINGS = {
    "gen": "timing_s/gen",
    "logp": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
}


@contextmanager
def library_output_to(log: Path) -> Iterator[TextIO]:
    """Send everything this process and its children print to a file; yields the terminal.

    On the level of file descriptors, because Ray and the engine print from C++ and from child processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    terminal = os.fdopen(os.dup(saved[0]), "w", encoding="utf-8")
    try:
        yield terminal
    finally:
        # A bar that a library left open would be drawn on the terminal when the interpreter collects it.
        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()
        terminal.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def step_line(step: int, total: int, metrics: dict[str, Any]) -> str:
    """One line for one step."""
    get = lambda key: metrics.get(key, float("nan"))
    seconds = " ".join(f"{name} {get(key):.1f}" for name, key in _TIMINGS.items())
    parts = [
        f"step {step:>3}/{total}",
        f"reward {get('critic/rewards/mean'):.3f}",
        f"acc {get('rollout/acc'):.3f}",
        f"tokens/forward {get('dllm/tokens_per_forward'):.2f}",
    ]
    if (difference := "rollout_corr/logprob_abs_diff/p999") in metrics:  # a likelihood on the engine's scale
        parts.append(f"|dlogp| p99.9 {metrics[difference]:.1e}")
    return "  ".join([*parts, f"step {get('timing_s/step'):.1f} s ({seconds})"])


def validation_accuracy(metrics: dict[str, Any], name: str = "accuracy") -> float | None:
    """A held-out figure of ``trainers.metrics.validation_metrics``; None with a reward that has no accuracy."""
    value = metrics.get(f"val/{name}")
    return None if value is None else float(value)


class RunConsole:
    """Listener of ``trainers.trainer.BlockDiffusionTrainer`` that draws the progress of a run."""

    def __init__(self, terminal: TextIO | None = None) -> None:
        self.console = Console(file=terminal, highlight=False, soft_wrap=True)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self.task: Any = None
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "start", time.monotonic()

    def __enter__(self) -> RunConsole:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._enter("end")
        self.progress.stop()

    def _enter(self, phase: str) -> None:
        """Book the time since the last phase began, and begin another."""
        now = time.monotonic()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def _bar(self, description: str, total: float, completed: float = 0) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(description, total=total, completed=completed)

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        if event == "phase":
            self._on_phase(details["name"])
        elif event == "step_begin":
            self.step, self.total = details["step"], details["total"]
        elif event == "step_end":
            self._enter("bookkeeping")
            self.console.print(step_line(details["step"], self.total, details["metrics"]))
        elif event == "validate_begin":
            self._enter("validation")
            self._bar(f"validation, step {details['step']}", 1)
        elif event == "validate_end":
            self._enter("bookkeeping")
            accuracy = validation_accuracy(details["metrics"])
            malformed = validation_accuracy(details["metrics"], "malformed")
            text = "validation"
            if accuracy is not None:
                low, high = (validation_accuracy(details["metrics"], f"accuracy_{end}") for end in ("low", "high"))
                text = f"validation, step {details['step']}: accuracy {accuracy:.3f} (95 % {low:.3f} to {high:.3f})"
            if malformed is not None:
                text += f", malformed {malformed:.3f}"
            self.console.print(text)

    def _on_phase(self, name: str) -> None:
        if name in PHASES:
            self._enter(name)
            self._bar(f"step {self.step}: {name}", self.total, self.step - 1)
        else:
            self._enter(f"start: {name}")
            self._bar(f"starting {name}", 1)
            if not self.console.is_terminal:
                self.console.print(f"starting {name}")
