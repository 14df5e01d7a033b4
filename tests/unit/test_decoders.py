"""Rules of the decoders, step by step: positions, draws, log-probs, broken logits, names and options.

``test_trajectories.py`` has what holds for whole trajectories.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dllm.config import ConfigError
from dllm.decoding import DECODERS, Decoder, SamplingParams, decoder_class, make_decoder
from dllm.decoding.sampling import sampling_logprobs
from tests.support import sampling_batch
from tests.unit.enumeration import LOW, MASK, TOKENS, Table, block, fixed, table_of


def trajectory(
    decoder: Decoder, table: Table, final: tuple[int, ...], params: SamplingParams
) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Log-prob of the only trajectory that ends in ``final``, and the positions it reveals step by step.

    At every state the decoder says which positions it reveals; their tokens are read off ``final``.
    """
    state, total, revealed = (MASK,) * len(final), torch.zeros(()), []
    for step in range(len(final)):
        if MASK not in state:
            break
        logits = table(state)
        with torch.no_grad():
            chosen = decoder.step(block([state], step, params), logits[None]).revealed[0].nonzero()[:, 0]
        logp = sampling_logprobs(logits, sampling_batch(params, len(final)), MASK)
        total = total + logp[chosen, torch.tensor(final)[chosen]].sum()
        revealed.append(tuple(chosen.tolist()))
        state = tuple(final[i] if i in revealed[-1] else state[i] for i in range(len(final)))
    assert MASK not in state
    return total, revealed


class TestOneStep:
    """Two hidden positions with p = (.92, .05, .03) and (.60, .30, .10), threshold 0.9."""

    table = staticmethod(fixed([[0.92, 0.05, 0.03], [0.60, 0.30, 0.10]]))

    def test_only_the_confident_position_is_revealed(self):
        decoder = make_decoder("SelectThenSample", MASK, {"threshold": 0.9})
        count = 20000
        states = [(MASK, MASK)] * count
        logits = self.table(states[0])[None].expand(count, -1, -1)
        result = decoder.step(block(states, 0, SamplingParams(), range(count)), logits)
        assert result.revealed.tolist() == [[True, False]] * count
        token = result.ids[:, 0]
        frequency = np.bincount(token.numpy(), minlength=3) / count
        assert frequency == pytest.approx([0.92, 0.05, 0.03], abs=4 * math.sqrt(0.92 * 0.08 / count))
        expected = torch.tensor([0.92, 0.05, 0.03]).log()[token]
        torch.testing.assert_close(result.logprob[:, 0], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(result.confidence[:, 0], torch.full((count,), 0.92), atol=1e-5, rtol=0)

    def test_the_sum_of_token_log_probs_is_the_trajectory_log_prob(self):
        """The second position comes at a later step, so a sum over both is the probability of the pair."""
        decoder = make_decoder("SelectThenSample", MASK, {"threshold": 0.9})
        logp, steps = trajectory(decoder, self.table, (1, 2), SamplingParams())
        assert steps == [(0,), (1,)]
        assert float(logp) == pytest.approx(math.log(0.05 * 0.10), abs=1e-5)


def test_positions_do_not_depend_on_the_temperature():
    table = table_of({}, 3, seed=5)
    decoder = make_decoder("SelectThenSample", MASK, {"threshold": 0.6})
    for state in itertools.product(range(TOKENS + 1), repeat=3):
        if MASK not in state:
            continue
        chosen = [
            decoder.step(block([state], 0, params), table(state)[None]).revealed.tolist()
            for params in (SamplingParams(), SamplingParams(0.2), SamplingParams(0), SamplingParams(2, 0.5, 1))
        ]
        assert all(c == chosen[0] for c in chosen)


def stock_low_confidence(ids: Tensor, logits: Tensor, threshold: float) -> Tensor:
    """The rule of SGLang 0.5.17's LowConfidence, position by position."""
    after = ids.clone()
    for row in range(len(ids)):
        hidden = [i for i in range(ids.shape[1]) if ids[row, i] == MASK]
        if not hidden:
            continue
        probability = logits[row].softmax(-1)
        best = {i: int(logits[row, i].argmax()) for i in hidden}
        confidence = {i: float(probability[i, best[i]]) for i in hidden}
        chosen = [i for i in hidden if confidence[i] > threshold] or [max(hidden, key=lambda i: (confidence[i], -i))]
        for i in chosen:
            after[row, i] = best[i]
    return after


@pytest.mark.parametrize("name", ["SelectThenSample", "LowConfidence"])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.95])
def test_greedy_equals_the_stock_rule(name, threshold):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 8, TOKENS + 1, generator=generator) * 2
    logits[..., MASK] = LOW
    ids = torch.randint(0, TOKENS + 1, (200, 8), generator=generator)
    states = [tuple(row) for row in ids.tolist()]
    result = make_decoder(name, MASK, {"threshold": threshold}).step(block(states, 0, SamplingParams(0)), logits)
    assert torch.equal(result.ids, stock_low_confidence(ids, logits, threshold))
    assert torch.equal(result.done, (ids != MASK).all(1))
    assert not result.logprob[result.revealed].any()
    raw = result.logprob_raw.exp()[result.revealed]
    torch.testing.assert_close(result.confidence[result.revealed], raw, atol=1e-5, rtol=0)


