"""From an engine's answer to a sample, to a line of a file, and back."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest

from dllm.decoding import SamplingParams, SelectionRule
from dllm.trace import TraceError
from rollout.engine import GenerateParams, content_seed
from rollout.records import (
    RolloutError,
    RolloutSample,
    check_trainable,
    engine_line,
    read_lines,
    read_traces,
    sample_from_response,
    tokens_per_forward,
    write_line,
    write_parquet,
)
from rollout.verl.server import check_refreshed
from tests.support import hand_made_trace, write_lines


def response(**changes):
    """Prompt of 3 tokens, block size 4, 6 visible tokens and a tail of 3."""
    blocks = [
        {"steps": 1, "weight_version": "7"},
        None,
        None,
        None,
        {"steps": 2, "weight_version": "7"},
        {
            "steps": 3,
            "weight_version": "8",
            "tail": {
                "ids": [26, 27, 28],
                "reveal_step": [0, 1, 0],
                "logprob": [-0.1, -0.2, -0.3],
                "logprob_raw": [-1, -2, -3],
                "confidence": [0.7, 0.8, 0.9],
            },
        },
    ]
    meta = {
        "finish_reason": {"type": "length", "length": 6},
        "dllm_reveal_step": [0, 1, 0, 1, 0, 2],
        "dllm_logprob": [-0.5, -0.6, -0.7, -0.8, -0.9, -1.0],
        "dllm_logprob_raw": [-1.5] * 6,
        "dllm_confidence": [0.5] * 6,
        "dllm_block": blocks,
    }
    return {"text": "hello", "output_ids": [20, 21, 22, 23, 24, 25], "meta_info": meta | changes}


def sample(**changes) -> RolloutSample:
    return sample_from_response(response(**changes), [1, 2, 3], 4, SamplingParams(0.5), 6, seed=11)


def test_sample_from_an_answer():
    made = sample()
    trace = made.trace
    assert trace.replay_ids.tolist() == list(range(20, 29)) and trace.visible == 6
    assert trace.reveal_step.tolist() == [0, 1, 0, 1, 0, 2, 0, 1, 0]
    assert trace.logprob[-3:].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert trace.steps_per_block == [1, 2, 3] and trace.weight_versions == ["7", "7", "8"]
    assert made.weight_version == "8" and made.text == "hello" and made.finish_reason == "length"


def test_line_has_every_field_and_reads_back():
    line = json.loads(json.dumps(sample().to_line()))
    for name in ("reveal_step", "logprob", "confidence", "output_ids"):
        assert len(line[name]) == 6
    assert line["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 6,
        "seed": 11,
    }
    assert {"input_ids", "text", "tail", "steps_per_block", "finish_reason", "weight_version"} <= line.keys()
    assert line["weight_version"] == "8"


@pytest.mark.parametrize(
    ("versions", "mixed"), [("777", False), ("778", True), (["torn:7->8"] * 3, True), (["default"] * 3, False)]
)
def test_a_sample_of_several_versions_says_so(versions, mixed):
    """Only its blocks count: the server's label at the door is that of a moment."""
    blocks = response()["meta_info"]["dllm_block"]
    for index, version in zip((0, 4, 5), versions, strict=True):
        blocks[index]["weight_version"] = version
    made = replace(sample(dllm_block=blocks), version_at_admission="6", version_at_completion="9")
    line = made.to_line()
    assert line.get("mixed", False) is mixed
    assert RolloutSample.from_line(line).trace.mixed is mixed


def test_edits_and_select_logprobs_are_placed_in_the_sequence():
    blocks = response()["meta_info"]["dllm_block"]
    blocks[0] |= {"steps": 2, "edits": [[1, 3, 5, 20]]}
    blocks[5] |= {"edits": [[1, 0, 6, 7], [2, 0, 7, 25]]}
    selects = [[-0.25, 0.0], [-0.5, -1.0], [-2.0, -3.0, 0.0]]
    for block, values in zip((blocks[0], blocks[4], blocks[5]), selects, strict=True):
        block |= {"select_logprob": values, "selection": {"threshold": 0.9, "tokens_per_step": 2}}
    # The last block's first token was drawn at step 0 here, to be edited twice.
    meta = {"dllm_block": blocks, "dllm_reveal_step": [0, 1, 0, 1, 0, 0]}
    meta["dllm_block"][5]["tail"]["reveal_step"] = [0, 1, 2]
    made = sample(**meta).trace
    assert made.edits == [(0, 1, 3, 5, 20), (2, 1, 8, 6, 7), (2, 2, 8, 7, 25)]
    assert made.drawn_ids[[0, 5]].tolist() == [5, 6]
    assert made.select_logprobs == selects and made.selection == SelectionRule(0.9, 2)
    check_trainable(made)


def test_a_random_choice_without_a_rule_may_serve_but_not_train():
    blocks = response()["meta_info"]["dllm_block"]
    for index, steps in ((0, 1), (4, 2), (5, 3)):
        blocks[index]["select_logprob"] = [-0.5] * steps
    made = sample(dllm_block=blocks).trace
    with pytest.raises(RolloutError, match=r"without a rule to recompute it by; set selection = SelectionRule\("):
        check_trainable(made)
    check_trainable(sample().trace)


