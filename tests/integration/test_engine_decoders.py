"""Every sampling decoder in the real engine: against the reference decoder, and against the trainer's replay.

One engine for all of them: requests choose their decoder by seed (``tests.integration.decoders``), and meet in the same
batches.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dllm.config import resolve
from dllm.decoding import SamplingParams
from dllm.trace import RolloutTrace
from recipes import check_logprobs
from rollout.chat.source import Address
from rollout.generate import load_tokenizer
from rollout.params import GenerateParams, content_seed
from rollout.records import RolloutSample, read_traces
from tests.examples import third_party_decoder
from tests.integration.conftest import Request
from tests.integration.decoders import NAMES, inner_decoder
from tests.integration.oracle import TOLERANCE, Case, TinyModel, assert_same
from tests.integration.test_engine_decoding import streamed_blocks
from tests.support import ROOT, run_module, write_lines

LIMIT = 40
SAMPLING = {"plain": SamplingParams(), "filtered": SamplingParams(0.8, 0.95, 60), "greedy": SamplingParams(0)}
LENGTHS = dict(zip(NAMES, [(1, 33), (31, 40), (47, 64), (32, 5), (38, 70), (20, 63), (9, 45), (27, 36)], strict=False))
TRUE_NAMES = NAMES[:-1]


def make_case(tiny: TinyModel, name: str, length: int, sampling: SamplingParams) -> Case:
    number = NAMES.index(name)
    for variant in range(40):
        prompt, seed = tiny.prompt(length, variant), 16 * variant + number
        decoder = inner_decoder(name, tiny.config.mask_id)
        trace, close = tiny.watched(prompt, sampling=sampling, seed=seed, decoder=decoder, max_new_tokens=LIMIT)
        if not close:
            return Case(prompt, seed, sampling, trace)
    raise AssertionError(f"{name}: 40 prompts with a close decision")


@pytest.fixture(scope="module")
def cases(tiny: TinyModel) -> dict[tuple[str, int, str], Case]:
    """Two prompt lengths per decoder, one of them filtered; greedy where the stock rule is not tested elsewhere."""
    made = {}
    for name in TRUE_NAMES:
        first, second = LENGTHS[name]
        made[name, first, "plain"] = make_case(tiny, name, first, SAMPLING["plain"])
        made[name, second, "filtered"] = make_case(tiny, name, second, SAMPLING["filtered"])
    made["JointThreshold", 33, "greedy"] = make_case(tiny, "JointThreshold", 33, SAMPLING["greedy"])
    made["SampleThenSelect", 40, "greedy"] = make_case(tiny, "SampleThenSelect", 40, SAMPLING["greedy"])
    return made


def as_logged(sample: RolloutSample, case: Case) -> RolloutTrace:
    """The engine's log with the rule of the decoder that was chosen, instead of the one of the decoder around it."""
    rule = case.trace.selection
    selects = sample.trace.select_logprobs
    if rule is None:
        assert not np.any(np.concatenate(selects))
    return replace(sample.trace, selection=rule, select_logprobs=selects if rule is not None else None)


@pytest.fixture(scope="module")
def answers(cases) -> dict:
    return {}


@pytest.fixture
def traces(by_seed, cases, answers) -> dict[tuple[str, int, str], RolloutTrace]:
    """What the engine made of all requests, sent together."""
    if not answers:
        samples = by_seed.generate([Request.of(case, max_new_tokens=LIMIT) for case in cases.values()])
        answers.update({key: as_logged(s, cases[key]) for key, s in zip(cases, samples, strict=True)})
    return answers


def test_the_cases_mean_something(cases):
    """Several tokens at some steps, edits, both branches of the choice of positions."""
    for name in TRUE_NAMES:
        made = [case.trace for key, case in cases.items() if key[0] == name]
        tokens, steps = sum(len(t.replay_ids) for t in made), sum(sum(t.steps_per_block) for t in made)
        assert tokens / steps > (1.02 if name == "JointThreshold" else 1.1), name
        assert any(t.edits for t in made) == (name == "JointThreshold")
    few, many = cases["SampleThenSelect", 1, "plain"].trace, cases["SampleThenSelect ", 31, "plain"].trace
    assert few.selection.tokens_per_step == 1 and many.selection.tokens_per_step == 3
    for trace in (few, many):
        values = np.concatenate(trace.select_logprobs)
        assert values.min() < -1 and len(values) == sum(trace.steps_per_block)