def test_low_confidence_ignores_the_temperature():
    logits = torch.randn(50, 4, TOKENS + 1, generator=torch.Generator().manual_seed(1))
    states = [(MASK,) * 4] * 50
    decoder = make_decoder("LowConfidence", MASK, {"threshold": 0.5})
    hot = decoder.step(block(states, 0, SamplingParams(2.0)), logits)
    cold = decoder.step(block(states, 0, SamplingParams(0)), logits)
    assert torch.equal(hot.ids, cold.ids) and not hot.logprob.any()


def test_the_mask_token_is_never_drawn_but_counts_for_confidence():
    count = 500
    logits = torch.zeros(count, 2, TOKENS + 1)
    logits[:, 0, MASK] = 4.0
    logits[:, 1, 0] = 3.0
    decoder = make_decoder("SelectThenSample", MASK, {"threshold": 0.99})
    for params in (SamplingParams(), SamplingParams(0), SamplingParams(0.5, 0.9)):
        result = decoder.step(block([(MASK, MASK)] * count, 0, params, range(count)), logits)
        # Confidence is that of the mask token: e^4 / (e^4 + 3) > e^3 / (e^3 + 3).
        assert result.revealed.tolist() == [[True, False]] * count
        assert float(result.confidence[0, 0]) == pytest.approx(math.exp(4) / (math.exp(4) + 3), abs=1e-5)
        assert not (result.ids[:, 0] == MASK).any()
        assert float(result.logprob_raw[0, 0]) == pytest.approx(math.log(1 / 3), abs=1e-5)


def test_noise_belongs_to_a_position_of_the_sequence_and_a_step():
    """The same block later in the sequence, or at a later step, draws other tokens; at the same place the same."""
    logits = torch.zeros(1, 64, 101)
    logits[..., 100] = LOW
    decoder = make_decoder("SelectThenSample", 100, {"threshold": 0.001})

    def drawn(start: int, step: int) -> list[int]:
        state = block([(100,) * 64], step, SamplingParams())
        state.start += start
        return decoder.step(state, logits).ids[0].tolist()

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0)[32:] == drawn(32, 0)[:32]
    different = [drawn(*place) for place in ((0, 0), (64, 0), (0, 1))]
    assert len({tuple(tokens) for tokens in different}) == 3


def test_a_finished_block_is_left_alone():
    logits = torch.randn(2, 3, TOKENS + 1, generator=torch.Generator().manual_seed(2))
    decoder = make_decoder("SelectThenSample", MASK)
    result = decoder.step(block([(0, 1, 2), (0, MASK, 2)], 1, SamplingParams()), logits)
    assert result.done.tolist() == [True, False]
    assert result.ids[0].tolist() == [0, 1, 2] and not result.revealed[0].any()
    assert result.revealed[1].tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_fail_their_own_block_only(bad):
    logits = torch.randn(3, 3, TOKENS + 1, generator=torch.Generator().manual_seed(3))
    logits[1, 2, 0] = bad
    decoder = make_decoder("SelectThenSample", MASK)
    states = [(MASK,) * 3] * 3
    result = decoder.step(block(states, 0, SamplingParams()), logits)
    assert result.failed.tolist() == [False, True, False]
    assert result.ids[1].tolist() == [MASK] * 3
    healthy = torch.randn(3, 3, TOKENS + 1, generator=torch.Generator().manual_seed(3))
    expected = decoder.step(block(states, 0, SamplingParams()), healthy)
    assert torch.equal(result.ids[[0, 2]], expected.ids[[0, 2]])


