"""Evaluation: what is refused before an engine starts, the grid of decoders, the table and the plot."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from dllm.config import ConfigError
from recipes import evaluate
from recipes.compose import CHECKPOINT_DIR
from recipes.evaluate import HISTOGRAM_BINS, Result, from_file, histogram, make_plan, parser
from recipes.plot import plot_accuracy
from recipes.tasks.held_out import held_out_rows
from recipes.variants import Variant, parse_option, variant_grid
from recipes.variants_table import results_table, sparkline
from rollout.records import RolloutSample
from tests.support import DATA, hand_made_trace
from trainers.scores import summarise_scores

MODEL = str(CHECKPOINT_DIR / "tiny_llada2")
GSM8K = str(DATA / "gsm8k_50.parquet")


def plan(tmp_path, *arguments, task=GSM8K):
    given = ["--model-path", MODEL, "--task", task, "--out", str(tmp_path / "out"), "--cache-dir", str(tmp_path)]
    return make_plan(parser().parse_args([*given, *arguments]))


def test_a_grid_has_every_combination():
    grid = variant_grid(["SelectThenSample", "SampleThenSelect"], {"threshold": [0.8, 0.9]}, 5)
    assert [v.label for v in grid] == [
        "SelectThenSample threshold=0.8",
        "SelectThenSample threshold=0.9",
        "SampleThenSelect threshold=0.8",
        "SampleThenSelect threshold=0.9",
    ]
    assert variant_grid(["StaticSteps"], {}, 5) == [Variant("StaticSteps")]


def test_options_are_read_as_yaml():
    assert parse_option("tokens_per_step=1,2") == ("tokens_per_step", [1, 2])
    assert parse_option("threshold=0.9") == ("threshold", [0.9])


def test_a_plan(tmp_path):
    made = plan(tmp_path, "--limit", "3", "--threshold", "0.8", "0.9", "--temperature", "1", "--n", "2")
    assert len(made.variants) == 2 and len(made.rows) == len(made.prompts) == 3
    assert made.params.sampling.temperature == 1.0 and not made.out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dllm-algorithm", "Guess"], "dllm algorithm 'Guess' does not exist; use one of"),
        (
            ["--dllm-algorithm", "SelectThenSample", "StaticSteps", "--threshold", "0.9"],
            r"'threshold' is not an option of StaticSteps; valid keys are \['tokens_per_step'\]",
        ),
        (["--option", "tokens_per_step=2"], "'tokens_per_step' is not an option of SelectThenSample"),
        (["--option", "tokens_per_step"], "is not KEY=VALUE or KEY=VALUE,VALUE"),
        (["--threshold", "0.9", "--option", "threshold=0.8"], "option 'threshold' is given twice"),
        (["--threshold", "0.9", "0.9"], "'SelectThenSample threshold=0.9' is asked for twice"),
        (["--threshold", "1.5"], r"threshold=1.5 is not in \(0, 1\]"),
        (["--limit", "0"], "--limit=0 is too small; use at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0 is too small"),
        (["--n", "4"], "--n=4 at temperature 0 gives equal answers; add --temperature 1"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, *arguments)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("gsm8k", r"--task=gsm8k needs .* does not exist \(nothing is downloaded\); give --task FILE.parquet"),
        ("math500", "give --task FILE.parquet or put the file there"),
        ("no.parquet", "--task='no.parquet' is not a file; give the path of a parquet file"),
        ("chain_sums", "--task='chain_sums' does not exist; use one of chain_sum, countdown, gcd, gsm8k, math500, "),
        ("parquet", "--task='parquet' does not exist"),
    ],
)
def test_refused_tasks(tmp_path, task, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, task=task)


def test_a_directory_with_files_is_not_written_to(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("")
    with pytest.raises(ConfigError, match="exists already; choose another directory"):
        plan(tmp_path)


def test_the_command_says_one_line(tmp_path, capsys):
    assert evaluate.main(["--model-path", str(tmp_path / "no"), "--task", GSM8K]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1


def test_a_file_of_gsm8k_in_the_cache_is_found(tmp_path):
    (tmp_path / "gsm8k.parquet").write_bytes((DATA / "gsm8k_50.parquet").read_bytes())
    rows = held_out_rows("gsm8k", tmp_path)
    assert rows == held_out_rows(GSM8K, tmp_path) and len(rows) == 50
    assert len(held_out_rows("gsm8k", tmp_path, limit=7)) == 7


def result(label, accuracy, speed):
    scores = summarise_scores([{"acc": float(i < accuracy * 10), "malformed": 0.0} for i in range(10)], range(10))
    return Result(label, label, {}, scores, 100, 90, 2.0, speed, 45.0, 3.0, 0.0, [0.0] * 19 + [1.0], 1.0)


def test_table_and_plot(tmp_path):
    results = [result("A", 0.5, 1.5), result("B", 1.0, 3.0)]
    console = Console(record=True, width=140, file=(tmp_path / "t").open("w"))
    console.print(results_table(results, "title"))
    text = console.export_text()
    for part in ("0.500 (0.237 to 0.763)", "1.000 (0.722 to 1.000)", "1.50", "3.00", "45", "█"):
        assert part in text
    path = plot_accuracy([(r.label, r.tokens_per_forward, r.scores) for r in results], tmp_path / "accuracy.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bars_show_what_is_small():
    assert sparkline([0, 0.001, 0.5, 1.0]) == " ▁▄█"
    assert sparkline([0, 0]) == "  "


def test_histogram_counts_drawn_tokens_only():
    trace = hand_made_trace([7] * 4, [1, 2, 3, 4], [0, 0, 1, 1], 4)
    trace.confidence[:] = [0.01, 0.99, 1.0, 0.5]
    trace.reveal_step[3] = -1
    shares = histogram([RolloutSample(trace, "", "stop", 4)])
    assert len(shares) == HISTOGRAM_BINS and sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(1 / 3) and shares[-1] == pytest.approx(2 / 3)
    json.dumps(shares)


class TestOptionsFromAFile:
    def test_they_are_the_variants_options(self, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text("tokens_per_step: 3\n")
        assert from_file(["StaticSteps"], str(path)) == {"tokens_per_step": [3]}

    @pytest.mark.parametrize(
        ("algorithms", "text", "message"),
        [
            (["StaticSteps", "Margin"], "tokens_per_step: 3\n", "goes with one decoder, not with 2"),
            (
                ["SelectThenSample"],
                "treshold: 0.3\n",
                "'treshold' is not an option of SelectThenSample; valid keys are",
            ),
            (["SelectThenSample"], "block_size: 16\n", "sets block_size, .* remove it"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path, algorithms, text, message):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            from_file(algorithms, str(path))
