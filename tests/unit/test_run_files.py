"""The files of a run: what is read back after a resume or a kill, the summary, the plots."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from recipes import grpo_llada2, plot
from recipes.console import RunConsole, step_line, validation_accuracy
from recipes.host import choose_hardware, host_report, package_versions
from recipes.records import RunRecorder, read_metrics, read_rollouts
from recipes.summary import step_seconds, step_table, summarise
from tests.support import rollout_line as line

KEYS = ("critic/rewards/mean", "dllm/visible_length/mean", "dllm/visible_length/max", "dllm/confidence/mean")


def record_run(directory, steps=(1, 2, 3), offset=0.0):
    recorder = RunRecorder(directory)
    recorder(
        "validate_end",
        {"step": 0, "metrics": {"val/accuracy": 0.25, "val/malformed": 0.5}},
    )
    for step in steps:
        recorder("phase", {"name": "rollout"})
        metrics = {key: np.float32(step + offset) for key in KEYS} | {"rollout_corr/logprob_abs_diff/mean": 1e-6}
        recorder("step_end", {"step": step, "metrics": metrics, "lines": []})
    recorder("validate_end", {"step": steps[-1], "metrics": {"val/accuracy": 0.75}})
    recorder.close()


def test_records_are_plain_json_in_order(tmp_path):
    record_run(tmp_path)
    raw = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in raw] == [
        ("validation", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("validation", 3),
    ]
    assert raw[1]["critic/rewards/mean"] == 1.0


def test_a_step_that_was_run_again_counts_once(tmp_path):
    record_run(tmp_path)
    record_run(tmp_path, steps=(3, 4), offset=10.0)
    steps = [r for r in read_metrics(tmp_path) if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert [r["critic/rewards/mean"] for r in steps] == [1, 2, 13, 14]


def test_a_cut_last_line_is_not_read(tmp_path):
    record_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "critic/rew')
    assert max(r["step"] for r in read_metrics(tmp_path)) == 3


def test_a_run_goes_on_behind_a_cut_line(tmp_path):
    """A killed run may leave half a line; the next record must not be glued to it."""
    record_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "critic/rew')
    recorder = RunRecorder(tmp_path)
    recorder("step_end", {"step": 4, "metrics": {}})
    recorder.close()
    assert [r["step"] for r in read_metrics(tmp_path) if r["kind"] == "step"] == [1, 2, 3, 4]


def test_no_metrics_yet(tmp_path):
    assert list(read_metrics(tmp_path)) == [] and list(read_rollouts(tmp_path)) == []


def write_rollouts(directory, step, lines, name=None):
    (directory / "rollouts").mkdir(exist_ok=True)
    (directory / "rollouts" / (name or f"{step}.jsonl")).write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_rollout_files_are_read_in_order_of_their_steps(tmp_path):
    for step in (10, 2, 1):
        write_rollouts(tmp_path, step, [line()])
    write_rollouts(tmp_path, 0, ["half"], name="11.jsonl.part")
    assert [step for step, _ in read_rollouts(tmp_path)] == [1, 2, 10]


def test_summary_is_computed_from_the_files(tmp_path):
    record_run(tmp_path)
    versions = {"weight_versions": ["0"]}
    write_rollouts(tmp_path, 1, [line("a", **versions), line("a", output=(7, 8, 9), **versions)])
    late = line("b", trainer=(-1.0, -2.0, -3.0, -4.5), weight_versions=["10"], router_tie=[False, False, False, True])
    write_rollouts(tmp_path, 2, [late | {"weight_versions": ["2", "10"]}])
    summary = summarise(tmp_path)
    assert (summary["val_accuracy_before"], summary["val_accuracy_after"]) == (0.25, 0.75)
    assert summary["val_accuracy_curve"] == {"0": 0.25, "3": 0.75}
    assert summary["malformed_before"] == 0.5
    assert summary["steps"] == 3
    assert summary["group_diversity_mean_first_step"] == 2
    assert summary["weight_versions"] == ["0", "2", "10"]
    assert summary["logprob_tokens"] == 12 and summary["logprob_tokens_above_1e-4"] == 1
    assert summary["logprob_abs_diff_max"] == 0.5 and summary["logprob_abs_diff_max_without_ties"] == 0
    assert summary["router_tie_tokens"] == 1
    assert summary["tokens_per_forward"] == pytest.approx(12 / 9)


def test_where_the_time_of_a_step_goes():
    """The first step warms up and does not count; what verl does not name is shown as well."""
    names = {"gen": 2.0, "old_log_prob": 1.0, "adv": 0.25, "update_actor": 0.5, "update_weights": 0.125, "step": 4.0}
    step = {"kind": "step", "rollout/reward_seconds/max": 0.75, **{f"timing_s/{k}": v for k, v in names.items()}}
    records = [{**step, "timing_s/step": 99.0, "step": 1}, {**step, "step": 2}, {"kind": "validation", "step": 2}]
    seconds = step_seconds([*records, {**step, "step": 3, "timing_s/gen": 3.0, "timing_s/step": 5.0}])
    assert seconds["rollout"] == 2.5 and seconds["step"] == 4.5 and seconds["other"] == 0.125
    text = "\n".join(step_table(seconds))
    for part in (
        "rollout                       2.50   55.6 %",
        "of it at most: rewards      0.75",
        "weight refresh",
        "step",
    ):
        assert part in text
    assert seconds["update"] == 0.5 and seconds["weight refresh"] == 0.125
    assert step_seconds([records[2]]) == {} and step_table({}) == []


def test_plots(tmp_path, capsys):
    record_run(tmp_path)
    assert plot.main([str(tmp_path)]) == 0
    names = {p.name for p in (tmp_path / "plots").iterdir()}
    assert names == {"reward.png", "response_length.png", "confidence.png", "logprob_difference.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "plots").iterdir())
    assert "reward.png" in capsys.readouterr().out


def test_a_plot_of_several_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record_run(tmp_path / name)
    image = tmp_path / "both.png"
    assert plot.main([str(tmp_path / "a"), str(tmp_path / "b"), "--compare", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG") and not (tmp_path / "a" / "plots").exists()


def test_plots_of_nothing(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 2
    assert "has no metrics.jsonl; pass the directory of a run" in capsys.readouterr().err


def test_accuracy_is_that_of_the_shared_summary():
    metrics = {"val/accuracy": 0.75, "val-core/a/acc/mean@1": 0.5}
    assert validation_accuracy(metrics) == 0.75
    assert validation_accuracy(metrics, "malformed") is None


def test_a_validation_is_printed_with_its_interval():
    console = RunConsole(stream := io.StringIO())
    metrics = {"val/accuracy": 0.75, "val/accuracy_low": 0.625, "val/accuracy_high": 0.875, "val/malformed": 0.25}
    console("validate_end", {"step": 7, "metrics": metrics})
    assert "validation, step 7: accuracy 0.750 (95 % 0.625 to 0.875), malformed 0.250" in stream.getvalue()


def test_step_line_names_what_a_person_wants_to_see():
    text = step_line(3, 40, {"critic/rewards/mean": 0.5, "dllm/tokens_per_forward": 2.25, "timing_s/step": 4.0})
    for part in ("step   3/40", "reward 0.500", "tokens/forward 2.25", "step 4.0 s"):
        assert part in text


def test_host():
    assert choose_hardware("cpu") == ("cpu", "as asked")
    hardware, why = choose_hardware("auto")
    assert (hardware, "CUDA" in why) in (("cpu", True), ("gpu1", True))
    report = host_report()
    assert report["cores"] >= 1 and report["fp32_gflops_per_core"] > 0.1
    assert set(package_versions()) >= {"torch", "sglang", "verl", "transformers"}


def test_a_step_line_says_what_was_measured():
    metrics = {"critic/rewards/mean": 0.5, "timing_s/step": 3.0}
    assert "|dlogp|" not in step_line(3, 14, metrics)
    line = step_line(3, 14, {**metrics, "rollout_corr/logprob_abs_diff/p999": 1e-5})
    assert line.startswith("step   3/14  reward 0.500") and "|dlogp| p99.9 1.0e-05  step 3.0 s" in line


def test_the_summary_of_a_run_without_validation(tmp_path, capsys):
    summary = {"val_accuracy_before": None, "val_accuracy_after": None, "val_prompts": 8, "steps": 2, "wall_s": 9.0}
    grpo_llada2.print_summary(tmp_path, summary | {"device": "cpu", "host": {"fp32_gflops_per_core": 30.0}})
    assert "no validation, 2 steps in 9 s on cpu" in capsys.readouterr().out


def test_seeds_of_several_groups_in_one_figure(tmp_path, capsys):
    for name, last in (("a", 0.5), ("b", 0.7), ("c", 0.6)):
        summary = {"val_accuracy_curve": {"0": 0.4, "7": 0.45, "14": last}}
        (tmp_path / f"{name}.json").write_text(json.dumps(summary))
    (tmp_path / "empty.json").write_text("{}")
    group = lambda name, *files: f"{name}=" + ",".join(str(tmp_path / f"{file}.json") for file in files)
    figure = tmp_path / "seeds.png"
    assert plot.main([group("exact", "a", "b"), group("elbo", "c"), "--seeds", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    for wrong, message in (
        ("exact", "'exact' names no group of runs; write NAME=FILE.json,FILE.json"),
        (group("exact", "missing"), "cannot be read"),
        (group("exact", "empty"), "has no validations"),
    ):
        capsys.readouterr()
        assert plot.main([wrong, "--seeds", str(figure)]) == 2
        assert message in capsys.readouterr().err
