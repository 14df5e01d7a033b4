"""The recipe itself, as a user starts it: a run whose driver is killed, and its way on to a good end.

One story in two starts of the same run, on the checkpoint that ships: ``killed``, ``finished``. What happens when an
engine or a worker dies is in ``test_watchdog.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import psutil
import pytest

from dllm.config import resolve
from dllm.decoding import SamplingParams
from dllm.noise import sample_seed
from dllm.trace import RolloutTrace
from recipes import check_logprobs, grpo_llada2
from recipes.compose import CHECKPOINT_DIR
from recipes.records import read_metrics, read_rollouts
from rollout.engine import content_seed
from rollout.records import engine_line, read_lines, write_parquet
from tests.support import ROOT, child_environment, processes_with, wait_for, write_lines

PROMPTS, GROUP, HELD_OUT, SEED = 4, 4, 8, 3
NAME = "story"


@dataclass
class Story:
    """Where the run writes, and what every start of it has in common."""

    model: Path
    output: Path
    cache: Path
    name: str = NAME

    @property
    def directory(self) -> Path:
        return self.output / self.name

    def arguments(self, *more: str) -> list[str]:
        return [
            "hardware=cpu",
            f"recipe.run={NAME}",
            f"recipe.output_dir={self.output}",
            f"recipe.cache_dir={self.cache}",
            f"recipe.seed={SEED}",
            f"actor_rollout_ref.model.path={self.model}",
            f"actor_rollout_ref.rollout.n={GROUP}",
            f"data.train_batch_size={PROMPTS}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            f"task.val_size={HELD_OUT}",
            "task.sft_size=0",
            "task.train_size=64",
            "data.max_prompt_length=128",
            "dllm.max_logprob_diff=1e-3",
            "dllm.measure_routing=2",
            "trainer.test_freq=3",
            *more,
        ]

    def start(self, name: str, *more: str, marker: str = "") -> subprocess.Popen[str]:
        with (self.output / f"{name}.txt").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "recipes.grpo_llada2", *self.arguments(*more)],
                cwd=ROOT,
                env=child_environment(STORY_MARKER=marker, WANDB_MODE="offline", OMP_NUM_THREADS="1"),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def printed(self, name: str) -> str:
        return (self.output / f"{name}.txt").read_text(errors="replace")

    def failure(self, name: str) -> str:
        log = self.directory / "driver.log"
        return self.printed(name)[-3000:] + (log.read_text(errors="replace")[-3000:] if log.is_file() else "")

    def steps(self) -> list[dict[str, Any]]:
        return [r for r in read_metrics(self.directory) if r["kind"] == "step"]


@pytest.fixture(scope="module")
def story(heavy, tmp_path_factory) -> Story:
    heavy.close()
    root = tmp_path_factory.mktemp("grpo")
    (root / "runs").mkdir()
    return Story(CHECKPOINT_DIR / "tiny_llada2", root / "runs", root / "cache")


def engine_of(marker: str) -> str | None:
    """Address of the engine of the run with ``marker``, once it serves."""

    def answers(url: str) -> bool:
        with suppress(httpx.HTTPError, ValueError):
            return "weight_version" in httpx.get(f"{url}/model_info", timeout=2).json()
        return False

    pids = {int(line.split()[0]) for line in processes_with(marker)}
    ports = [c.laddr for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    urls = [f"http://{'127.0.0.1' if port.ip == '0.0.0.0' else port.ip}:{port.port}" for port in ports]
    with ThreadPoolExecutor(max(1, len(urls))) as threads:
        found = threads.map(answers, urls)
    return next((url for url, right in zip(urls, found, strict=True) if right), None)


def refused_by_engine(marker: str) -> dict[str, int]:
    """Statuses of the engine's administrative endpoints for somebody without its key."""
    url = wait_for(lambda: engine_of(marker), 240, "the engine", interval=1)
    paths = ("flush_cache", "update_weights_from_disk", "abort_request", "start_profile")
    return {path: httpx.post(f"{url}/{path}", json={}).status_code for path in paths}


@dataclass
class Kill:
    """What was seen of a run whose driver was killed: what its engine refused, its processes before and 30 s after, and
    its fourth step."""

    refused: dict[str, int]
    before: list[str]
    after: list[str]
    fourth: list[dict[str, Any]]


