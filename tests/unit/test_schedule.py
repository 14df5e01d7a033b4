"""Numbers of the schedule: margins and forced steps from the log, edits, sampled flips."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.decoding import SamplingParams, make_decoder
from dllm.reference import decode
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, small_model
from trainers.metrics import step_metrics
from trainers.schedule import (
    NOT_MEASURED,
    Threshold,
    edit_metrics,
    flip_metrics,
    steps_of,
    threshold_metrics,
    threshold_of,
)

OPTIONS = {
    "SelectThenSample": {"threshold": 0.1},
    "LowConfidence": {"threshold": 0.1},
    "JointThreshold": {"threshold": 0.1, "edit_threshold": 0.15},
    "SampleThenSelect": {"threshold": 0.1, "tokens_per_step": 1},
}


def written(prompt=6, steps=(1, 0, 0, 2, 1, 0), confidence=(0.5, 0.9, 0.8, 0.3, 0.6, 0.99), **changes):
    """A line of a response of one and a half blocks: block 1 in two steps, block 2 in three."""
    trace = hand_made_trace([7] * prompt, range(1, len(steps) + 1), steps, 4)
    trace.confidence[:] = confidence
    return trace.to_line() | changes


def test_steps_are_told_apart_by_block_and_step():
    assert [s.tolist() for s in steps_of(written())] == [[1], [0], [2, 5], [4], [3]]
    never = written()
    never["reveal_step"][0] = -1
    assert [s.tolist() for s in steps_of(never)] == [[1], [2, 5], [4], [3]]


def test_margins_and_forced_steps():
    metrics = threshold_metrics([written()], Threshold(0.7))
    margins = np.abs(np.array([0.5, 0.9, 0.8, 0.3, 0.6, 0.99]) - 0.7)
    assert metrics["dllm/threshold_margin/mean"] == pytest.approx(margins.mean(), abs=1e-6)
    assert metrics["dllm/threshold_margin/p05"] == pytest.approx(np.quantile(margins, 0.05), abs=1e-6)
    # Steps of block 1: 0.9 and 0.5; of block 2: 0.8 with 0.99, 0.6, 0.3.
    assert metrics["dllm/forced_top1_ratio"] == pytest.approx(3 / 5)
    assert threshold_metrics([written()], None) == {} and threshold_metrics([], Threshold(0.7)) == {}


@pytest.mark.parametrize("name", OPTIONS)
def test_forced_steps_are_those_the_decoder_forced(name):
    """Each step of a real decoder is classified as the decoder's own branch was taken."""
    model, decoder = small_model(seed=4), make_decoder(name, SMALL_MASK, OPTIONS[name])
    sampling = SamplingParams(0.0 if name == "LowConfidence" else 1.0)
    branches = []
    step = decoder.step

    def watched(blocks, logits):
        result = step(blocks, logits)
        if result.revealed.any():
            value = result.logprob.exp() if name == "SampleThenSelect" else result.confidence
            branches.append(not bool((value[result.revealed] > OPTIONS[name]["threshold"]).any()))
        return result

    decoder.step = watched
    traces = [
        decode(model, random_prompt(n, n), decoder, block_size=4, max_new_tokens=10, sampling=sampling, seed=n)
        for n in (3, 4, 6, 9)
    ]
    metrics = threshold_metrics([t.to_line() for t in traces], threshold_of(name, OPTIONS[name]))
    assert 0 < np.mean(branches) < 1
    assert metrics["dllm/forced_top1_ratio"] == pytest.approx(np.mean(branches))


def test_greedy_draws_have_no_margin_of_a_draw():
    line = written()
    line["sampling_params"] = {"temperature": 0.0}
    assert threshold_metrics([line], Threshold(0.7, of_draw=True)) == {}


def test_thresholds_of_decoders():
    assert threshold_of("SelectThenSample", {"threshold": 0.8}) == Threshold(0.8)
    assert threshold_of("SelectThenSample", {}) == Threshold(0.95)
    assert threshold_of("SampleThenSelect", {"threshold": 0.8}) == Threshold(0.8, of_draw=True)
    for other in ("StaticSteps", "EntropyBound", "Margin"):  # not compared with what is logged
        assert threshold_of(other, {}) is None


def test_edits_per_token():
    assert edit_metrics([written(), written(edits=[[1, 2, 6, 1, 2]] * 3)]) == {"dllm/edit_rate": 3 / 12}
    assert edit_metrics([written()]) == {"dllm/edit_rate": 0.0}


def test_flips_are_counted_per_state_and_per_token():
    no = NOT_MEASURED
    first = written(schedule_flip=[1.0, no, 0.0, no, no, 0.0], router_flip=[0.0, 0.5, no, 0.0, 0.0, 0.0])
    metrics = flip_metrics([first, written()])
    assert metrics == {
        "dllm/schedule_flip/ratio": 0.5,
        "dllm/schedule_flip/states": 2.0,
        "dllm/router_flip/ratio": pytest.approx(0.1),
        "dllm/router_flip/token_ratio": pytest.approx(0.2),
        "dllm/router_flip/tokens": 5.0,
    }
    assert flip_metrics([written(), written(schedule_flip=[no] * 6, router_flip=[no] * 6)]) == {}


def test_a_step_has_all_of_them():
    line = written(uid="a", finish_reason="stop", weight_version="1", schedule_flip=[0.0] * 6)
    line["trainer_logprob"], line["router_tie"] = [-1.0] * 6, [False] * 6
    metrics = step_metrics([line], Threshold(0.7))
    assert {
        "dllm/threshold_margin/mean",
        "dllm/threshold_margin/p05",
        "dllm/forced_top1_ratio",
        "dllm/edit_rate",
        "dllm/schedule_flip/ratio",
        "dllm/tokens_per_forward",
        "dllm/confidence/p05",
        "rollout_corr/k3",
        "rollout_corr/exp_mean_abs_diff",
        "rollout_corr/logprob_abs_diff/p99",
        "rollout_corr/logprob_abs_diff/max",
    } <= metrics.keys()