@pytest.mark.parametrize("name", TRUE_NAMES)
def test_it_is_the_reference(traces, cases, name):
    for key, case in cases.items():
        if key[0] == name:
            trace = traces[key]
            trace.validate()
            assert_same(trace, case.trace)
            assert trace.edits == case.trace.edits and trace.drawn_ids.tolist() == case.trace.drawn_ids.tolist()
            np.testing.assert_allclose(trace.select_logprob, case.trace.select_logprob, atol=TOLERANCE)


def test_the_trainers_log_probs_are_the_engines(traces, tiny):
    found = check_logprobs.differences(tiny.model, list(traces.values()), tiny.config.mask_id, "cpu")
    worst = {name: float(values.max()) for name, values in found.values.items()}
    print(f"|engine - trainer|: {worst}, {int(found.ties.sum())} router ties of {len(found.ties)} tokens")
    tokens = found.values["logprob"][~found.ties]
    assert len(tokens) > 0.8 * len(found.ties) and tokens.max() <= TOLERANCE
    assert worst["select_logprob"] <= TOLERANCE or found.ties.any()
    assert len(found.values["select_logprob"]) > 100


class TestCheck:
    """``python -m recipes.check_logprobs`` on the engine's lines."""

    @pytest.fixture
    def lines(self, traces):
        """Few lines, because every test replays them."""
        keys = (("SampleThenSelect", 33, "filtered"), ("JointThreshold", 47, "plain"), ("Margin", 20, "plain"))
        return [json.loads(json.dumps(traces[key].to_line())) for key in keys]

    def run(self, tiny, tmp_path, capsys, lines, *more) -> tuple[int, dict]:
        capsys.readouterr()
        path = write_lines(tmp_path / "rollouts.jsonl", lines)
        code = check_logprobs.main(["--model-path", str(tiny.path), "--rollouts", str(path), "--device", "cpu", *more])
        return code, json.loads(capsys.readouterr().out)

    def test_they_pass(self, tiny, tmp_path, capsys, lines):
        code, result = self.run(tiny, tmp_path, capsys, lines, "--tolerance", "1e-4")
        assert code == 0 and result["worst"]["select_logprob"] <= 1e-4
        assert set(result["worst"]) == set(check_logprobs.NUMBERS)

    @pytest.mark.parametrize("name", check_logprobs.NUMBERS)
    def test_one_wrong_number_is_found(self, tiny, tmp_path, capsys, lines, name):
        """One of hundreds, changed by a little more than 0.01, with a tolerance that would let it pass."""
        line = next(line for line in lines if "select_logprob" in line and line["logprob"] != line["logprob_raw"])
        values = line["select_logprob"][0] if name == "select_logprob" else line[name]
        values[0] -= 0.0102 if name != "confidence" else -0.0102
        code, result = self.run(tiny, tmp_path, capsys, lines, "--tolerance", "0.1")
        assert code == 1 and result["worst"][name] == pytest.approx(0.0102, abs=1e-4)
        assert all(worst < 1e-3 for other, worst in result["worst"].items() if other != name)

    def test_a_wrong_edit_is_found(self, tiny, tmp_path, capsys, lines):
        """Another drawn token in the place of the one that was edited away: not what the log-prob is of."""
        line = next(line for line in lines if line.get("edits"))
        edit = line["edits"][0]
        edit[3] = next(t for t in range(10, 20) if t not in edit)
        code, result = self.run(tiny, tmp_path, capsys, lines)
        assert code == 1 and result["max"] > 0.01

    def test_a_choice_without_a_rule_is_refused(self, tiny, tmp_path, capsys, lines):
        line = next(line for line in lines if "selection" in line)
        del line["selection"]
        path = write_lines(tmp_path / "rollouts.jsonl", [line])
        assert check_logprobs.main(["--model-path", str(tiny.path), "--rollouts", str(path)]) == 2
        assert "sample 1 logs select_logprob without 'selection'" in capsys.readouterr().err