def test_weights_that_no_refresh_has_brought():
    """An engine that was started again says "default", or whatever it was started with."""
    check_refreshed(["7", "8"], 8)
    check_refreshed(["default"], None)
    with pytest.raises(RolloutError, match="decoded with weights 'default' after version 8 was published: it was rest"):
        check_refreshed(["8", "default"], 8)


def test_an_engine_error_is_raised():
    with pytest.raises(RolloutError, match="nan_logits: the model produced NaN"):
        sample(
            finish_reason={"type": "abort", "message": "nan_logits: the model produced NaN", "err_type": "nan_logits"}
        )


def test_an_answer_without_a_log_is_refused():
    with pytest.raises(RolloutError, match=r"without a reveal log; install this package .*--dllm-algorithm"):
        sample(dllm_block=[None] * 6)


def test_a_log_that_contradicts_itself_is_refused():
    with pytest.raises(TraceError, match="logprob has 8 entries for 9 replay tokens"):
        sample(dllm_logprob=[-0.5] * 5)


def test_an_aborted_request_keeps_what_it_has():
    answer = {
        "text": "",
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "err_type": None, "message": "drained"}},
    }
    made = sample_from_response(answer, [1, 2, 3], 4, SamplingParams(), 6)
    assert made.finish_reason == "abort" and len(made.trace.replay_ids) == 0 and made.weight_version == ""


def test_a_written_line_is_on_disk_at_once(tmp_path):
    path = tmp_path / "r.jsonl"
    with path.open("w") as file:
        write_line(file, {"text": "é"})
        assert json.loads(path.read_text()) == {"text": "é"}
    buffer = io.StringIO()
    write_line(buffer, {"a": 1})
    assert buffer.getvalue() == '{"a": 1}\n'


def test_bad_lines_are_named_by_number(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n[1]\n')
    lines = read_lines(path)
    assert next(lines) == {"a": 1}
    with pytest.raises(TraceError, match="line 3 is not a JSON object"):
        next(lines)
    path.write_text('{"a": 1')
    with pytest.raises(TraceError, match="line 1 is not JSON"):
        list(read_lines(path))


def test_parquet_holds_the_same_lines(tmp_path):
    """Lists of lists, nested objects, keys that only some lines have; null and missing are one."""
    lines = [
        sample().to_line() | {"uid": "a", "reward": 1.0, "router_flip": [0, -0.5]},
        sample().to_line() | {"edits": [[1, 0, 5, 7, 8]], "select_logprob": [[-0.1], [], [-0.3, -0.4]], "acc": None},
    ]
    write_parquet(tmp_path / "1.parquet", lines)
    read = list(read_lines(tmp_path / "1.parquet"))
    assert read == [lines[0], {name: value for name, value in lines[1].items() if name != "acc"}]
    write_parquet(tmp_path / "2.parquet", lines[:1])
    assert [t.to_line()["tail"] for t in read_traces(tmp_path / "2.parquet")] == [lines[0]["tail"]]
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_is_not_parquet(tmp_path):
    (tmp_path / "1.parquet").write_text("{}")
    with pytest.raises(TraceError, match="is not a parquet file"):
        list(read_lines(tmp_path / "1.parquet"))


def test_what_a_training_run_adds_is_told_from_what_the_engine_wrote():
    line = sample().to_line()
    assert engine_line(line | {"step": 1, "uid": "a", "reward": 1.0, "trainer_logprob": [0.0]}) == line


def test_traces_of_a_file(tmp_path):
    good = sample().to_line()
    path = write_lines(tmp_path / "r.jsonl", [good, good])
    first, second = read_traces(path)
    assert np.array_equal(first.logprob, second.logprob)
    bad = dict(good, logprob=good["logprob"][:-1])
    with pytest.raises(TraceError, match="sample 2: logprob has 8 entries"):
        read_traces(write_lines(path, [good, bad]))


def test_tokens_per_forward():
    traces = [hand_made_trace([1, 2], [3, 4], [0, 0], 4), hand_made_trace([1], [3, 4, 5], [0, 1, 2], 4)]
    assert tokens_per_forward(traces) == pytest.approx(5 / 4)
    assert tokens_per_forward([]) == 0


def test_seed_of_a_prompt_depends_on_nothing_else():
    seeds = {content_seed(b, p, s) for b in (0, 1) for p in ([1], [1, 2], [12]) for s in (0, 1)}
    assert len(seeds) == 12 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert content_seed(0, [1, 2], 3) == content_seed(0, (1, 2), 3)


def test_parameters_for_the_engine():
    params = GenerateParams(SamplingParams(0.5, 0.9, 3, 0.1), 40, True, ["x"], [7])
    assert params.to_sglang(5) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "max_new_tokens": 40,
        "ignore_eos": True,
        "stop": ["x"],
        "stop_token_ids": [7],
        "sampling_seed": 5,
    }
    assert {"stop", "stop_token_ids", "sampling_seed"}.isdisjoint(GenerateParams().to_sglang(None))
