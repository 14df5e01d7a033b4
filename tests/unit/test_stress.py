"""What the stress run calls a problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest

from recipes.stress.concurrent import judge as judge_answers
from recipes.stress.described import fields_of, round_robin
from recipes.stress.malformed import Attempt
from recipes.stress.memory import growth, memory_mib
from recipes.stress.report import MAX_PROBLEMS, Phase, table_of
from recipes.stress.send import names_in, says_what
from recipes.stress.soak import judge as judge_memory
from recipes.stress.wellformed import Ask, WrongAnswer, ask, of

INFO = {"vocab_size": 320, "mask_id": 5}
MINUTES = np.linspace(0, 20, 200)


def line(start: float, per_minute: float, seed: int = 0) -> list[float]:
    """MiB over 20 minutes with noise."""
    return (start + per_minute * MINUTES + np.random.default_rng(seed).normal(0, 1, len(MINUTES))).tolist()


class TestMemory:
    def test_a_slope_is_found_in_noise(self):
        found = growth(60 * MINUTES, line(1000, 2.0))
        assert found.per_minute == pytest.approx(2, abs=0.1) and not found.flat
        assert found.last - found.first == pytest.approx(30, abs=2), "15 minutes after the warm-up"

    def test_warm_up_is_left_out(self):
        filling = [300 * min(minute / 5, 1) + 1000 for minute in MINUTES]
        assert growth(60 * MINUTES, filling).flat
        assert growth(60 * MINUTES, line(1000, -3)).flat, "a server that shrinks does not leak"

    @pytest.mark.parametrize(("per_minute", "minutes", "problems"), [(0.2, 20, 0), (2, 20, 1), (2, 1, 0)])
    def test_growth_is_a_problem_of_a_long_run(self, per_minute, minutes, problems):
        sizes = [
            {"server": a, "sglang::scheduler": b} for a, b in zip(line(400, 0), line(900, per_minute), strict=True)
        ]
        phase = Phase("soak")
        judge_memory(phase, (60 * MINUTES).tolist(), sizes, minutes)
        assert phase.problem_count == problems and phase.figures["scheduler_mib_per_minute"] == pytest.approx(
            per_minute, abs=0.1
        )

    def test_of_this_process(self):
        assert memory_mib(os.getpid())["server"] > 10

    def test_processes_keep_their_names(self):
        child = "import setproctitle; setproctitle.setproctitle('sglang::scheduler'); print('on', flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"on\n"
            assert memory_mib(os.getpid())["sglang::scheduler"] > 1
            process.communicate(b"\n")


class TestAnswers:
    def test_no_two_requests_are_alike(self):
        asks = [ask(number, INFO) for number in range(3000)]
        assert len({a.input_ids for a in asks}) == 3000 and asks == [ask(number, INFO) for number in range(3000)]
        assert not any(INFO["mask_id"] in a.input_ids for a in asks)

    @pytest.mark.parametrize(
        ("answers", "may_differ", "figures", "problems"),
        [
            ([[[1]], [[2]], [[3]]], 0.0, (0, 0, 0), 0),
            ([[[2]], [[1]], [[3]]], 0.0, (0, 2, 2), 2),
            ([[[1]], [[9]], [[3]]], 0.0, (0, 0, 1), 2),
            ([[[1]], [[9]], [[3]]], 0.5, (0, 0, 1), 0),
            ([[[1]], [[3]], [[3]]], 0.5, (0, 1, 1), 1),
            ([[[1]], None, [[3]]], 0.0, (1, 0, 0), 0),
        ],
    )
    def test_swapped_and_different(self, answers, may_differ, figures, problems):
        """A lost answer has been counted where it was lost."""
        phase = Phase("concurrent")
        judge_answers(phase, answers, [[[1]], [[2]], [[3]]], may_differ)
        found = tuple(phase.figures[name] for name in ("lost", "swapped", "different"))
        assert found == figures and bool(phase.problem_count) == bool(problems)

    def test_the_answer_to_another_prompt(self):
        wanted = Ask(0, (7, 8), 1, 5, False, 0.0)
        assert of([{"input_ids": [7, 8], "output_ids": [1]}], wanted) == [[1]]
        for samples in ([], [None], [{"error": {}}], [{"input_ids": [7, 9], "output_ids": [1]}]):
            with pytest.raises(WrongAnswer):
                of(samples, wanted)


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "status", "text", "said"),
        [
            ("/rollout/generate", 400, '{"error": {"field": "n", "message": "n: too many"}}', True),
            ("/rollout/generate", 400, '{"error": {"field": "", "message": "too many"}}', False),
            ("/generate", 400, '{"error": {"message": "Input_ids cannot be empty"}}', True),
            ("/generate", 400, '{"error": {"message": "no"}}', False),
            ("/generate", 400, '{"error": {"message": "no", "param": "text"}}', True),
            ("/generate", 400, '{"error": {"message": "n must be 1"}}', True),
            ("/generate", 400, '{"error": {"message": "rank is missing"}}', True),
            ("/encode", 400, '{"error": {"message": "Please add `--is-embedding` when launching"}}', True),
            ("/rollout/generate", 400, '{"error": {"message": "Please add `--is-embedding`"}}', False),
            ("/v1/models/x", 404, "", True),
        ],
    )
    def test_a_field_is_named(self, path, status, text, said):
        answer = httpx.Response(status, text=text)
        assert says_what(answer, Attempt("odd", path, b'{"text": [""]}', fields=frozenset({"rank"}))) is said

    def test_names_at_any_depth(self):
        assert names_in(json.dumps({"a": [{"b": 1}, [{"c": {}}]]}).encode()) == {"a", "b", "c"}
        assert names_in(b"[" * 100_000) == names_in(b"\xff") == set()


def test_fields_of_an_operation():
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}}
    paths = {"/a": {"post": {"requestBody": body, "parameters": [{"name": "q"}]}, "get": {}}}
    description = {"paths": paths, "components": {"schemas": {"Body": {"properties": {"x": {}, "y": {}}}}}}
    assert fields_of(description, "/a", "POST") == {"q", "x", "y"} and fields_of(description, "/a", "get") == set()


def test_every_operation_has_its_turn():
    pools = [[Attempt("a", "/a", b"")] * 5, [Attempt("b", "/b", b"")] * 2, []]
    assert [a.path for a in round_robin(pools)] == ["/a", "/b", "/a", "/b", "/a", "/a", "/a"]
    assert list(round_robin([])) == []


def test_problems_are_counted_beyond_those_kept():
    phase = Phase("malformed")
    for _ in range(2 * MAX_PROBLEMS):
        phase.problem("x")
    phase.count("odd", "400")
    assert (phase.problem_count, len(phase.problems), phase.outcomes()) == (2 * MAX_PROBLEMS, MAX_PROBLEMS, {"400": 1})
    assert table_of([phase]).row_count == 1