def test_broken_logits_of_a_visible_position_do_not_matter():
    logits = torch.randn(1, 3, TOKENS + 1, generator=torch.Generator().manual_seed(3))
    logits[0, 0] = math.nan
    result = make_decoder("SelectThenSample", MASK).step(block([(1, MASK, MASK)], 0, SamplingParams()), logits)
    assert not result.failed.any() and result.ids[0, 0] == 1


class TestRegistry:
    @pytest.mark.parametrize("name", sorted(DECODERS))
    def test_defaults_build(self, name):
        decoder = make_decoder(name, MASK)
        assert isinstance(decoder, Decoder)
        assert decoder.max_steps(32) >= 33

    def test_default_threshold(self):
        assert make_decoder("SelectThenSample", MASK).threshold == 0.95

    def test_a_class_of_a_third_party(self):
        name = "dllm.decoding.select_then_sample:SelectThenSample"
        assert decoder_class(name) is DECODERS["SelectThenSample"]
        assert make_decoder(name, MASK, {"threshold": 0.7}).threshold == 0.7

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("Select", {}, r"'Select' does not exist; use one of \['EntropyBound', .*'StaticSteps'\] or 'package"),
            ("no.such.module:X", {}, r"'no.such.module:X' cannot be imported .*; check the module path"),
            ("dllm.config:NoSuchClass", {}, r"cannot be imported .*; check the module path"),
            ("dllm.config:ConfigError", {}, r"is not a decoder class; it needs step"),
            (
                "SelectThenSample",
                {"treshold": 0.9},
                r"'treshold' is not an option of .*; valid keys are \['threshold'\]",
            ),
            ("SelectThenSample", {"threshold": "0.9"}, r"threshold='0.9' has the wrong type; expected float"),
            ("SelectThenSample", {"threshold": True}, r"threshold=True has the wrong type; expected float"),
            ("SelectThenSample", {"threshold": None}, r"threshold=None has the wrong type; expected float"),
            ("SelectThenSample", {"threshold": 1.5}, r"threshold=1.5 is not in \(0, 1\]; LLaDA2 uses 0.95"),
            ("SelectThenSample", {"threshold": 0}, r"threshold=0 is not in \(0, 1\]"),
            (
                "FastDLLMv2",
                {"use_block_cache": True},
                r"use_block_cache=True would reuse keys .* depend on the history of the block, .*; leave it out",
            ),
            ("FastDLLMv2", {"use_block_cache": 1}, r"use_block_cache=1 has the wrong type; expected bool"),
            ("FastDLLMv2", {"sub_block_size": 0}, r"sub_block_size=0 is not positive"),
            ("SampleThenSelect", {"tokens_per_step": 0}, r"tokens_per_step=0 is not positive"),
            ("SampleThenSelect", {"tokens_per_step": 1.5}, r"tokens_per_step=1.5 has the wrong type; expected int"),
            ("StaticSteps", {"threshold": 0.9}, r"'threshold' is not an option of StaticSteps; valid keys are \['tok"),
            ("StaticSteps", {"tokens_per_step": 0}, r"tokens_per_step=0 is not positive"),
            ("EntropyBound", {"gamma": -1}, r"gamma=-1 is negative; it is a budget in nats"),
            ("Margin", {"threshold": 0.0}, r"threshold=0.0 is not in \(0, 1\]"),
            ("JointThreshold", {"edit_threshold": 2}, r"edit_threshold=2 is not in \[0, 1\]; use 0.9 or more for RL"),
            ("JointThreshold", {"max_post_edit_steps": -1}, r"max_post_edit_steps=-1 is negative"),
        ],
    )
    def test_refusals(self, name, options, message):
        with pytest.raises(ConfigError, match=message):
            make_decoder(name, MASK, options)
