"""Rollout traces: geometry, invariants of an honest log, and the round trip through a line of JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dllm.decoding import SamplingParams, SelectionRule
from dllm.trace import PER_TOKEN, RolloutTrace, TraceError
from tests.support import hand_made_trace


def trace(**changes) -> RolloutTrace:
    """Block size 4: a prompt of 6 tokens, so two tokens end its block, then two whole blocks; 7 tokens visible."""
    made = hand_made_trace(
        prompt=[5, 6, 7, 8, 9, 5],
        response=[10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
        reveal_step=[1, 0, 0, 2, 1, 0, 3, 2, 1, 0],
        block_size=4,
        visible=7,
        weight_versions=["3", "3", "4"],
        sampling=SamplingParams(0.8, 0.9, 20, 0.01),
    )
    made.logprob = -np.arange(10, dtype=np.float32) / 7
    made.logprob_raw = -np.arange(10, dtype=np.float32) / 5
    made.confidence = np.linspace(0.1, 1, 10, dtype=np.float32)
    return replace(made, **changes)


EDITS = [(2, 2, 10, 30, 31), (2, 3, 8, 40, 41), (2, 3, 10, 31, 14)]
"""In the second whole block (positions 8 to 11), drawn at steps 0, 2, 1, 0: 30 became 31 and then 14, 40 became 41."""


def edited(**changes) -> RolloutTrace:
    """``trace`` with edits; step 3 of block 1 draws nothing."""
    ids = trace().replay_ids
    ids[2] = 41
    return trace(**({"replay_ids": ids, "edits": EDITS, "steps_per_block": [2, 4, 4]} | changes))


def test_drawn_tokens_are_those_before_the_edits():
    made = edited()
    made.validate()
    assert made.drawn_ids.tolist() == [10, 11, 40, 13, 30, 15, 16, 17, 18, 19]
    assert made.replay_ids.tolist() == [10, 11, 41, 13, 14, 15, 16, 17, 18, 19], "the trace itself is not touched"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edits": [(1, 2, 10, 30, 14)]}, r"position 10 is no generated token of block 1"),
        ({"edits": [(1, 2, 5, 30, 14)]}, r"position 5 is no generated token of block 1"),
        ({"edits": [(4, 2, 16, 30, 14)]}, r"position 16 is no generated token of block 4"),
        ({"edits": EDITS[::-1]}, r"edit \(2, 2, 10, 30, 31\) comes after one of block 2, step 3: out of order"),
        ({"edits": [(2, 0, 8, 40, 41)]}, r"edit \(2, 0, .*: position 8 was drawn or edited at step 0"),
        ({"edits": [EDITS[0], (2, 2, 10, 31, 14)]}, r"position 10 was drawn or edited at step 2"),
        ({"edits": [EDITS[0], EDITS[1], (2, 3, 10, 32, 14)]}, r"edit \(2, 3, 10, 32, 14\): the token there was 31"),
        ({"edits": [EDITS[1], (2, 3, 9, 13, 13)]}, r"edit \(2, 3, 9, 13, 13\): the token there was 13"),
        ({"edits": EDITS[:2]}, r"edits leave 31 at position 10, not 14"),
        ({"edits": [(2, 4, 8, 40, 41)]}, r"block 1: step 4 is not among its 4 steps"),
        ({"edits": [*EDITS[:1], (2, 3, 10, 31, 14)], "steps_per_block": [2, 5, 4]}, r"\[0, 1, 2, 3\] are not 0..4"),
        ({"edits": [], "steps_per_block": [2, 4, 4]}, r"block 1: reveal steps \[0, 1, 2\] are not 0..3"),
    ],
)
def test_edits_that_contradict_the_tokens_are_refused(changes, message):
    with pytest.raises(TraceError, match=message):
        edited(**changes).validate()


def test_select_logprobs_ride_on_the_first_token_of_a_step():
    values = [[-1.0, -2.0], [-3.0, -4.0, -5.0], [-6.0, -7.0, -8.0, 0.0]]
    made = trace(select_logprobs=values, selection=SelectionRule(0.9, 1))
    made.validate()
    assert made.reveal_step.tolist() == [1, 0, 0, 2, 1, 0, 3, 2, 1, 0]
    assert made.select_logprob.tolist() == [-2, -1, -3, -5, -4, 0, 0, -8, -7, -6]
    np.testing.assert_array_equal(made.action_logprob, made.logprob + made.select_logprob)
    assert made.action_logprob.sum() == pytest.approx(made.logprob.sum() - 36, rel=1e-6)
    assert trace().action_logprob.tolist() == trace().logprob.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select_logprobs": None, "selection": SelectionRule(0.9, 1)}, "selection has no select_logprob beside it"),
        ({"select_logprobs": [[0.0, 0.0]]}, "select_logprob has 1 entries for 3 blocks"),
        (
            {"select_logprobs": [[0.0], [0.0] * 3, [0.0] * 4]},
            "block 0: select_logprob has 1 entries for 2 steps",
        ),
        (
            {"select_logprobs": [[0.0, 0.1], [0.0] * 3, [0.0] * 4]},
            "block 0: select_logprob has entries that are not finite or above 0",
        ),
        (
            {"select_logprobs": [[0.0, 0.0], [0.0] * 3, [0.0, 0.0, 0.0, -np.inf]]},
            "block 2: select_logprob has entries that are not finite or above 0",
        ),
    ],
)
def test_select_logprobs_that_contradict_the_steps_are_refused(changes, message):
    with pytest.raises(TraceError, match=message):
        trace(**changes).validate()


def test_geometry():
    made = trace()
    made.validate()
    assert made.first_block == 1
    assert [made.block_slice(i) for i in range(3)] == [slice(0, 2), slice(2, 6), slice(6, 10)]
    assert made.steps_per_block == [2, 3, 4]
    assert made.forward_passes == 9 + 3
    assert made.tokens_per_forward == pytest.approx(10 / 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprob": np.zeros(9, np.float32)}, "logprob has 9 entries for 10 replay tokens"),
        ({"confidence": np.zeros(11, np.float32)}, "confidence has 11 entries for 10 replay tokens"),
        (
            {"prompt_ids": np.zeros(5, np.int32)},
            "do not end on the grid of block size 4: the rest of the terminal block",
        ),
        ({"visible": 11}, "visible length 11 is outside the 10 replay tokens"),
        ({"steps_per_block": [2, 3]}, "steps_per_block has 2 entries for 3 blocks"),
        ({"weight_versions": ["0"]}, "weight_versions has 1 entries for 3 blocks"),
        ({"steps_per_block": [2, 4, 4]}, r"block 1: reveal steps \[0, 1, 2\] are not 0..3 without a gap"),
        (
            {"reveal_step": np.array([1, 0, 0, 2, 2, 0, 3, 2, 1, 0], np.int16)},
            r"block 1: reveal steps \[0, 2\] are not 0..2 without a gap",
        ),
        ({"logprob": np.full(10, np.nan, np.float32)}, "logprob has entries that are not finite or above 0"),
        ({"logprob": np.full(10, 0.1, np.float32)}, "logprob has entries that are not finite or above 0"),
    ],
)
def test_a_log_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(TraceError, match=message):
        trace(**changes).validate()


def test_a_token_that_was_never_drawn_excuses_its_block():
    steps = np.array([1, 0, 0, 2, 1, 0, 2, -1, 1, -1], np.int16)
    trace(reveal_step=steps).validate()


def test_round_trip_through_json():
    selects = [[-0.1, 0.0], [-1.0, -2.0, 0.0, 0.0], [-1e-6, 0.0, -3.5, 0.0]]
    made = edited(select_logprobs=selects, selection=SelectionRule(0.95, 2))
    line = json.loads(json.dumps(made.to_line()))
    assert line["output_ids"] == [10, 11, 41, 13, 14, 15, 16]
    assert line["tail"]["ids"] == [17, 18, 19]
    assert len(line["logprob"]) == 7 and len(line["tail"]["logprob"]) == 3
    back = RolloutTrace.from_line(line)
    for name in ("prompt_ids", "replay_ids", *PER_TOKEN):
        left, right = getattr(made, name), getattr(back, name)
        assert left.dtype == right.dtype and np.array_equal(left, right), name
    for name in (
        "visible",
        "steps_per_block",
        "weight_versions",
        "block_size",
        "sampling",
        "select_logprobs",
        "edits",
        "selection",
    ):
        assert getattr(made, name) == getattr(back, name), name


def test_log_probs_survive_json_exactly():
    values = -np.abs(np.random.default_rng(0).standard_normal(10)).astype(np.float32)
    back = RolloutTrace.from_line(json.loads(json.dumps(trace(logprob=values).to_line())))
    assert np.array_equal(back.logprob, values)


def test_lines_without_the_optional_keys():
    line = trace().to_line()
    del line["weight_versions"], line["logprob_raw"], line["block_size"]
    del line["tail"]["logprob_raw"]
    line["weight_version"] = "9"
    back = RolloutTrace.from_line(line, block_size=4)
    assert back.weight_versions == ["9"] * 3
    assert np.array_equal(back.logprob_raw, back.logprob)


@pytest.mark.parametrize("key", ["tail", "reveal_step", "steps_per_block", "block_size", "sampling_params"])
def test_a_missing_key_is_named(key):
    line = trace().to_line()
    del line[key]
    with pytest.raises(TraceError, match=f"rollout line has no '{key}'; it was not written by this package"):
        RolloutTrace.from_line(line)


def test_a_cut_tail_is_refused():
    line = trace().to_line()
    line["tail"] = {name: [] for name in ("ids", *PER_TOKEN)}
    with pytest.raises(TraceError, match="the rest of the terminal block is missing"):
        RolloutTrace.from_line(line)
