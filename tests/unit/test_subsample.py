"""Sub-sampled states: inclusion probabilities, the draw, and unbiased losses and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dllm.attention import dense_attention
from dllm.decoding import SamplingParams
from dllm.likelihood import Exact
from dllm.likelihood.exact import target_head
from dllm.likelihood.states import pack_states, token_sums
from dllm.likelihood.subsample import inclusion_probabilities, slice_signals, subsample, systematic_sample
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, sampling_batch, small_model

M = SMALL_MASK


@pytest.fixture(scope="module")
def trace():
    """Eleven tokens in two blocks of eight, six states; some were nearly certain when they were drawn."""
    logprob = np.log([0.2, 0.99, 0.6, 0.999, 0.9, 0.3, 0.95, 1.0, 1.0, 0.5, 0.97]).astype(np.float32)
    steps = [0, 1, 0, 0, 1, 2, 1, 3, 3, 0, 2]
    return hand_made_trace(random_prompt(5), random_prompt(11, 1), steps, 8, logprob=logprob)


@pytest.fixture(scope="module")
def states(trace):
    made = Exact().states(trace, M)
    assert len(made.sample.slices) == 6
    return made


class TestProbabilities:
    def test_signal_is_what_was_uncertain(self, trace, states):
        """Tokens of each (block, step): 0, 2 | 1 || 3, 9 | 4, 6 | 5, 10 | 7, 8."""
        signals = slice_signals(states, trace.logprob)
        assert signals == pytest.approx([1.2, 0.01, 0.501, 0.15, 0.73, 0.0], abs=1e-6)

    def test_proportional_within_bounds(self):
        got = inclusion_probabilities(np.asarray([4.0, 1.0, 0.5, 0.0]), share=0.5, floor=0.1)
        assert got == pytest.approx([1.0, 0.6, 0.3, 0.1], abs=1e-6)

    @pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 1.0])
    @pytest.mark.parametrize("signal", [[1.0] * 7, [0.0] * 7, [5, 0, 0, 0, 0, 0, 0], [3, 2, 1, 0.5, 0.1, 0.01, 0]])
    def test_they_add_up(self, share, signal):
        got = inclusion_probabilities(np.asarray(signal, dtype=float), share, floor=0.1)
        assert got.sum() == pytest.approx(max(1.0, share * 7), abs=1e-4)
        assert (got >= 0.1 - 1e-9).all() and (got <= 1).all()
        assert (np.diff(got[np.argsort(signal, kind="stable")]) >= -1e-9).all()

    def test_draws_have_the_probabilities_and_a_constant_number(self):
        probabilities = np.asarray([1.0, 0.6, 0.3, 0.1, 0.75, 0.25])
        generator, counts, draws = np.random.default_rng(0), np.zeros(6), 10_000
        for _ in range(draws):
            chosen = systematic_sample(probabilities, generator)
            assert len(chosen) == len(set(chosen)) == 3
            counts[chosen] += 1
        error = np.sqrt(probabilities * (1 - probabilities) / draws)
        assert (np.abs(counts / draws - probabilities) <= 3 * error + 1e-9).all()

    def test_the_number_is_within_one_of_the_expected_one(self):
        generator = np.random.default_rng(0)
        sizes = {len(systematic_sample(np.full(7, 0.35), generator)) for _ in range(500)}
        assert sizes == {2, 3}


class TestUnbiased:
    def kept(self, trace, states, share, floor, seed):
        probability = inclusion_probabilities(slice_signals(states, trace.logprob), share, floor)
        return subsample(states, probability, len(trace.replay_ids), np.random.default_rng(seed))

    def test_weighted_token_loss(self, trace, states):
        """The mean of 10,000 sub-sampled losses is the full loss, for losses of tokens that differ widely."""
        loss = np.random.default_rng(1).normal(size=11) * np.logspace(-1, 2, 11)
        probability = inclusion_probabilities(slice_signals(states, trace.logprob), 0.5, 0.1)
        generator = np.random.default_rng(2)
        values = np.asarray([loss @ subsample(states, probability, 11, generator)[1] for _ in range(10_000)])
        error = values.std(ddof=1) / 100
        assert error > 0 and abs(values.mean() - loss.sum()) < 3 * error

    def test_without_weights_it_is_biased(self, trace, states):
        loss = np.ones(11)
        probability = inclusion_probabilities(slice_signals(states, trace.logprob), 0.5, 0.1)
        generator = np.random.default_rng(2)
        values = np.asarray([loss @ (subsample(states, probability, 11, generator)[1] > 0) for _ in range(500)])
        assert values.mean() < 8

    def test_a_slice_is_kept_whole(self, trace, states):
        for seed in range(20):
            kept, weights = self.kept(trace, states, 0.4, 0.1, seed)
            assert 0 < len(kept.sample.slices) < 6
            scored = np.concatenate([s.token_index for s in kept.sample.slices])
            assert sorted(np.flatnonzero(weights)) == sorted(scored)
            assert len(kept.weights) == len(scored)
            assert len(kept.sample.clean) == max(s.start for s in kept.sample.slices)

    def test_everything_is_kept_with_probability_one(self, trace, states):
        kept, weights = self.kept(trace, states, 1.0, 0.1, 0)
        assert weights.tolist() == [1.0] * 11 and len(kept.sample.slices) == 6

    def test_gradients(self, trace, states):
        """Averaged over a fine grid of the draw's one offset, the weighted gradient is the full one."""
        model = small_model(seed=6)
        probability = inclusion_probabilities(slice_signals(states, trace.logprob), 0.5, 0.1)

        def gradient(part, weights):
            model.zero_grad()
            batch, _ = pack_states([part], 8, "cpu")
            head = target_head(batch, sampling_batch(SamplingParams()), M)
            values = model(batch.input_ids, batch.position, dense_attention(batch), head)
            (token_sums(batch, values.logprob, [11])[0] @ torch.as_tensor(weights)).backward()
            return model.model.layers[0].attention.query_key_value.weight.grad.clone()

        class Offset:
            def __init__(self, value):
                self.value = value

            def random(self):
                return self.value

        offsets = (np.arange(200) + 0.5) / 200
        cache: dict[tuple, torch.Tensor] = {}
        total = 0.0
        for value in offsets:
            part, weights = subsample(states, probability, 11, Offset(value))
            key = tuple(weights)
            if key not in cache:
                cache[key] = gradient(part, weights)
            total = total + cache[key] / len(offsets)
        full = gradient(states, np.ones(11, np.float32))
        assert len(cache) > 3
        torch.testing.assert_close(total, full, atol=0.02 * float(full.abs().max()), rtol=0)
