"""The table of rollouts that goes to Weights & Biases."""

from __future__ import annotations

import pytest

from tests.support import rollout_line
from trainers.samples import COLUMNS, chosen, sample_rows


def line(number: int):
    made = rollout_line(step=3, input=f"p{number}", ground_truth=7, reward=1.0)
    return made | {"output": f"r{number}"}


@pytest.mark.parametrize(("count", "limit", "expected"), [(0, 4, []), (3, 4, [0, 1, 2]), (16, 4, [0, 4, 8, 12])])
def test_lines_are_spread_over_the_step(count, limit, expected):
    lines = [{"number": i} for i in range(count)]
    assert [item["number"] for item in chosen(lines, limit)] == expected


def test_rows():
    (row,) = sample_rows([line(1)], 8)
    made = dict(zip(COLUMNS, row, strict=True))
    assert made == {
        "step": 3,
        "prompt": "p1",
        "response": "r1",
        "ground_truth": "7",
        "reward": 1.0,
        "tokens": 3,
        "steps": 3,
        "confidence": pytest.approx(0.4),
        "finish_reason": "stop",
        "weight_version": "2",
    }
