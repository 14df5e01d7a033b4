"""Invariants of the reference decoder's logs, over prompts that end anywhere in a block."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.decoding import SamplingParams, make_decoder
from dllm.reference import decode, visible_length
from tests.support import SMALL_EOS, SMALL_MASK, random_prompt, small_model

SIZE = 8


@pytest.fixture(scope="module")
def model():
    return small_model(seed=9, head_std=0.6)


def run(model, prompt_len: int, temperature: float = 1.0, seed: int = 0, threshold: float = 0.5, **options):
    decoder = make_decoder("SelectThenSample", SMALL_MASK, {"threshold": threshold})
    arguments = dict(block_size=SIZE, max_new_tokens=21, sampling=SamplingParams(temperature), seed=seed)
    return decode(model, random_prompt(prompt_len, prompt_len), decoder, **(arguments | options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 16])
def test_invariants(model, prompt_len, temperature):
    trace, threshold = run(model, prompt_len, temperature), 0.5
    trace.validate()
    assert (prompt_len + len(trace.replay_ids)) % SIZE == 0
    assert trace.visible == 21
    assert not (trace.replay_ids == SMALL_MASK).any()
    assert (trace.reveal_step >= 0).all()
    assert len(trace.replay_ids[trace.block_slice(0)]) == SIZE - prompt_len % SIZE
    several = 0
    for index, steps in enumerate(trace.steps_per_block):
        rows = trace.block_slice(index)
        for step in range(steps):
            confidence = trace.confidence[rows][trace.reveal_step[rows] == step]
            assert len(confidence) == 1 or (confidence > threshold).all()
            several += len(confidence) > 1
    assert several, "some step must reveal several tokens for this test to mean something"
    # The largest probability is at least that of the drawn token, with the mask token's share taken back in.
    assert (trace.confidence >= np.exp(trace.logprob_raw) * 0.5).all()
    if temperature == 0:
        assert not trace.logprob.any()
    else:
        assert np.array_equal(trace.logprob, trace.logprob_raw)


def test_groups_are_diverse_at_temperature_1_and_identical_at_0(model):
    hot = {tuple(run(model, 9, 1.0, seed).replay_ids.tolist()) for seed in range(4)}
    cold = {tuple(run(model, 9, 0.0, seed).replay_ids.tolist()) for seed in range(4)}
    assert len(hot) == 4 and len(cold) == 1
    assert run(model, 9, 1.0, 3).replay_ids.tolist() == run(model, 9, 1.0, 3).replay_ids.tolist()


def test_a_stop_id_ends_the_visible_part_but_not_the_block(model):
    free = run(model, 9)
    stop = int(free.replay_ids[3])
    first = free.replay_ids.tolist().index(stop)
    stopped = run(model, 9, eos_ids=(stop,))
    assert stopped.visible == first + 1
    assert len(stopped.replay_ids) == SIZE - 9 % SIZE + (0 if first < 7 else SIZE)
    assert np.array_equal(stopped.replay_ids, free.replay_ids[: len(stopped.replay_ids)])


@pytest.mark.parametrize(
    ("response", "limit", "visible"),
    [
        ([5, 6, 7, 8], 8, None),
        ([5, 6, SMALL_EOS, 8], 8, 3),
        ([5, 6, SMALL_EOS, SMALL_EOS], 8, 3),
        ([5, 6, 7, 8], 3, 3),
        ([5, 6, 7, SMALL_EOS], 3, 3),
        ([5, SMALL_EOS, 7, 8], 2, 2),
        ([5, 6, 7, 8], 4, 4),
    ],
)
def test_visible_length(response, limit, visible):
    assert visible_length(response, (SMALL_EOS,), limit) == visible


def test_broken_weights_are_reported(model):
    broken = small_model(seed=9)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="NaN or infinite logits in the block at position 8, step 0"):
        run(broken, 9)