@pytest.fixture(scope="module")
def killed(story) -> Kill:
    """A fresh run whose driver is killed when step 4 is on disk; its last checkpoint is that of step 3."""
    marker = uuid4().hex
    process = story.start("killed", "trainer.total_training_steps=50", "trainer.save_freq=3", marker=marker)
    try:

        def fourth_step() -> bool:
            assert process.poll() is None, story.failure("killed")
            return any(r["step"] == 4 for r in story.steps()) and (story.directory / "rollouts" / "4.jsonl").exists()

        with ThreadPoolExecutor(1) as thread:
            refused = thread.submit(refused_by_engine, marker)
            wait_for(fourth_step, 600, "step 4")
        fourth, before = dict(read_rollouts(story.directory))[4], processes_with(marker)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        with suppress(AssertionError):
            wait_for(lambda: not processes_with(marker), 30, "the end of every process of the run", interval=1)
        return Kill(refused.result(), before, processes_with(marker), fourth)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def finished(story, killed) -> Story:
    """The same run goes on, from step 3 to a clean end at step 5."""
    more = ("trainer.resume_mode=auto", "trainer.val_before_train=false", "trainer.total_training_steps=5")
    process = story.start("finished", *more, "--save-debug-rollouts", str(story.output / "parquet"))
    try:
        assert process.wait(600) == 0, story.failure("finished")
    finally:
        process.kill()
    return story


def summary_of(story: Story) -> dict[str, Any]:
    return json.loads((story.directory / "summary.json").read_text())


class TestKilled:
    def test_its_engine_obeyed_nobody_without_the_key(self, killed):
        assert set(killed.refused.values()) == {401}, killed.refused

    def test_nothing_is_left_after_30_seconds(self, killed):
        assert any("sglang" in command for command in killed.before)
        assert any("ray" in command for command in killed.before)
        assert not killed.after

    def test_what_was_written_is_readable(self, story, killed):
        steps = dict(read_rollouts(story.directory))
        assert {1, 2, 3, 4} <= steps.keys()
        assert all(len(lines) == PROMPTS * GROUP for lines in steps.values())
        assert [r["step"] for r in story.steps()][:4] == [1, 2, 3, 4]


