"""Where responses stop: stop ids, stop strings and limits, wherever they fall in a block, and the block behind them."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.decoding import SamplingParams
from rollout.records import RolloutSample
from tests.integration.conftest import Request

PROMPT = 40
"""The first block takes 24 response tokens, later ones 32."""


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.path)


def free(server, tiny, seed: int = 1, limit: int = 88) -> RolloutSample:
    """A response that only its limit stops: three whole blocks."""
    return server.one(tiny.prompt(PROMPT), seed=seed, max_new_tokens=limit, more={"ignore_eos": True})


def cut(server, tiny, seed: int = 1, limit: int = 88, **more) -> RolloutSample:
    """The same response with stops; SGLang's ``ignore_eos`` would switch stop ids off as well."""
    return server.one(tiny.prompt(PROMPT), seed=seed, max_new_tokens=limit, more=more)


def block_end(visible: int) -> int:
    """Replay tokens of a response that shows ``visible`` tokens: the block it stops in is finished."""
    return -(-(PROMPT + visible) // 32) * 32 - PROMPT


def assert_prefix(sample: RolloutSample, whole: RolloutSample, visible: int) -> None:
    trace, length = sample.trace, block_end(visible)
    assert trace.visible == visible
    assert trace.replay_ids.tolist() == whole.trace.replay_ids[:length].tolist()
    assert trace.reveal_step.tolist() == whole.trace.reveal_step[:length].tolist()
    np.testing.assert_allclose(trace.logprob, whole.trace.logprob[:length], atol=1e-4)
    trace.validate()


@pytest.mark.parametrize("limit", [1, 7, 23, 24, 25, 31, 32, 33, 56, 57])
def test_limits_anywhere_in_a_block(server, tiny, limit):
    sample = cut(server, tiny, limit=limit, ignore_eos=True)
    assert sample.finish_reason == "length"
    assert_prefix(sample, free(server, tiny), limit)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (5, 20), (23, 24), (24, 25), (30, 50), (55, 56)])
def test_stop_token_anywhere_in_a_block(server, tiny, low, high):
    """First and last of a block, and in its middle; the stop token itself is visible."""
    whole = next(w for w in (free(server, tiny, s) for s in range(20)) if used(w, tiny, low, high) is not None)
    index = used(whole, tiny, low, high)
    sample = cut(server, tiny, whole.seed, stop_token_ids=[int(whole.trace.replay_ids[index])])
    assert sample.finish_reason == "stop"
    assert_prefix(sample, whole, index + 1)


def used(whole: RolloutSample, tiny, low: int, high: int) -> int | None:
    """An index in [low, high) whose token does not occur before, in a response without stop ids."""
    ids = whole.trace.replay_ids.tolist()
    if set(tiny.config.eos_ids) & set(ids):
        return None
    return next((i for i in range(low, high) if ids[i] not in ids[:i]), None)


def test_eos_of_the_model(server, tiny):
    """Some of 48 responses hit the stop id in a block; ``ignore_eos`` goes on behind it with the same tokens."""
    (eos,) = tiny.config.eos_ids
    batch = server.generate([Request(tiny.prompt(PROMPT), seed=s, max_new_tokens=88) for s in range(48)])
    # One by one, because rounding depends on the batch and may turn a close draw.
    alone = [cut(server, tiny, s.seed) for s in batch if s.finish_reason == "stop"]
    hits = [s for s in alone if s.finish_reason == "stop"]
    assert len(hits) >= 2
    middle = 0
    for sample in hits:
        assert sample.trace.replay_ids.tolist().index(eos) + 1 == sample.trace.visible
        assert len(sample.to_line()["output_ids"]) == sample.trace.visible
        middle += block_end(sample.trace.visible) != sample.trace.visible
        assert_prefix(sample, free(server, tiny, sample.seed), sample.trace.visible)
    assert middle, "some stop id must lie inside of a block"


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def letters(tokenizer, whole: RolloutSample, low: int, high: int) -> list[int]:
    """Indices in [low, high) of tokens that are one ASCII letter which the text does not have before."""
    ids = whole.trace.replay_ids
    found = []
    for i in range(low, high):
        letter = text_of(tokenizer, ids[i : i + 1])
        if letter.isascii() and letter.isalpha() and letter not in text_of(tokenizer, ids[:i]):
            found.append(i)
    return found


def with_letters(server, tiny, tokenizer, low: int, high: int, count: int = 1) -> tuple[RolloutSample, list[int]]:
    for seed in range(40):
        whole = free(server, tiny, seed)
        no_eos = not set(tiny.config.eos_ids) & set(whole.trace.replay_ids.tolist())
        if no_eos and len(found := letters(tokenizer, whole, low, high)) >= count:
            return whole, found[:count]
    raise AssertionError(f"no seed has {count} new letters at {low}..{high}")


@pytest.mark.parametrize(("low", "high"), [(2, 20), (25, 50)])
def test_stop_string_in_the_middle_of_a_block(server, tiny, tokenizer, low, high):
    whole, (index,) = with_letters(server, tiny, tokenizer, low, high)
    letter = text_of(tokenizer, whole.trace.replay_ids[index : index + 1])
    sample = cut(server, tiny, whole.seed, stop=[letter])
    assert sample.finish_reason == "stop"
    assert_prefix(sample, whole, index + 1)
    assert letter not in sample.text


def test_the_earliest_of_several_stops_wins(server, tiny, tokenizer):
    """A stop string, a stop id and the limit in one block, in every order."""
    whole, (first, second) = with_letters(server, tiny, tokenizer, 1, 22, count=2)
    ids = whole.trace.replay_ids.tolist()
    one, two = (text_of(tokenizer, ids[i : i + 1]) for i in (first, second))
    for visible, reason, limit, stops in (
        (first + 1, "stop", 88, {"stop": [one], "stop_token_ids": [ids[second]]}),
        (first + 1, "stop", 88, {"stop": [two], "stop_token_ids": [ids[first]]}),
        (first + 1, "stop", 88, {"stop": [one, two]}),
        (first + 1, "stop", 88, {"stop": [two, one]}),
        (first + 1, "stop", second, {"stop": [one], "stop_token_ids": [ids[second]]}),
        (first + 1, "length", first + 1, {"stop": [two]}),
        (second, "length", second, {"stop": [two], "stop_token_ids": [ids[second]]}),
    ):
        sample = cut(server, tiny, whole.seed, limit, **stops)
        assert (sample.trace.visible, sample.finish_reason) == (visible, reason), (limit, stops)
        assert_prefix(sample, whole, visible)


def test_text_stops_with_the_visible_tokens(server, tiny, tokenizer):
    sample = cut(server, tiny, limit=30, ignore_eos=True)
    assert sample.text == text_of(tokenizer, sample.trace.replay_ids[:30])


def test_stops_work_at_temperature_0(server, tiny):
    prompt = tiny.prompt(PROMPT)
    whole = server.one(prompt, sampling=SamplingParams(0), max_new_tokens=56, more={"ignore_eos": True})
    index = used(whole, tiny, 3, 24)
    stop = {"stop_token_ids": [int(whole.trace.replay_ids[index])]}
    sample = server.one(prompt, sampling=SamplingParams(0), max_new_tokens=56, more=stop)
    assert_prefix(sample, whole, index + 1)
