"""What a phase of the stress run found, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

MAX_PROBLEMS = 50
"""Problems of a phase that are kept word by word."""


@dataclass
class Phase:
    """Figures of one phase; the server passed if ``problems`` is empty.

    Attributes:
        kinds: kind of request -> what became of it (an HTTP status, "hung up", "aborted", …) -> how many.
        problem_count: all problems, also those whose text was not kept.
    """

    name: str
    requests: int = 0
    seconds: float = 0.0
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0

    def count(self, kind: str, outcome: str) -> None:
        row = self.kinds.setdefault(kind, {})
        row[outcome] = row.get(outcome, 0) + 1
        self.requests += 1

    def problem(self, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text[:1000])

    def outcomes(self) -> dict[str, int]:
        """Over all kinds."""
        total: dict[str, int] = {}
        for row in self.kinds.values():
            for outcome, count in row.items():
                total[outcome] = total.get(outcome, 0) + count
        return dict(sorted(total.items()))


def table_of(phases: Sequence[Phase]) -> Table:
    """A row per phase."""
    table = Table(title="Stress", title_justify="left")
    for column in ("phase", "requests", "seconds", "answers", "figures", "problems"):
        table.add_column(column)
    for p in phases:
        answers = ", ".join(f"{outcome}: {count}" for outcome, count in p.outcomes().items())
        figures = ", ".join(f"{name} {value:.4g}" for name, value in p.figures.items())
        table.add_row(p.name, str(p.requests), f"{p.seconds:.0f}", answers, figures, str(p.problem_count))
    return table
