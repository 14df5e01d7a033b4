"""Numbers of a step: engine against trainer, diversity, decoding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import hand_made_trace
from tests.support import rollout_line as line
from trainers.metrics import (
    difference_summary,
    divergence_metrics,
    gate_excess,
    group_diversity,
    logprob_differences,
    refresh_metrics,
    replay_field,
    signed_differences,
    step_metrics,
)


def test_a_field_over_the_whole_replay():
    assert replay_field(line(), "logprob") == [-1.0, -2.0, -3.0, -4.0]


def test_differences_cover_drawn_tokens_of_the_tail_too():
    first = line(trainer=(-1.0, -2.5, -3.0, -4.25), router_tie=[False, True, False, False])
    second = line()
    second["reveal_step"] = [0, -1, 0]
    second["trainer_logprob"] = [-1.0, -99.0, -3.125, -4.0]
    diffs, ties = logprob_differences([first, second])
    assert diffs.tolist() == [0, 0.5, 0, 0.25, 0, 0.125, 0]
    assert ties.tolist() == [False, True, False, False, False, False, False]


def test_a_random_choice_of_positions_is_compared_with_the_first_token_of_its_step():
    """The trainer's log-prob of that token has the step's choice of positions in it."""
    trace = hand_made_trace([5], [10, 11, 12], [1, 0, 1], 4, select_logprobs=[[-2.0, -3.0]])
    made = trace.to_line() | {"trainer_logprob": [-4.0, -3.5, -1.0], "router_tie": [False] * 3}
    diffs, _ = logprob_differences([made])
    assert diffs == pytest.approx([0, 0.5, 0])


def test_values_of_another_likelihood_are_not_compared():
    other = line()
    other["trainer_likelihood"] = [-50.0] * len(other.pop("trainer_logprob"))
    assert logprob_differences([other])[0].tolist() == []
    metrics = step_metrics([other, other])
    assert not any(key.startswith("rollout_corr/") for key in metrics)
    assert metrics["dllm/tokens_per_forward"] == pytest.approx(8 / 6)


def test_summary_leaves_ties_out_of_one_maximum_only():
    diffs = np.concatenate([np.zeros(998), [0.25, 3.0]])
    ties = np.zeros(1000, bool)
    ties[-1] = True
    summary = difference_summary(diffs, ties)
    assert summary["max"] == 3.0 and summary["max_without_ties"] == 0.25
    assert summary["mean"] == pytest.approx(0.00325)
    assert summary["p99"] == 0 and 0.25 <= summary["p999"] < 3.0
    assert difference_summary(np.zeros(0), np.zeros(0, bool)) == {}
    assert difference_summary(np.ones(2), np.ones(2, bool))["max_without_ties"] == 0.0


def test_divergence_of_known_differences():
    signed = np.array([np.log(2), -np.log(2), 0.0, 0.0])
    metrics = divergence_metrics(signed)
    assert metrics["rollout_corr/k3"] == pytest.approx((2 - 1 + 0.5 - 1) / 4)
    assert metrics["rollout_corr/exp_mean_abs_diff"] == pytest.approx(2**0.5)
    assert divergence_metrics(np.zeros(0)) == {}


def test_k3_estimates_the_divergence_from_the_engine():
    generator = np.random.default_rng(0)
    engine, trainer = generator.dirichlet(np.ones(5)), generator.dirichlet(np.ones(5))
    tokens = generator.choice(5, 200_000, p=engine)
    k3 = divergence_metrics(np.log(trainer[tokens]) - np.log(engine[tokens]))["rollout_corr/k3"]
    assert k3 == pytest.approx(float((engine * np.log(engine / trainer)).sum()), rel=0.02)


def test_differences_keep_their_sign():
    signed, _ = signed_differences([line(trainer=(-1.0, -2.5, -3.0, -3.75))])
    assert signed.tolist() == [0, -0.5, 0, 0.25]


def test_diversity_is_counted_on_visible_tokens():
    lines = [line("a"), line("a", tail=(9,)), line("a", output=(1, 2, 9)), line("b"), line("b")]
    assert group_diversity(lines) == pytest.approx((2 + 1) / 2)
    assert group_diversity([]) == 0


def test_step_metrics():
    lines = [
        line("a", acc=1.0, malformed=0.0),
        line("a", output=(1, 2), engine=(-1.0, -2.0, -3.0), acc=0.0, malformed=1.0, finish_reason="length"),
    ]
    lines[1] |= {"reveal_step": [0, 0], "confidence": [0.5, 0.5], "steps_per_block": [1], "weight_version": "3"}
    lines[1]["tail"] |= {"reveal_step": [0], "logprob": [-3.0]}
    lines[1] |= {"trainer_logprob": [-1.0, -2.0, -3.5], "router_tie": [False, False, True]}
    metrics = step_metrics(lines)
    assert metrics["dllm/tokens_per_forward"] == pytest.approx(7 / 4)
    assert metrics["dllm/steps_per_block/mean"] == 2
    assert metrics["dllm/visible_length/mean"] == 2.5 and metrics["dllm/visible_length/max"] == 3
    assert metrics["dllm/confidence/mean"] == pytest.approx((0.2 + 0.4 + 0.6 + 0.5 + 0.5) / 5)
    assert metrics["dllm/router_tie_tokens"] == 1
    assert metrics["rollout/length_limit_ratio"] == 0.5
    assert metrics["rollout/acc"] == 0.5 and metrics["rollout/malformed"] == 0.5
    assert metrics["rollout/group_diversity"] == 2
    assert (metrics["rollout/weight_version/min"], metrics["rollout/weight_version/max"]) == (2, 3)
    assert metrics["rollout_corr/logprob_abs_diff/max"] == 0.5
    assert metrics["rollout_corr/logprob_abs_diff/max_without_ties"] == 0


def test_refresh_metrics():
    """Of two engines the slower counts, bytes add up, and the lag is that of the oldest block."""
    one = {"weight_sync/total_seconds": 1.0, "weight_sync/bytes": 10, "weight_sync/goodput_gbps": 5.0}
    two = {"weight_sync/total_seconds": 2.0, "weight_sync/bytes": 10, "weight_sync/goodput_gbps": 2.5}
    lines = [{"weight_versions": ["6", "6"]}, {"weight_versions": ["5", "6"]}]
    assert refresh_metrics([one, two, None], lines, 7) == {
        "weight_sync/total_seconds": 2.0,
        "weight_sync/bytes": 20,
        "weight_sync/goodput_gbps": 2.5,
        "weight_sync/version": 7.0,
        "weight_sync/lag": 1.0,
    }


@pytest.mark.parametrize(
    ("worst", "limit", "stops"),
    [(1e-3, 1e-4, True), (1e-4, 1e-4, False), (1e-5, 1e-4, False), (float("nan"), 1e-4, True), (9.0, None, False)],
)
def test_a_run_stops_above_its_limit(worst, limit, stops):
    assert (gate_excess({"rollout_corr/logprob_abs_diff/p999": worst}, limit) is not None) == stops
    assert gate_excess({}, limit) is None, "another likelihood is not on the engine's scale"