class TestFinished:
    def test_the_repeated_step_is_the_same_step(self, killed, finished):
        """Same weights, same prompts, same seeds: step 4 is the same before the kill and after the resume.

        Tokens may differ where rounding (which depends on the batch) turns a close draw.
        """
        key = lambda line: (tuple(line["input_ids"]), line["sampling_params"]["seed"])
        again = {key(line): line["output_ids"] for line in dict(read_rollouts(finished.directory))[4]}
        assert again.keys() == {key(line) for line in killed.fourth}
        assert np.mean([again[key(line)] == line["output_ids"] for line in killed.fourth]) >= 0.75

    def test_summary(self, finished):
        summary = summary_of(finished)
        assert summary["steps"] == 5 and summary["device"] == "cpu" and summary["seed"] == SEED
        assert summary["val_prompts"] == HELD_OUT
        for name in ("val_accuracy_before", "val_accuracy_after", "malformed_before"):
            assert 0 <= summary[name] <= 1
        assert summary["wall_s"] > 0 and {"rollout", "update", "weight refresh"} <= summary["seconds"].keys()
        assert 1 < summary["group_diversity_mean_first_step"] <= GROUP
        assert summary["tokens_per_forward"] >= 1
        assert {"torch", "sglang", "verl", "transformers"} <= summary["versions"].keys()

    def test_engine_and_trainer_are_one_policy(self, finished):
        summary = summary_of(finished)
        assert summary["logprob_tokens"] > 5 * PROMPTS * GROUP
        assert summary["logprob_abs_diff_p999"] <= 1e-4
        assert summary["logprob_abs_diff_max_without_ties"] <= 1e-4
        assert summary["logprob_tokens_above_1e-4"] <= summary["logprob_tokens"] / 1000
        assert summary["logprob_abs_diff_mean"] > 0, "two implementations never agree to the last bit"
        assert "router_tie_tokens" in summary

    def test_every_rollout_carries_its_log(self, finished):
        mask_id = resolve(finished.model).mask_id
        steps = dict(read_rollouts(finished.directory))
        assert sorted(steps) == [1, 2, 3, 4, 5]
        for lines in steps.values():
            assert len(lines) == PROMPTS * GROUP
            for line in lines:
                RolloutTrace.from_line(line).validate()
                count = len(line["output_ids"])
                assert [len(line[name]) for name in ("reveal_step", "logprob", "confidence")] == [count] * 3
                assert mask_id not in line["output_ids"] + line["tail"]["ids"]
                assert len(line["trainer_logprob"]) == count + len(line["tail"]["ids"])
                assert line["reward"] in (0.0, 1.0) and line["ground_truth"] and line["uid"]

    def test_the_weight_version_advances_by_one_per_step(self, finished):
        for step, lines in read_rollouts(finished.directory):
            assert {v for line in lines for v in line["weight_versions"]} == {str(step - 1)}
        assert summary_of(finished)["weight_versions"] == ["0", "1", "2", "3", "4"]

    def test_groups_are_diverse_and_share_their_prompt(self, finished):
        for _, lines in read_rollouts(finished.directory):
            groups: dict[str, list[dict]] = {}
            for line in lines:
                groups.setdefault(line["uid"], []).append(line)
            assert [len(g) for g in groups.values()] == [GROUP] * PROMPTS
            for group in groups.values():
                assert len({tuple(line["input_ids"]) for line in group}) == 1
                assert len({line["sampling_params"]["seed"] for line in group}) == GROUP

    def test_seeds_follow_from_the_runs_own(self, finished):
        """A rollout is a function of the run's seed, the step, the prompt and its place in the group."""
        for step, lines in read_rollouts(finished.directory):
            base = sample_seed(SEED, step, 0, 0)
            for line in lines:
                possible = {content_seed(base, line["input_ids"], i) for i in range(GROUP)}
                assert line["sampling_params"]["seed"] in possible

    def test_first_step_is_replayed_by_the_checkpoint_it_started_from(self, finished, tmp_path, capsys):
        (step, lines), *_ = read_rollouts(finished.directory)
        assert step == 1
        path = write_lines(tmp_path / "first.jsonl", lines)
        arguments = ["--model-path", str(finished.model), "--rollouts", str(path), "--device", "cpu"]
        assert check_logprobs.main([*arguments, "--tolerance", "1e-3"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["p99"] <= 1e-4

    def test_later_steps_are_decoded_with_other_weights(self, finished, tmp_path, capsys):
        """The refresh changed the engine: the first checkpoint does not explain step 3."""
        lines = dict(read_rollouts(finished.directory))[3]
        path = write_lines(tmp_path / "third.jsonl", lines)
        arguments = ["--model-path", str(finished.model), "--rollouts", str(path), "--device", "cpu"]
        assert check_logprobs.main(arguments) == 1
        assert json.loads(capsys.readouterr().out)["mean"] > 1e-3

    def test_files(self, finished):
        d = finished.directory
        for name in ("config.yaml", "metrics.jsonl", "summary.json", "driver.log", "checkpoints"):
            assert (d / name).exists(), name
        plots = {p.name for p in (d / "plots").glob("*.png")}
        assert {"reward.png", "response_length.png", "confidence.png", "logprob_difference.png"} <= plots
        assert list((d / "wandb").glob("offline-run-*")), "a W&B run in offline mode"
        tables = list((d / "wandb").glob("offline-run-*/files/media/table/rollouts_*.table.json"))
        assert len(tables) >= 2 and len(json.loads(tables[0].read_text())["data"]) == 8
        assert (d / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "5"

    def test_rollouts_carry_verls_own_fields(self, finished):
        for step, lines in read_rollouts(finished.directory):
            for line in lines:
                assert (line["step"], line["gts"], line["score"]) == (step, line["ground_truth"], line["reward"])
                assert line["output"] == line["text"] and line["input"]

    def test_rollouts_as_parquet(self, finished):
        """The start that finished the run was asked for them: steps 4 and 5."""
        for step in (4, 5):
            lines = list(read_lines(finished.output / "parquet" / f"{step}.parquet"))
            assert lines == dict(read_rollouts(finished.directory))[step]

    def test_metrics(self, finished):
        steps = finished.steps()
        assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
        for record in steps:
            assert record["rollout_corr/logprob_abs_diff/p999"] <= 1e-4
            assert np.isfinite(record["actor/pg_loss"]) and record["dllm/tokens_per_forward"] >= 1
            assert record["weight_sync/version"] == record["step"] and record["weight_sync/lag"] == 0
            assert record["weight_sync/bytes"] > 0 and record["weight_sync/total_seconds"] > 0
            assert all(record[f"weight_sync/{s}_seconds"] >= 0 for s in ("pause", "stream", "finish", "resume"))
            assert record["weight_sync/goodput_gbps"] > 0
            assert 0 < record["rollout/reward_seconds/mean"] <= record["rollout/reward_seconds/max"]
            assert record["rollout/reward_seconds/max"] < record["timing_s/gen"]
        validations = [r["step"] for r in read_metrics(finished.directory) if r["kind"] == "validation"]
        assert validations == [0, 3, 5]

    def test_flips_are_measured_at_the_first_step(self, finished):
        """The engine logged the experts of about every second response; both flips ran in the actor's old log-probs."""
        first, second = (dict(read_rollouts(finished.directory))[step] for step in (1, 2))
        asked = [line for line in first if "routing" in line]
        assert 0 < len(asked) < len(first)
        assert all(line["sampling_params"]["seed"] % 2 == 0 for line in asked)
        for line in first:
            tokens = len(line["output_ids"]) + len(line["tail"]["ids"])
            assert len(line["router_flip"]) == len(line["schedule_flip"]) == tokens
            drawn = np.asarray(line["reveal_step"] + line["tail"]["reveal_step"]) >= 0
            shares = np.asarray(line["router_flip"])[drawn]
            assert ((shares >= 0) if "routing" in line else (shares == -1)).all()
        assert all("router_flip" not in line and "schedule_flip" not in line for line in second)
        records = {r["step"]: r for r in finished.steps()}
        assert records[1]["dllm/router_flip/tokens"] >= sum(len(line["output_ids"]) for line in asked)
        # In fp32 the two agree but for ties.
        assert records[1]["dllm/router_flip/ratio"] < 0.02 and records[1]["dllm/schedule_flip/ratio"] < 0.05
        assert records[1]["dllm/schedule_flip/states"] > 16
        assert not any(key.startswith(("dllm/router_flip", "dllm/schedule_flip")) for key in records[2])

    def test_what_a_person_sees(self, finished):
        text = finished.printed("finished")
        assert "hardware=cpu (as asked)" in text and "Traceback" not in text
        for step in (4, 5):
            assert f"step   {step}/5  reward" in text
        assert "validation, step 5: accuracy" in text and "held-out accuracy" in text
        assert "summary.json" in text
        assert "seconds of a step (mean without the first):" in text and "  weight refresh " in text

    def test_starting_it_again_without_resume_is_refused(self, finished, capsys):
        before = (finished.directory / "metrics.jsonl").read_bytes()
        assert grpo_llada2.main(finished.arguments()) == 2
        assert "already exists" in capsys.readouterr().err
        assert (finished.directory / "metrics.jsonl").read_bytes() == before

    def test_training_samples_from_the_models_own_distribution(self, finished):
        for _, lines in read_rollouts(finished.directory):
            for line in lines:
                given = {k: line["sampling_params"][k] for k in ("temperature", "top_p", "top_k", "min_p")}
                assert SamplingParams(**given) == SamplingParams()


@dataclass
class Again:
    """Two steps trained again from saved rollouts, and the processes seen meanwhile."""

    story: Story
    processes: set[str]


@pytest.fixture(scope="module")
def again(finished, tmp_path_factory) -> Again:
    """The first two steps without an engine: step 1 from its JSON lines, step 2 from parquet."""
    saved, marker = tmp_path_factory.mktemp("saved"), uuid4().hex
    for suffix in ("1.jsonl", "2.parquet"):
        lines = dict(read_rollouts(finished.directory))[int(suffix[0])]
        write_lines(saved / suffix, lines) if suffix == "1.jsonl" else write_parquet(saved / suffix, lines)
    more = ("recipe.run=again", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")
    story = replace(finished, name="again")
    arguments = (*more, "trainer.total_training_steps=2", "--load-debug-rollouts", str(saved))
    process = story.start("again", *arguments, marker=marker)
    seen: set[str] = set()
    try:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            seen |= set(processes_with(marker))
            time.sleep(2)
        assert process.poll() == 0, story.failure("again")
    finally:
        process.kill()
    return Again(story, seen)


@pytest.mark.slow
class TestAgain:
    def test_no_engine_was_started(self, again):
        assert any("ray" in command for command in again.processes)
        assert not [command for command in again.processes if "sglang" in command]

    def test_the_same_steps_are_taken(self, again, finished):
        """Rewards are computed anew, log-probs and losses by the same weights from the same data."""
        for first, second in zip(finished.steps()[:2], again.story.steps(), strict=True):
            for name in ("critic/score/mean", "rollout/group_diversity", "dllm/tokens_per_forward"):
                assert second[name] == first[name], name
            for name in ("actor/pg_loss", "actor/grad_norm"):
                assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-6), name
            assert second["rollout_corr/logprob_abs_diff/p999"] <= 1e-4

    def test_its_rollouts_are_the_saved_ones(self, again, finished):
        saved = dict(read_rollouts(finished.directory))
        for step, lines in read_rollouts(again.story.directory):
            assert [engine_line(line) for line in lines] == [engine_line(line) for line in saved[step]]

    def test_what_a_person_sees(self, again):
        assert "no validation" in again.story.printed("again") and "step   2/2" in again.story.printed("again")
