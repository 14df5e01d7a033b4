"""How answers are summed up: intervals, prompts with several answers, and one summary for all who need one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trainers.metrics import validation_metrics
from trainers.scores import score_answer, summarise_scores, wilson_interval


def test_wilson_interval_of_known_cases():
    """Figures of Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3."""
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson_interval(right / count, count) == pytest.approx((low, high), abs=5e-5)
    low, high = wilson_interval(1.0, 20)
    assert (low, high) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)


def test_wilson_interval_covers_the_share_it_was_drawn_from():
    generator = np.random.default_rng(0)
    for share in (0.02, 0.5, 0.9):
        draws = generator.binomial(64, share, 4000)
        inside = [low <= share <= high for low, high in (wilson_interval(d / 64, 64) for d in draws)]
        assert 0.92 < np.mean(inside) < 0.985


@pytest.mark.parametrize(("share", "count"), [(0.5, 0), (1.5, 4), (-0.1, 4)])
def test_no_interval_without_observations(share, count):
    with pytest.raises(ValueError, match="no interval"):
        wilson_interval(share, count)


def score(acc, malformed=0.0):
    return {"acc": float(acc), "malformed": float(malformed)}


def test_several_answers_to_a_prompt():
    scores = [score(1), score(0, 1), score(0), score(0, 1), score(1), score(1)]
    summary = summarise_scores(scores, ["a", "a", "b", "b", "c", "c"])
    assert (summary.accuracy, summary.malformed) == (0.5, pytest.approx(2 / 6))
    assert summary.pass_at_n == pytest.approx(2 / 3)
    assert (summary.prompts, summary.answers) == (3, 6)
    assert (summary.accuracy_low, summary.accuracy_high) == wilson_interval(0.5, 3), "answers of a prompt are one trial"


def test_nothing_to_sum_up():
    with pytest.raises(ValueError, match="no answers"):
        summarise_scores([], [])


def test_validation_metrics_are_the_same_summary():
    fields = {"acc": [1.0, 0.0, 1.0, 0.0], "malformed": [0.0, 1.0, 0.0, 0.0], "reward": [1.0, 0.0, 1.0, 0.0]}
    metrics = validation_metrics(["u", "v", "w", "x"], fields)
    summary = summarise_scores([score(a, m) for a, m in zip(fields["acc"], fields["malformed"], strict=True)], range(4))
    assert metrics["val/accuracy"] == summary.accuracy and metrics["val/malformed"] == summary.malformed
    assert (metrics["val/accuracy_low"], metrics["val/accuracy_high"]) == wilson_interval(0.5, 4)


@pytest.mark.parametrize("rewards", [{}, {"acc": [1.0]}, {"acc": [1.0, None], "malformed": [0.0, 0.0]}])
def test_rewards_without_an_accuracy_have_no_summary(rewards):
    assert validation_metrics(["u", "v"], rewards) == {}


def test_answers_are_scored_as_in_training():
    row = {
        "data_source": "reasoning_gym/sudoku",
        "reward_model": {"ground_truth": "\n".join(" ".join("123456789") for _ in range(9))},
        "extra_info": {"metadata": json.dumps({"solution": [list(range(1, 10))] * 9})},
    }
    right = row["reward_model"]["ground_truth"]
    assert score_answer(row, right)["acc"] == 1.0 and score_answer(row, right)["malformed"] == 0.0
    wrong = score_answer(row, right[:-1] + "8")
    assert (wrong["acc"], wrong["malformed"]) == (0.0, 0.0)
    assert score_answer(row, right.replace(" ", ""))["malformed"] == 1.0
