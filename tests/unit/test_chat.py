"""States of a block from its log, and how they look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rollout.chat.__main__ import Chat, main
from rollout.chat.blocks import Block, NoLog, committed
from rollout.chat.view import MASK, BlockView
from rollout.params import GenerateParams
from rollout.records import RolloutError, RolloutSample
from rollout.service import Block as Event
from rollout.service import Finished
from rollout.viewer.tokens import TokenTexts
from tests.support import hand_made_trace

TAIL = {"ids": [17, 18], "reveal_step": [1, 1], "confidence": [0.8, 0.7]}


def fields(first: int, last: int, steps: list[int], **more: Any) -> dict[str, Any]:
    """Tokens ``first`` to ``last`` of a response of 7 to a prompt of 3 in blocks of 4: one token, a whole block, a
    block that stops at its second token."""
    values = {
        "output_ids": [10, 11, 12, 13, 14, 15, 16],
        "reveal_step": [0, 1, 0, 1, 0, 2, 0],
        "confidence": [0.9, 0.2, 0.5, 0.4, 0.99, 0.3, 0.95],
    }
    return {name: value[first:last] for name, value in values.items()} | {"steps_per_block": steps} | more


def test_committed_blocks():
    assert [b.ids for b in committed(fields(0, 1, [1]), 3, 4)] == [[10]]
    first, second, third = committed(fields(0, 7, [1, 2, 3], tail=TAIL), 3, 4)
    assert (first.visible, first.steps) == (1, 1) and second.ids == [11, 12, 13, 14]
    assert third == Block([15, 16, 17, 18], 2, [2, 0, 1, 1], [0.3, 0.95, 0.8, 0.7], 3)
    assert committed(fields(5, 7, [3], tail=TAIL), 8, 4) == [third], "an event of its own"
    with pytest.raises(NoLog, match="the engine logs no reveal steps; start it with this package installed"):
        committed(fields(0, 2, []), 3, 4)


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


def test_edits_are_placed_in_their_blocks():
    """Edits name absolute positions; that of the prompt's last token is not the response's."""
    edits = [[0, 1, 3, 40, 10], [0, 1, 2, 8, 9], [1, 0, 5, 41, 12]]
    first, second = committed(fields(0, 5, [2, 2], edits=edits), 3, 4)
    assert (first.edits, second.edits) == ([(1, 0, 40, 10)], [(0, 1, 41, 12)])


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
    """A source that streams from memory."""

    def __init__(self, events):
        self.events, self.prompts = events, []

    def stream(self, prompts, params, *, seed):
        self.prompts += [list(prompt) for prompt in prompts]
        yield from self.events

    def close(self):
        pass


def finished(text: str) -> Finished:
    """The whole response of ``fields``."""
    trace = hand_made_trace([1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17, 18], [0, 1, 0, 1, 0, 2, 0, 1, 1], 4)
    return Finished(0, 0, RolloutSample(replace(trace, visible=7), text, "stop", 7))


def chat(tokenizer, events) -> Chat:
    console = Console(record=True, width=100, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    return Chat(Canned(events), tokenizer, 4, GenerateParams(), console, pause=0)


def test_a_conversation_grows(tokenizer):
    made = chat(tokenizer, [Event(0, 0, fields(0, 1, [1])), finished("hello")])
    made.block_size = 1
    assert made.ask("26 + 53 =") == "hello"
    made.ask("again")
    assert [m["role"] for m in made.messages] == ["user", "assistant", "user", "assistant"]
    first, second = made.source.prompts
    assert second[: len(first)] == first and len(second) > len(first)
    assert "9 tokens in 6 steps, 1.5 a step (stop)" in made.console.export_text()


def test_a_failed_request_is_forgotten(tokenizer):
    made = chat(tokenizer, [Finished(0, 0, RolloutError("nan_logits: check the weights"))])
    with pytest.raises(RolloutError, match="nan_logits"):
        made.ask("hello")
    assert made.messages == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 is negative; use 0"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 is not positive; use e.g. 512"),
        (["--steps-per-second", "nan"], "steps_per_second=nan is not positive; use e.g. 20"),
        ([], "model path 'nowhere' is not a directory; pass a local"),
    ],
)
def test_bad_flags(capsys, flags, message):
    assert main(["--model-path", "nowhere", *flags]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_nobody_answers(capsys):
    assert main(["--url", "", "--message", "hello"]) == 2
    assert "url='' does not answer" in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:9", "--message", "hello"]) == 2
    assert "url='http://127.0.0.1:9' does not answer" in capsys.readouterr().err
