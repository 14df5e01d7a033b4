"""The small tokenizer: round trips, single digits, and LLaDA2's chat format."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from dllm.config import ConfigError
from recipes.tokenizer import END_OF_TEXT, MASK, ROLE_END, SPECIAL_TOKENS, build_tokenizer, prompt_ids
from tests.support import DATA

SUM = "State the final answer to the following arithmetic problem: {} ="


@pytest.fixture(scope="module")
def tokenizer():
    prompts = [SUM.format(f"{a} {op} {b}") for a in range(10, 60, 7) for b in range(20, 90, 9) for op in "+-"]
    return build_tokenizer(prompts, vocab_size=320)


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.mask_token == MASK
    for token in SPECIAL_TOKENS:
        assert len(tokenizer(token, add_special_tokens=False).input_ids) == 1
    assert len(tokenizer) <= 320
    assert tokenizer.mask_token_id < len(tokenizer)


@pytest.mark.parametrize(
    "text", ["", "-37", "  two  spaces\n\ttab", "Janet’s ducks, $2 – ½ of 16 €", "数学 🙂\x00\x7f"]
)
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_gsm8k_survives_a_round_trip(tokenizer):
    for prompt in pd.read_parquet(DATA / "gsm8k_50.parquet")["prompt"]:
        text = prompt[0]["content"]
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.mask_token_id not in ids


def test_digits_are_single_tokens(tokenizer):
    ids = tokenizer("1234567890 99", add_special_tokens=False).input_ids
    assert [tokenizer.decode([i]) for i in ids] == [*"1234567890", " ", "9", "9"]


def test_chat_strings_equal_the_published_template(tokenizer):
    """The strings were rendered with the published template of inclusionAI/LLaDA2.0-mini."""
    cases = json.loads((DATA / "llada2_chat_strings.json").read_text())
    assert len(cases) > 10
    for case in cases:
        text = tokenizer.apply_chat_template(
            case["messages"], tokenize=False, add_generation_prompt=case["add_generation_prompt"]
        )
        assert text == case["text"]


def test_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="role tool is not one of"):
        prompt_ids(tokenizer, [{"role": "tool", "content": "x"}])


def test_prompt_is_short_and_ends_with_the_assistants_turn(tokenizer):
    ids = prompt_ids(tokenizer, [{"role": "user", "content": SUM.format("26 + 53")}])
    assert 28 <= len(ids) <= 52
    assert tokenizer.decode(ids).endswith(f"26 + 53 ={ROLE_END}<role>ASSISTANT</role>")


def test_stripping_special_tokens_leaves_the_answer(tokenizer):
    ids = tokenizer(f"-37{ROLE_END}{END_OF_TEXT}", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "-37"


def test_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=100 is too small"):
        build_tokenizer(["x"], vocab_size=100)
