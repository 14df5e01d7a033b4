"""``python -m rollout.generate`` from a file to a file, and ``python -m recipes.check_logprobs`` on what it wrote."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dllm.decoding import SamplingParams
from dllm.trace import RolloutTrace
from recipes import check_logprobs
from rollout.engine import content_seed
from tests.integration.oracle import THRESHOLD, TinyModel, assert_same
from tests.support import run_module, write_lines

SEED, N, LIMIT = 4, 2, 40
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


@dataclass
class Run:
    result: subprocess.CompletedProcess[str]
    prompts: list[dict[str, Any]]
    out: Path
    lines: list[dict[str, Any]]


def first_seed(prompt: list[int]) -> int:
    return content_seed(SEED, prompt, 0)


@pytest.fixture(scope="module")
def run(heavy, tiny: TinyModel, tmp_path_factory) -> Run:
    """One call with all three kinds of prompts, long ones first, so that answers do not come in order."""
    heavy.close()
    directory = tmp_path_factory.mktemp("generate")
    case = tiny.case(70, seed_of=first_seed, max_new_tokens=LIMIT)
    prompts = [{"input_ids": case.prompt}, {"text": "7 * 6 ="}, {"messages": MESSAGES}, {"input_ids": tiny.prompt(1)}]
    result = run_module(
        "rollout.generate",
        *("--model-path", tiny.path, "--prompts", write_lines(directory / "prompts.jsonl", prompts)),
        *("--out", directory / "out.jsonl", "--n", N, "--max-new-tokens", LIMIT, "--seed", SEED),
        *("--threshold", THRESHOLD, "--device", "cpu", "--dtype", "auto"),
        OMP_NUM_THREADS="1",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
    return Run(result, prompts, directory / "out.jsonl", lines)


def test_order_is_that_of_the_input(run, tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    ids = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = [run.prompts[0]["input_ids"], ids("7 * 6 ="), ids(chat), run.prompts[3]["input_ids"]]
    assert [line["input_ids"] for line in run.lines] == [prompt for prompt in expected for _ in range(N)]


def test_every_field(run, tiny):
    for line in run.lines:
        count = len(line["output_ids"])
        for name in ("reveal_step", "logprob", "confidence"):
            assert len(line[name]) == count and len(line["tail"][name]) == len(line["tail"]["ids"])
        assert (len(line["input_ids"]) + count + len(line["tail"]["ids"])) % 32 == 0
        assert line["finish_reason"] in ("stop", "length") and isinstance(line["text"], str)
        assert count <= LIMIT and sum(line["steps_per_block"]) >= 1
        assert line["weight_version"] == "default"
        parameters = line["sampling_params"]
        assert (parameters["temperature"], parameters["max_new_tokens"]) == (1.0, LIMIT)
        RolloutTrace.from_line(line).validate()
    seeds = [line["sampling_params"]["seed"] for line in run.lines]
    assert seeds == [content_seed(SEED, line["input_ids"], i % N) for i, line in enumerate(run.lines)]


def test_a_rollout_is_that_of_the_reference(run, tiny):
    case = tiny.case(70, seed_of=first_seed, max_new_tokens=LIMIT)
    assert_same(RolloutTrace.from_line(run.lines[0]), case.trace)


def test_progress_and_settings_are_shown(run):
    assert "tok/s" in run.result.stderr
    assert "mask_id=5 (config.json mask_token_id)" in run.result.stderr
    assert (
        f"8 rollouts, {sum(len(x['output_ids']) + len(x['tail']['ids']) for x in run.lines)} tokens"
        in run.result.stderr
    )


def check(tiny: TinyModel, path: Path, capsys, *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = check_logprobs.main(["--model-path", str(tiny.path), "--rollouts", str(path), "--device", "cpu", *more])
    return code, json.loads(capsys.readouterr().out)


def test_log_probs_are_those_of_the_trainers_model(run, tiny, capsys):
    code, result = check(tiny, run.out, capsys, "--tolerance", "1e-4")
    assert code == 0
    assert result["tokens"] == sum(len(x["output_ids"]) + len(x["tail"]["ids"]) for x in run.lines)
    assert result["mean"] <= result["p99"] <= result["p999"] <= result["max"] <= 1e-4


@pytest.mark.parametrize("where", ["visible", "tail"])
def test_one_wrong_number_is_found(run, tiny, tmp_path, capsys, where):
    lines = json.loads(json.dumps(run.lines))
    target = lines[5]["logprob"] if where == "visible" else lines[5]["tail"]["logprob"]
    target[-1] -= 0.01
    code, result = check(tiny, write_lines(tmp_path / "changed.jsonl", lines), capsys)
    assert code == 1
    assert result["max"] == pytest.approx(0.01, abs=1e-3) and result["p99"] < 1e-4


def test_rollouts_of_other_weights_are_found(run, tiny, mask_likely, capsys):
    code, result = check(mask_likely, run.out, capsys)
    assert code == 1 and result["mean"] > 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no lines; generate some first"),
        ('{"input_ids": [1]}\n', "rollout line has no 'tail'; it was not written by this package's engine"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("{\n", "line 1 is not JSON"),
    ],
)
def test_bad_rollouts(tiny, tmp_path, capsys, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    assert check_logprobs.main(["--model-path", str(tiny.path), "--rollouts", str(path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


def test_bad_paths(tiny, run, tmp_path, capsys):
    for arguments in (
        ["--model-path", str(tmp_path / "no"), "--rollouts", str(run.out)],
        ["--model-path", str(tiny.path), "--rollouts", str(tmp_path / "no.jsonl")],
    ):
        assert check_logprobs.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1


def test_replay_of_greedy_lines(tiny, tmp_path, capsys):
    """At temperature 0 every log-prob is 0 on both sides."""
    trace = tiny.case(33, SamplingParams(0)).trace
    path = write_lines(tmp_path / "greedy.jsonl", [trace.to_line() | {"text": ""}])
    code, result = check(tiny, path, capsys)
    assert code == 0 and result["max"] == 0 and result["tokens"] == len(trace.replay_ids)
    assert not np.any(trace.logprob)
