"""Evaluation of the shipped checkpoint on the real engine, and its accuracy against that of the warm start's code."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dllm.config import resolve
from dllm.models.checkpoint import load_model
from dllm.trace import RolloutTrace
from recipes.compose import CHECKPOINT_DIR
from recipes.tasks.held_out import held_out_rows
from recipes.tokenizer import prompt_ids
from tests.support import run_module
from trainers.evaluation import evaluate
from trainers.scores import summarise_scores

MODEL = CHECKPOINT_DIR / "tiny_llada2"
LIMIT = 16


@dataclass
class Run:
    printed: str
    out: Path
    rows: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    result: dict[str, Any]


@pytest.fixture(scope="module")
def run(heavy, tmp_path_factory) -> Run:
    heavy.close()
    root = tmp_path_factory.mktemp("evaluate")
    made = run_module(
        "recipes.evaluate",
        *("--model-path", MODEL, "--task", "chain_sum", "--limit", LIMIT, "--threshold", "0.9", "--device", "cpu"),
        *("--max-new-tokens", "64", "--cache-dir", root / "cache", "--out", root / "out"),
        OMP_NUM_THREADS="1",
    )
    assert made.returncode == 0, made.stderr[-3000:]
    lines = [json.loads(text) for text in (root / "out" / "answers.jsonl").read_text().splitlines()]
    (result,) = json.loads((root / "out" / "results.json").read_text())["results"]
    rows = held_out_rows("chain_sum", root / "cache", LIMIT)
    return Run(made.stdout, root / "out", rows, sorted(lines, key=lambda line: line["prompt"]), result)


def test_one_line_per_prompt_with_its_log(run):
    assert [line["prompt"] for line in run.lines] == list(range(LIMIT))
    for line, row in zip(run.lines, run.rows, strict=True):
        RolloutTrace.from_line(line).validate()
        assert line["ground_truth"] == row["reward_model"]["ground_truth"]
        assert (line["acc"] == 1.0) == (line["text"].strip() == line["ground_truth"])


def test_the_figures_are_those_of_the_lines(run):
    summary = summarise_scores(run.lines, [line["prompt"] for line in run.lines])
    assert run.result["scores"]["accuracy"] == summary.accuracy
    assert run.result["scores"]["accuracy_low"] == pytest.approx(summary.accuracy_low)
    tokens = sum(len(line["output_ids"]) + len(line["tail"]["ids"]) for line in run.lines)
    forwards = sum(sum(line["steps_per_block"]) for line in run.lines)
    assert run.result["tokens"] == tokens
    assert run.result["tokens_per_forward"] == pytest.approx(tokens / forwards)
    assert run.result["visible_tokens"] == sum(len(line["output_ids"]) for line in run.lines)
    assert sum(run.result["confidence_histogram"]) == pytest.approx(1)


def test_engine_and_warm_start_agree(run):
    """Greedy answers of the real engine are those of the plain decoder that the warm start is measured with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    plain = evaluate(
        load_model(MODEL),
        run.rows,
        [prompt_ids(tokenizer, row["prompt"]) for row in run.rows],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        resolve(MODEL),
        threshold=0.9,
        max_new_tokens=64,
    )
    assert [line["text"] for line in run.lines] == plain.texts
    assert run.result["scores"]["accuracy"] == plain.accuracy
    assert run.result["steps_per_block"] == pytest.approx(plain.steps_per_block)


def test_what_a_person_sees(run):
    scores = run.result["scores"]
    shown = f"{scores['accuracy']:.3f} ({scores['accuracy_low']:.3f} to {scores['accuracy_high']:.3f})"
    assert shown in run.printed and "SelectThenSample threshold=0.9" in run.printed
    assert re.search(r"starting engine 1 of 1", run.printed) and "Traceback" not in run.printed
    assert (run.out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (run.out / "engine.log").is_file()