def test_a_decoder_that_changes_the_prompt_fails_its_request_by_name(by_seed, tiny):
    vandal, good = (Request(tiny.prompt(9), seed=NAMES.index(n)) for n in ("Vandal", "SelectThenSample"))
    answer = by_seed.client.post("/generate", json={"input_ids": vandal.prompt, "sampling_params": vandal.sglang()})
    assert answer.status_code == 500
    assert answer.json()["message"].startswith("unlogged_edit: the decoder replaced a visible token")
    assert by_seed.generate([good])[0].finish_reason in ("length", "stop"), "others go on"


def test_alone_or_together_and_again_from_the_cache(by_seed, cases, traces):
    """A block that is edited after its last reveal keeps its keys and values out of nobody's cache but its own."""
    for key in (("JointThreshold", 47, "plain"), ("SampleThenSelect", 33, "filtered")):
        (sample,) = by_seed.generate([Request.of(cases[key], max_new_tokens=LIMIT)])
        again = as_logged(sample, cases[key])
        assert_same(again, traces[key])
        assert again.edits == traces[key].edits


def test_chat_at_sglangs_own_server(by_seed, tiny):
    """The service over SGLang's endpoint streams the sample that the endpoint answers, with its edits."""
    prompt, wanted = tiny.prompt(47), NAMES.index("JointThreshold")
    base = next(seed for seed in range(1000) if content_seed(seed, prompt, 0) % 16 == wanted)
    (expected,) = by_seed.generate([Request(prompt, seed=content_seed(base, prompt, 0), max_new_tokens=LIMIT)])
    address = Address(by_seed.url)
    assert not address.ours
    source = address.source(load_tokenizer(address.tokenizer_path, False), resolve(tiny.path))
    try:
        blocks, made = streamed_blocks(source, prompt, GenerateParams(max_new_tokens=LIMIT), base, by_seed.block_size)
    finally:
        source.close()
    assert_same(made.trace, expected.trace)
    assert made.text == expected.text and made.trace.edits == expected.trace.edits
    assert sum(len(block.edits) for block in blocks) == len(expected.trace.edits) > 0
    assert [token for block in blocks for token in block.ids] == expected.trace.replay_ids.tolist()
    assert all(list(block.states())[-1] == block.ids for block in blocks)


def test_the_decoder_of_the_documentation(heavy, tiny, tmp_path, capsys):
    """docs/decoders.md as a reader runs it: saved as a module, named on the command line, its rollouts checked."""
    heavy.close()
    algorithm = third_party_decoder(tmp_path)
    prompts = [{"input_ids": tiny.prompt(length)} for length in (1, 31, 40, 64)]
    arguments = ("--prompts", write_lines(tmp_path / "prompts.jsonl", prompts), "--out", tmp_path / "rollouts.jsonl")
    made = run_module(
        "rollout.generate",
        *("--model-path", tiny.path, *arguments, "--dllm-algorithm", algorithm, "--max-new-tokens", LIMIT),
        *("--seed", 1, "--device", "cpu"),
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        OMP_NUM_THREADS="1",
    )
    assert made.returncode == 0, made.stderr[-3000:]
    for trace in read_traces(tmp_path / "rollouts.jsonl"):
        for index, steps in enumerate(trace.steps_per_block):
            drawn = trace.reveal_step[trace.block_slice(index)]
            assert drawn.tolist() == [i // 2 for i in range(len(drawn))] and steps == drawn[-1] + 1
    code = check_logprobs.main(["--model-path", str(tiny.path), "--rollouts", str(tmp_path / "rollouts.jsonl")])
    assert code == 0 and json.loads(capsys.readouterr().out)["max"] <= TOLERANCE
