"""States of a block from its log, and how they look."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from rollout.chat.__main__ import Chat, main
from rollout.chat.blocks import Block, NoLog, committed
from rollout.chat.view import MASK, BlockView
from rollout.engine import GenerateParams
from rollout.records import RolloutError
from rollout.viewer.tokens import TokenTexts


def answer(visible: int, reason: str | None = "stop", **changes: Any) -> dict[str, Any]:
    """Prompt of 3 tokens, blocks of 4: one token, a whole block, a block that stops at its second token."""
    blocks = [{"steps": 1}, None, None, None, {"steps": 2}, None, {"steps": 3, "tail": TAIL}]
    meta = {
        "finish_reason": reason and {"type": reason},
        "dllm_reveal_step": [0, 1, 0, 1, 0, 2, 0],
        "dllm_confidence": [0.9, 0.2, 0.5, 0.4, 0.99, 0.3, 0.95],
        "dllm_block": blocks,
    }
    cut = {name: value[:visible] if isinstance(value, list) else value for name, value in meta.items()}
    return {"text": "hello", "output_ids": [10, 11, 12, 13, 14, 15, 16][:visible], "meta_info": cut | changes}


TAIL = {"ids": [17, 18], "reveal_step": [1, 1], "confidence": [0.8, 0.7]}


def test_committed_blocks():
    assert committed(answer(0, None), 3, 4) == []
    assert [b.ids for b in committed(answer(1, None), 3, 4)] == [[10]]
    first, second, third = committed(answer(7), 3, 4)
    assert (first.visible, first.steps) == (1, 1) and second.ids == [11, 12, 13, 14]
    assert third == Block([15, 16, 17, 18], 2, [2, 0, 1, 1], [0.3, 0.95, 0.8, 0.7], 3)
    with pytest.raises(NoLog, match="the engine logs no reveal steps; start it with this package installed"):
        committed(answer(2, dllm_block=[]), 3, 4)


def test_states_of_a_block():
    block = Block([15, 16, 17, 18], 2, [2, 0, 1, 1], [0.5] * 4, 3)
    assert list(block.states()) == [
        [None, None, None, None],
        [None, 16, None, None],
        [None, 16, 17, 18],
        [15, 16, 17, 18],
    ]


def test_states_with_replaced_tokens():
    """The second token was drawn as 40, became 41 in step 1 and 16 in step 2."""
    block = Block([15, 16], 2, [0, 0], [0.5] * 2, 4, edits=[(1, 1, 40, 41), (2, 1, 41, 16)])
    assert list(block.states()) == [[None, None], [15, 40], [15, 41], [15, 16], [15, 16]]


def test_edits_are_placed_behind_the_prompt():
    blocks = [{"steps": 2, "edits": [[1, 3, 40, 10]]}]
    assert committed(answer(1, dllm_block=blocks), 3, 4)[0].edits == [(1, 0, 40, 10)]


@pytest.fixture(scope="module")
def tokenizer():
    from recipes.tokenizer import build_tokenizer

    return build_tokenizer(["State the final answer to the following arithmetic problem: 26 + 53 ="])


def test_frames(tokenizer):
    ids = [*tokenizer("26", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    block = Block([*ids, ids[0]], 3, [1, 0, 2, 2], [0.97, 0.4, 0.9, 0.9], 3)
    view = BlockView(TokenTexts(tokenizer))
    frames = list(view.frames(block))
    assert [frame.plain for frame in frames] == [MASK * 4, MASK + "6" + MASK * 2, "26" + MASK * 2, "26·2"]
    fresh = [[frame.plain[s.start : s.end] for s in frame.spans if "yellow" in str(s.style)] for frame in frames]
    assert fresh == [[], ["6"], ["2"], ["·", "2"]]
    assert view.finished(block).plain == "26"


class Canned:
    """A source that answers from memory."""

    def __init__(self, answers):
        self.answers, self.prompts = answers, []

    def stream(self, prompt_ids, params, seed):
        self.prompts.append(list(prompt_ids))
        yield from self.answers

    def close(self):
        pass


def chat(tokenizer, answers) -> Chat:
    console = Console(record=True, width=100, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    return Chat(Canned(answers), tokenizer, 4, GenerateParams(), console, pause=0)


def test_a_conversation_grows(tokenizer):
    made = chat(tokenizer, [answer(1, None), answer(1, None), answer(7)])
    made.block_size = 1
    assert made.ask("26 + 53 =") == "hello"
    made.ask("again")
    assert [m["role"] for m in made.messages] == ["user", "assistant", "user", "assistant"]
    first, second = made.source.prompts
    assert second[: len(first)] == first and len(second) > len(first)
    assert "9 tokens in 6 steps, 1.5 a step (stop)" in made.console.export_text()


def test_a_failed_request(tokenizer):
    failed = answer(0, "abort")
    failed["meta_info"]["finish_reason"] = {"type": "abort", "message": "nan_logits: check the weights"}
    with pytest.raises(RolloutError, match="nan_logits"):
        chat(tokenizer, [failed]).ask("hello")


def test_nobody_answers(capsys):
    assert main(["--url", "http://127.0.0.1:9", "--message", "hello"]) == 2
    assert "url='http://127.0.0.1:9' does not answer" in capsys.readouterr().err.replace("9/'", "9'")
