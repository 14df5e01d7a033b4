"""What a warm start imitates: for every prompt a few demonstrations, some of them by an annotator with a flaw.

A model that is merely trained too little fails without pattern, and RL has nothing to select from. One that has
learned two habits, a right and a wrong one, draws both at temperature 1: RL strengthens the right one. The share of
flawed demonstrations sets where it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

DEMONSTRATIONS = 10
"""Demonstrations per prompt, so shares are multiples of a tenth."""


def forgets_to_carry(answer: str, metadata: Mapping[str, Any]) -> str:
    """The answer to a sum of someone who drops what is carried from (or borrowed by) the ones.

    Where nothing is carried it is the right answer.

    Args:
        answer: the right one.
        metadata: of the entry of reasoning-gym's ``chain_sum``: ``expression`` is terms joined by ' + ' and ' - '.
    """
    first, *rest = metadata["expression"].split()
    terms = [int(first)]
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        terms.append(int(term) if operator == "+" else -int(term))
    tens = sum(int(term / 10) for term in terms)
    return str(10 * tens + sum(terms) % 10)


FLAWED: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {"chain_sum": forgets_to_carry}
"""Annotators with a flaw, by task of reasoning-gym."""


def demonstrations(task: str, row: Mapping[str, Any], flawed_share: float) -> list[str]:
    """Answers to imitate for one row of a task's parquet file.

    Args:
        task: name of the generator.
        flawed_share: fraction of ``DEMONSTRATIONS`` that the flawed annotator gives, rounded; 0 gives one right
            answer.
    """
    answer = row["reward_model"]["ground_truth"]
    flawed = round(flawed_share * DEMONSTRATIONS)
    if not flawed:
        return [answer]
    metadata = json.loads(row["extra_info"]["metadata"])
    return [FLAWED[task](answer, metadata)] * flawed + [answer] * (DEMONSTRATIONS - flawed)
