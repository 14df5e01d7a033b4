"""Rewards: exact answers only, malformed answers told apart, bounded in time from any thread."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from dllm.config import ConfigError
from tests.support import DATA
from trainers.math_verifier import MathVerifier
from trainers.rewards import compute_score, extract_answer


def score(text, gold, source="reasoning_gym/chain_sum", **metadata):
    return compute_score(source, text, gold, {"metadata": json.dumps(metadata)})


@pytest.mark.parametrize(
    ("text", "acc", "malformed"),
    [
        ("42", 1, 0),
        (" 42\n", 1, 0),
        ("-42", 0, 0),
        ("43", 0, 0),
        ("420", 0, 0),
        ("The answer is 42.", 1, 1),
        ("It is 17, no, 42", 1, 1),
        ("\\boxed{42}", 1, 0),
        ("so <answer> 42 </answer>", 1, 0),
        ("<answer>41</answer> 42", 0, 0),
        ("--42", 0, 1),
        ("4 2", 0, 1),
        ("42.5", 0, 1),
        ("40+2", 0, 1),
        ("forty-two", 0, 1),
        ("", 0, 1),
    ],
)
def test_whole_numbers(text, acc, malformed):
    assert score(text, "42") == {"score": acc, "acc": acc, "malformed": malformed}


def test_near_misses_get_nothing():
    """reasoning-gym itself gives a wrapped right answer a part of a point; here it is all or nothing."""
    from reasoning_gym.factory import get_score_answer_fn

    entry = {"question": "", "answer": "42", "metadata": {}}
    assert 0 < get_score_answer_fn("chain_sum")(answer="about 42 or so", entry=entry) < 1
    assert score("about 42 or so", "42")["score"] == 1
    assert score("1422", "42")["score"] == 0


def test_metadata_reaches_the_scorer():
    """Countdown accepts any expression that reaches the target, which only its metadata name."""
    right = score("(10 - 4) * 2", "2*(10-4)", "reasoning_gym/countdown", numbers=[2, 4, 10], target=12)
    assert right == {"score": 1, "acc": 1, "malformed": 0}
    wrong = score("10 + 4", "2*(10-4)", "reasoning_gym/countdown", numbers=[2, 4, 10], target=12)
    assert wrong == {"score": 0, "acc": 0, "malformed": 0}
    assert score("I do not know", "x", "reasoning_gym/countdown", numbers=[2], target=2)["malformed"] == 1


def test_last_box_wins_and_braces_balance():
    assert extract_answer("\\boxed{1} then \\boxed{\\frac{1}{2}}", "other")[0] == "\\frac{1}{2}"


def test_unknown_sources_are_refused():
    with pytest.raises(ConfigError, match="data_source='poetry' has no reward"):
        compute_score("poetry", "x", "x")
    with pytest.raises(ConfigError, match="reasoning_gym/chainsum"):
        compute_score("reasoning_gym/chainsum", "x", "x")


def test_gsm8k_in_worker_threads():
    """Right answers score 1 and wrong ones 0, from threads that are not the main one."""
    rows = pd.read_parquet(DATA / "gsm8k_50.parquet").to_dict("records")
    assert len(rows) == 50

    def both(row):
        gold = row["reward_model"]["ground_truth"]
        scored = [
            compute_score(row["data_source"], text, gold, row["extra_info"])
            for text in (f"First this, then that.\n#### {gold}", f"So it is \\boxed{{{gold}1}}.", "I cannot say.")
        ]
        return [(s["score"], s["malformed"]) for s in scored]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(both, rows))
    assert results == [[(1, 0), (0, 0), (0, 1)]] * 50


def test_math_answers_are_compared_by_value():
    assert compute_score("math500", "Hence \\boxed{\\frac{2}{4}}", "\\frac{1}{2}")["acc"] == 1
    assert compute_score("math500", "Hence \\boxed{\\frac{2}{5}}", "\\frac{1}{2}")["acc"] == 0


def test_a_comparison_that_takes_too_long_is_stopped_and_the_next_one_works():
    verifier = MathVerifier(seconds=60)
    try:
        assert verifier.compare("72", "72").equal
        first_child = verifier._child.pid
        verifier.seconds = 1
        started = time.monotonic()
        slow = verifier.compare("1", "\\boxed{" + "+".join(f"\\sin(x^{{{i}}})^{{99}}" for i in range(400)) + "}")
        assert time.monotonic() - started < 10
        assert not slow.equal
        verifier.seconds = 60
        assert verifier.compare("72", "\\boxed{72}").equal
        assert verifier._child.pid != first_child
    finally:
        verifier.close()
