"""The figures of ``recipes.evaluate`` as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from recipes.evaluate import Result

_BARS = " ▁▂▃▄▅▆▇█"


def sparkline(shares: Sequence[float]) -> str:
    """Shares as bars, the largest of them full; one that is not 0 is never blank."""
    top = max(shares, default=0.0)
    if not top:
        return _BARS[0] * len(shares)
    return "".join(_BARS[0] if not share else _BARS[max(1, round(share / top * 8))] for share in shares)


def results_table(results: Sequence[Result], title: str) -> Table:
    """One row per variant."""
    table = Table(title=title, title_justify="left")
    table.add_column("decoder", overflow="fold")
    for header in ("accuracy (95 %)", "malformed", "tokens/forward", "visible tokens/s"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("confidence 0 to 1", no_wrap=True)
    for r in results:
        s = r.scores
        table.add_row(
            r.label,
            f"{s.accuracy:.3f} ({s.accuracy_low:.3f} to {s.accuracy_high:.3f})",
            f"{s.malformed:.3f}",
            f"{r.tokens_per_forward:.2f}",
            f"{r.tokens_per_second:.0f}",
            sparkline(r.confidence_histogram),
        )
    return table
