"""Bad input of ``python -m rollout.generate``: one sentence and exit code 2, and no engine is started."""

from __future__ import annotations

import builtins
import json

import pytest

from dllm.config import resolve
from rollout import generate
from rollout.generate import OrderedWriter, load_prompts
from rollout.records import RolloutSample
from tests.support import hand_made_trace, write_lines


class EngineStarted(BaseException):
    """Not an ``Exception``, so that nothing on the way handles it."""


@pytest.fixture
def call(tiny_dir, tmp_path, monkeypatch, capsys):
    """Run the command with changed arguments; returns what it printed to stderr. Starting SGLang fails the test."""
    original = builtins.__import__

    def guarded(name, *args, **kwargs):
        if name.partition(".")[0] == "sglang":
            raise EngineStarted(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)

    def run(lines=({"text": "1 + 1 ="},), **flags) -> str:
        given = {"model-path": tiny_dir, "prompts": write_lines(tmp_path / "prompts.jsonl", lines), "device": "cpu"}
        given |= {"out": tmp_path / "out.jsonl"} | {name.replace("_", "-"): value for name, value in flags.items()}
        arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        assert generate.main(arguments) == 2
        assert not (tmp_path / "out.jsonl").exists()
        return capsys.readouterr().err.strip()

    return run


def test_good_input_reaches_the_engine(call):
    """The guard of these tests works: without an error, the command goes on to import SGLang."""
    with pytest.raises(EngineStarted):
        call()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"model_path": "nowhere"},
            "error: model path 'nowhere' is not a directory; pass a local Hugging Face checkpoint",
        ),
        ({"prompts": "no.jsonl"}, "error: prompts file 'no.jsonl' does not exist; pass a file of JSON lines"),
        ({"n": 0}, "error: n=0 and max_new_tokens=128 must be at least 1"),
        ({"max_new_tokens": 0}, "error: n=1 and max_new_tokens=0 must be at least 1"),
        ({"temperature": -1}, "error: temperature=-1.0 is negative; use 0 for greedy decoding"),
        ({"top_p": 2}, "error: top_p=2.0 is not in (0, 1]; use 1 to switch it off"),
        ({"dllm_algorithm": "Sample"}, "error: dllm algorithm 'Sample' does not exist; use one of "),
        (
            {"dllm_algorithm_config": "no.yaml"},
            "error: dllm_algorithm_config 'no.yaml' does not exist; pass a YAML file",
        ),
        ({"threshold": 1.5}, "threshold=1.5 is not in (0, 1]; LLaDA2 uses 0.95"),
        ({"max_running_requests": 0}, "error: max_running_requests=0 is not positive; leave it unset"),
        ({"out": "."}, "error: out='.' is a directory; give the path of a file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_flags(call, flags, message):
    printed = call(**flags)
    assert message in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "has no lines; write one JSON object per line"),
        ([{"prompt": "hello"}], "line 1 has no 'text', 'messages' or 'input_ids'; give one of them"),
        ([{"text": "a"}, {"input_ids": [1, "2"]}], "line 2: input_ids is not a list of integers"),
        ([{"text": "a"}, {"input_ids": []}], "line 2: prompt is empty; give it at least one token"),
        ([{"input_ids": [7, 100000]}], "line 1: prompt has ids outside the vocabulary of "),
        ([{"input_ids": [7, -1]}], "line 1: prompt has ids outside the vocabulary of "),
        ([["text"]], "line 1 is not a JSON object"),
        ([{"input_ids": [True]}], "line 1: input_ids is not a list of integers"),
        ([{"text": 5, "messages": [{"role": "user", "content": "a"}]}], "line 1 has no 'text', 'messages' or"),
        (
            [{"messages": [{"role": "robot", "content": "a"}]}],
            "line 1: the chat template refuses the messages: role robot",
        ),
    ],
    ids=["empty", "no key", "types", "empty prompt", "vocabulary", "negative", "no object", "bool", "no text", "role"],
)
def test_bad_prompts(call, prompts, message):
    printed = call(prompts)
    assert printed.startswith("error: ") and message in printed and len(printed.splitlines()) == 1


def test_a_file_that_is_no_text(call, tmp_path):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    assert "binary.jsonl is not text in UTF-8: " in call(prompts=tmp_path / "binary.jsonl")


def test_a_broken_tokenizer(call, tiny_dir, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_dir / name).read_text())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "has no tokenizer that loads (" in call(model_path=tmp_path)


def test_mask_token_in_a_prompt(call, tiny_dir):
    mask_id = resolve(tiny_dir).mask_id
    printed = call([{"text": "a"}, {"input_ids": [7, mask_id]}])
    assert f"line 2: prompt holds the mask token {mask_id}, which stands for a hidden position; remove it" in printed


def test_a_checkpoint_without_tokenizer(call, tiny_dir, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tiny_dir / "config.json").read_text())
    printed = call(model_path=tmp_path / "bare")
    assert "bare' has no tokenizer that loads (" in printed and "or give prompts as 'input_ids'" in printed


def test_unknown_flag():
    with pytest.raises(SystemExit) as exit_info:
        generate.main(["--no-such-flag"])
    assert exit_info.value.code == 2


def test_the_three_kinds_of_prompts(tiny_dir, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    messages = [{"role": "user", "content": "1 + 1 ="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    path = write_lines(tmp_path / "p.jsonl", [{"messages": messages}, {"text": text}, {"input_ids": [9, 8]}])
    first, second, third = load_prompts(str(path), str(tiny_dir), False)
    assert first == second and third == [9, 8]
    assert tokenizer.decode(first) == text


def test_samples_are_written_in_the_order_of_their_prompts(tmp_path):
    path = tmp_path / "deep" / "out.jsonl"
    writer = OrderedWriter(str(path), prompts=3, n=2)
    written = []
    for prompt, sample in [(1, 0), (0, 1), (0, 0), (2, 1), (2, 0), (1, 1)]:
        trace = hand_made_trace([prompt, sample], [5, 6], [0, 1], 4)
        writer.add(prompt, sample, RolloutSample(trace, "", "length", 2))
        written.append(len(path.read_text().splitlines()))
    writer.close()
    assert written == [0, 0, 3, 3, 3, 6], "a sample is on disk as soon as all before it are"
    lines = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]
    assert lines == [[p, s] for p in range(3) for s in range(2)]
