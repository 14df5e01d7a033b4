"""Estimators of the ELBO and the baselines: which states, which weights, what mean."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from torch import nn

from dllm.attention import dense_attention
from dllm.config import ConfigError
from dllm.decoding import SamplingParams, make_decoder
from dllm.likelihood import Coupled, Elbo, Exact, OneStep, make_likelihood
from dllm.likelihood.elbo import coupled_masks, draw_sizes, sandwich, sequence_log_ratio, upper_bounds
from dllm.likelihood.enumeration import estimate, score_all_states
from dllm.likelihood.exact import replay_logprobs, target_head
from dllm.likelihood.states import (
    content_generator,
    forward_tokens,
    pack_states,
    response_blocks,
    split,
    target_shares,
    token_sums,
)
from dllm.reference import decode
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, sampling_batch, small_model

M = SMALL_MASK
A, B, TOY_MASK = 0, 1, 2


class Pairs(nn.Module):
    """Two positions that are always equal: fully masked each is A or B with 1/2; next to a token, the same token.

    Called like the real network, for rows of blocks of two; its head is the identity.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, input_ids, position, attention, head):
        pairs = input_ids.view(len(input_ids), -1, 2)
        other = pairs.flip(-1)
        table = torch.tensor([[1 - self.eps, self.eps, 0], [self.eps, 1 - self.eps, 0], [0.5, 0.5, 0]])
        hidden = table.clamp(min=1e-30).log()[other].view(*input_ids.shape, 3)
        identity = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            identity.weight.copy_(torch.eye(3))
        return head(hidden, identity)


def value_of(model, states, trace, mask_id):
    """The estimate of one response, through packing and head."""
    batch, weights = pack_states([states], trace.block_size, "cpu")
    head = target_head(batch, sampling_batch(SamplingParams()), mask_id)
    values = model(batch.input_ids, batch.position, dense_attention(batch), head)
    return token_sums(batch, weights * values.logprob, [len(trace.replay_ids)])[0]


class TestToy:
    """The ELBO of a response is not its likelihood under a decoder that reveals in parallel."""

    @pytest.mark.parametrize(("response", "expected"), [([A, A], -log(2)), ([A, B], -log(2) + log(1e-6))])
    def test_elbo(self, response, expected):
        trace = hand_made_trace([A, A], response, [0, 0], 2)
        states = Elbo(noise="all").states(trace, TOY_MASK)
        with torch.no_grad():
            value = value_of(Pairs(1e-6), states, trace, TOY_MASK)
        assert float(value.sum()) == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("response", [[A, A], [A, B]])
    def test_parallel_policy(self, response):
        trace = hand_made_trace([A, A], response, [0, 0], 2)
        with torch.no_grad():
            value = value_of(Pairs(1e-6), Exact().states(trace, TOY_MASK), trace, TOY_MASK)
        assert float(value.sum()) == pytest.approx(-2 * log(2), abs=1e-4)

    def test_figures_of_the_design(self):
        got = []
        for response in ([A, A], [A, B]):
            trace = hand_made_trace([A, A], response, [0, 0], 2)
            with torch.no_grad():
                states = Elbo(noise="all").states(trace, TOY_MASK)
                got.append(float(value_of(Pairs(1e-6), states, trace, TOY_MASK).sum()))
        assert got == pytest.approx([-0.6931, -14.5087], abs=1e-4)


SIZE = 6


@pytest.fixture(scope="module")
def model():
    return small_model(seed=6, head_std=0.6)


@pytest.fixture(scope="module")
def trace(model):
    """A response with 2 free positions in its first block and 6 in its second."""
    decoder = make_decoder("SelectThenSample", M, {"threshold": 0.7})
    with torch.no_grad():
        made = decode(model, random_prompt(10, 3), decoder, block_size=SIZE, max_new_tokens=8, seed=2)
    assert [len(b.free) for b in response_blocks(made, M)] == [2, 6]
    return made


@pytest.fixture(scope="module")
def scores(model, trace):
    return score_all_states(model, trace, M)


@pytest.fixture(scope="module")
def toy():
    """A response of one block of ten tokens, and its scores in a language whose tokens predict each other.

    The fewer tokens are hidden, the better the hidden ones are known.
    """
    trace = hand_made_trace([], random_prompt(10, 1), [0] * 10, 10)
    generator = np.random.default_rng(1)
    ease = generator.uniform(0.5, 1.5, 10)
    table = {}
    for piece in Elbo(noise="all").states(trace, M).sample.slices:
        hidden = piece.columns
        surprise = 0.1 + 3.0 * (len(hidden) - 1) / 9 + generator.uniform(0, 0.3, len(hidden))
        table[piece.start, hidden.tobytes()] = -ease[hidden] * surprise
    return trace, table


def pair_without_full_mask(free, samples, generator):
    """The coupled pair as it is often written: no term for the fully masked state."""
    count = len(free)
    if count == 1:
        return [(free, 1.0)]
    masks = []
    for k in draw_sizes(1, count - 1, samples, True, generator):
        hidden = np.sort(generator.choice(free, k, replace=False))
        masks += [(part, count / (2 * len(part) * samples)) for part in (hidden, np.setdiff1d(free, hidden))]
    return masks


class Uncorrected(Elbo):
    def masks(self, block, generator):
        return pair_without_full_mask(block.free, self.samples, generator)


def estimates(likelihood, trace, scores, draws=3000, seed=0):
    generator = np.random.default_rng(seed)
    return np.asarray([estimate(likelihood.states(trace, M, generator), scores) for _ in range(draws)])


class TestMean:
    def check(self, likelihood, trace, scores):
        truth = estimate(Elbo(noise="all").states(trace, M), scores)
        values = estimates(likelihood, trace, scores)
        return abs(values.mean() - truth), values.std(ddof=1) / len(values) ** 0.5

    @pytest.mark.parametrize(
        "likelihood",
        [Elbo(1), Elbo(2), Elbo(3), Elbo(2, "iid"), Elbo(1, "coupled"), Elbo(2, "coupled")],
        ids=lambda e: f"{e.noise}-{e.samples}",
    )
    def test_is_the_enumerated_elbo(self, toy, trace, scores, likelihood):
        """Of the toy, and of a network's response with a first block of two free positions."""
        for case in (toy, (trace, scores)):
            difference, error = self.check(likelihood, *case)
            assert error > 0 and difference < 3 * error

    def test_an_uncorrected_pair_is_caught(self, toy):
        difference, error = self.check(Uncorrected(1, "coupled"), *toy)
        assert difference > 10 * error

    @pytest.mark.parametrize("likelihood", [Elbo(2), Elbo(1, "coupled"), Elbo(1, "iid")], ids=lambda e: e.noise)
    def test_one_free_position_has_no_noise(self, model, likelihood):
        short = hand_made_trace(random_prompt(11, 3), [5], [0], SIZE)
        scores = score_all_states(model, short, M)
        values = estimates(likelihood, short, scores, draws=20)
        truth = estimate(Elbo(noise="all").states(short, M), scores)
        assert values == pytest.approx(truth, abs=1e-6)
        with torch.no_grad():
            (exact,) = replay_logprobs(model, [short], M)
        assert truth == pytest.approx(float(exact.sum()), abs=1e-5), "with one position the decoder has one state too"

    def test_variance_orders_the_noise(self, toy):
        noises = [Elbo(1, "coupled"), Elbo(2), Elbo(2, "iid"), Elbo(1, "iid")]
        deviations = [estimates(noise, *toy).std() for noise in noises]
        assert deviations == sorted(deviations)
        assert deviations[3] / deviations[2] == pytest.approx(2**0.5, rel=0.1)

    def test_one_step_is_exact_for_a_decoder_of_one_step(self, model, trace):
        """And for no other: it has no states between the first and the last."""
        at_once = replace(trace, reveal_step=np.zeros_like(trace.reveal_step), steps_per_block=[1, 1])
        assert max(trace.steps_per_block) > 1
        with torch.no_grad():
            mean_field = value_of(model, OneStep().states(trace, M), trace, M)
            (exact,), (parallel,) = (replay_logprobs(model, [t], M) for t in (trace, at_once))
        torch.testing.assert_close(mean_field, parallel, atol=2e-5, rtol=0)
        assert (mean_field - exact).abs().max() > 0.1


class TestStates:
    def test_all_masks_have_the_weights_of_the_expectation(self):
        """For two free positions: {0}, {1} with 1/2 * 1/2 * 2/1 = 1/2 each, {0, 1} with 1/2 * 2/2 = 1/2."""
        trace = hand_made_trace([7, 8], [3, 4], [0, 0], 4)
        states = Elbo(noise="all").states(trace, M)
        assert [s.ids.tolist() for s in states.sample.slices] == [[7, 8, M, 4], [7, 8, 3, M], [7, 8, M, M]]
        assert states.weights.tolist() == [0.5] * 4

    @pytest.mark.parametrize("likelihood", [Elbo(2), Elbo(2, "iid"), Elbo(2, "coupled"), Elbo(noise="all")])
    def test_weights_of_a_token_are_one_on_average(self, likelihood):
        trace = hand_made_trace(random_prompt(5), random_prompt(11, 1), [0] * 11, 8)
        generator, total = np.random.default_rng(0), np.zeros(11)
        draws = 1 if likelihood.noise == "all" else 1000
        for _ in range(draws):
            states = likelihood.states(trace, M, generator)
            index = np.concatenate([s.token_index for s in states.sample.slices])
            np.add.at(total, index, states.weights)
        assert total / draws == pytest.approx(np.ones(11), abs=1e-5 if draws == 1 else 0.25)

    def test_only_hidden_tokens_are_targets_and_prompt_tokens_are_given(self):
        trace = hand_made_trace(random_prompt(5), random_prompt(11, 1), [0] * 11, 8)
        ids = np.concatenate([trace.prompt_ids, trace.replay_ids])
        for likelihood in (Elbo(3), Elbo(2, "coupled"), OneStep(), Coupled()):
            states = likelihood.states(trace, M)
            assert np.array_equal(states.sample.clean, ids[:8])
            for piece in states.sample.slices:
                hidden = np.flatnonzero(piece.ids == M)
                assert np.array_equal(hidden, piece.columns) and len(hidden)
                assert np.array_equal(piece.tokens, trace.replay_ids[piece.token_index])
                shown = np.setdiff1d(np.arange(8), hidden)
                assert np.array_equal(piece.ids[shown], ids[piece.start + shown])

    def test_positions_that_were_never_filled_stay_masked(self):
        trace = hand_made_trace([7, 8], [3, M], [0, -1], 4)
        for likelihood in (Elbo(2), OneStep(), Coupled()):
            for piece in likelihood.states(trace, M).sample.slices:
                assert piece.columns.tolist() == [2] and piece.ids.tolist() == [7, 8, M, M]

    def test_final_tokens_are_enough(self, trace):
        blind = replace(trace, reveal_step=np.zeros_like(trace.reveal_step), steps_per_block=[1, 1])
        for likelihood in (Elbo(2), OneStep(0.15), Coupled()):
            first, second = (likelihood.states(t, M) for t in (trace, blind))
            for left, right in zip(first.sample.slices, second.sample.slices, strict=True):
                assert np.array_equal(left.ids, right.ids)
            assert np.array_equal(first.weights, second.weights)

    def test_masks_come_from_the_sample(self, trace):
        """Old and new policy see the same masks; another response sees others."""
        ids = lambda t: np.concatenate([s.ids for s in Elbo(4).states(t, M).sample.slices])
        assert np.array_equal(ids(trace), ids(trace))
        other = replace(trace, replay_ids=np.roll(trace.replay_ids, 1))
        hidden = lambda t: ids(t) == M
        assert not np.array_equal(hidden(trace), hidden(other))
        draws = [content_generator(trace, purpose).random() for purpose in ("elbo", "elbo", "keep")]
        assert draws[0] == draws[1] != draws[2]

    def test_a_coupled_mask_and_its_complement_cover_a_block_once(self):
        free = np.asarray([2, 3, 5, 7])
        for seed in range(20):
            (full, first), *pairs = coupled_masks(free, 3, np.random.default_rng(seed))
            assert full.tolist() == free.tolist() and first == 1 / 4
            for (hidden, weight), (rest, other) in zip(pairs[::2], pairs[1::2], strict=True):
                assert sorted([*hidden, *rest]) == free.tolist()
                assert (weight, other) == (3 / (2 * len(hidden) * 3), 3 / (2 * len(rest) * 3))

    def test_coupled_grpo(self):
        """(full + weighted half) / 2 with the weights 1 / t and 1 / (1 - t)."""
        trace = hand_made_trace([], random_prompt(8, 1), [0] * 8, 8)
        states = Coupled(0.4, 0.4).states(trace, M)
        full, *rest = states.sample.slices
        assert len(full.columns) == 8 and sorted(np.concatenate([s.columns for s in rest])) == list(range(8))
        counts = [8, *(len(s.columns) for s in rest)]
        expected = np.repeat([0.5, 0.5 / 0.4, 0.5 / 0.6], counts)
        assert states.weights == pytest.approx(expected)

    def test_one_step_masks_some_of_the_prompt(self):
        trace = hand_made_trace(random_prompt(1003), random_prompt(5, 1), [0] * 5, 16)
        states = OneStep(0.15).states(trace, M)
        masked = states.sample.clean[:992] == M
        assert 0.1 < masked.mean() < 0.2
        (piece,) = states.sample.slices
        assert piece.columns.tolist() == [11, 12, 13, 14, 15]
        given = piece.ids[:11]
        assert ((given == M) | (given == trace.prompt_ids[992:])).all()
        plain = OneStep().states(trace, M)
        assert not (plain.sample.clean == M).any() and not (plain.sample.slices[0].ids[:11] == M).any()

    def test_too_many_states_are_refused(self):
        trace = hand_made_trace([], random_prompt(16, 1), [0] * 16, 16)
        with pytest.raises(ConfigError, match=r"would enumerate 2\^16 states .*; it is for blocks of at most 12"):
            Elbo(noise="all").states(trace, M)


class TestCombining:
    """Several samples and several targets per token in one packed batch."""

    @pytest.fixture(scope="class")
    def traces(self):
        return [
            hand_made_trace(random_prompt(6, 1), random_prompt(10, 2), [0] * 10, 4),
            hand_made_trace(random_prompt(3, 3), random_prompt(5, 4), [0] * 5, 4),
            hand_made_trace(random_prompt(6, 1), random_prompt(10, 5), [0] * 10, 4),
        ]

    def test_a_batch_gives_the_values_of_its_samples(self, model, traces):
        states = [Elbo(3).states(t, M) for t in traces]
        lengths = [len(t.replay_ids) for t in traces]
        batch, weights = pack_states(states, 4, "cpu")
        head = target_head(batch, sampling_batch([SamplingParams()] * 3), M)
        with torch.no_grad():
            values = model(batch.input_ids, batch.position, dense_attention(batch), head).logprob
            together = token_sums(batch, weights * values, lengths)
            for trace, state, got in zip(traces, states, together, strict=True):
                torch.testing.assert_close(got, value_of(model, state, trace, M), atol=2e-5, rtol=0)

    def test_weights_follow_their_targets_through_packing(self, traces):
        """A weight that names its token comes back at that token."""
        states = [Elbo(3).states(t, M) for t in traces]
        for index, state in enumerate(states):
            where = np.concatenate([s.token_index for s in state.sample.slices])
            state.weights = (100 * index + where).astype(np.float32)
        batch, weights = pack_states(states[::-1], 4, "cpu")
        assert torch.equal(weights, (100 * (2 - batch.target_sample) + batch.target_index).float())

    def test_pieces_add_up_to_the_whole(self, model, traces):
        trace, states = traces[0], Elbo(4).states(traces[0], M)
        pieces = split(states, 24)
        assert len(pieces) > 2 and all(p.sample.packed_length <= 24 for p in pieces)
        assert sum(len(p.sample.slices) for p in pieces) == len(states.sample.slices)

        def gradients(parts):
            model.zero_grad()
            total = 0.0
            for part in parts:
                value = value_of(model, part, trace, M).sum()
                value.backward()
                total += value.item()
            return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

        (whole, expected), (added, got) = gradients([states]), gradients(pieces)
        assert added == pytest.approx(whole, abs=1e-4)
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], grad, atol=2e-4, rtol=2e-4)
        model.zero_grad()

    def test_pieces_in_one_batch_belong_to_one_sample(self, model, traces):
        states = [Elbo(4).states(t, M) for t in traces[:2]]
        pieces = [split(s, 24) for s in states]
        owners = [i for i, parts in enumerate(pieces) for _ in parts]
        batch, weights = pack_states([p for parts in pieces for p in parts], 4, "cpu", owners)
        head = target_head(batch, sampling_batch([SamplingParams()] * 2), M)
        with torch.no_grad():
            values = model(batch.input_ids, batch.position, dense_attention(batch), head).logprob
            got = token_sums(batch, weights * values, [10, 5])
            for trace, state, value in zip(traces, states, got, strict=False):
                torch.testing.assert_close(value, value_of(model, state, trace, M), atol=2e-5, rtol=0)

    def test_a_slice_that_does_not_fit_is_a_piece(self, traces):
        states = Elbo(1).states(traces[0], M)
        assert len(split(states, 1)) == len(states.sample.slices)
        assert len(split(states, 10**6)) == 1

    def test_shares_give_means(self, traces):
        states = Elbo(3).states(traces[0], M)
        batch, _ = pack_states([states], 4, "cpu")
        share = target_shares(batch, [10])
        scored = token_sums(batch, share, [10])[0]
        masked = set(np.concatenate([s.token_index for s in states.sample.slices]).tolist())
        assert scored.tolist() == pytest.approx([1.0 if i in masked else 0.0 for i in range(10)])

    def test_exact_is_the_replay(self, model, trace):
        """Every token is scored once, with weight 1, in the state it was drawn in."""
        value = value_of(model, Exact().states(trace, M), trace, M)
        (replayed,) = replay_logprobs(model, [trace], M)
        assert torch.equal(value, replayed)


class TestBounds:
    def bounds(self, model, trace, likelihood, beta):
        states = likelihood.states(trace, M)
        batch, weights = pack_states([states], trace.block_size, "cpu")
        head = target_head(batch, sampling_batch(SamplingParams()), M)
        logprob = model(batch.input_ids, batch.position, dense_attention(batch), head).logprob
        lengths = [len(trace.replay_ids)]
        return token_sums(batch, weights * logprob, lengths)[0], upper_bounds(batch, logprob, weights, lengths, beta)[0]

    @pytest.mark.parametrize("beta", [1.0, 1.5, 3.0])
    def test_the_upper_bound_is_above_the_elbo(self, model, trace, beta):
        lower, upper = self.bounds(model, trace, Elbo(noise="all"), beta)
        assert (upper >= lower - 1e-5).all() and (upper - lower).sum() > 0.1

    def test_against_the_formula(self, model, trace):
        """Two states of one token: log(w1 p1^beta + w2 p2^beta) / beta."""
        states = Elbo(2, "coupled").states(trace, M)
        batch, weights = pack_states([states], SIZE, "cpu")
        logprob = -torch.rand(len(weights), generator=torch.Generator().manual_seed(0)) * 5
        (upper,) = upper_bounds(batch, logprob, weights, [len(trace.replay_ids)], 1.5)
        for token in range(len(trace.replay_ids)):
            chosen = batch.target_index == token
            expected = (weights[chosen] * logprob[chosen].exp() ** 1.5).sum().log() / 1.5
            assert float(upper[token]) == pytest.approx(float(expected), abs=1e-5)

    def test_gradients_are_finite_where_nothing_is_masked(self, model):
        trace = hand_made_trace(random_prompt(4), random_prompt(12, 1), [0] * 12, 4)
        lower, upper = self.bounds(model, trace, Elbo(1), 1.5)
        assert (lower == 0).any() and ((upper == 0) == (lower == 0)).all()
        upper.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        model.zero_grad()

    def test_sandwich(self):
        lower, upper = torch.tensor([-3.0, -3.0]), torch.tensor([-1.0, -1.0])
        assert sandwich(lower, upper, torch.tensor([1.0, -1.0]), 0.25).tolist() == [-3.0, -2.5]

    def test_sequence_ratios(self):
        new, old = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -2.25, 0.0]])
        mask = torch.tensor([[1, 1, 0]])
        assert sequence_log_ratio(new, old, mask, per_token=False).tolist() == [0.75]
        assert sequence_log_ratio(new, old, mask, per_token=True).tolist() == [0.375]


class TestCost:
    """LLaDA2-mini's example: P = 256, R = 2048, B = 32."""

    @pytest.mark.parametrize(
        ("likelihood", "multiple"),
        [(OneStep(), 1.875), (Elbo(2), 2.764), (Elbo(1, "coupled"), 3.653), (Elbo(16), 15.208)],
        ids=["one_step", "stratified-2", "coupled-1", "stratified-16"],
    )
    def test_clean_tokens_and_copies(self, likelihood, multiple):
        """N - B clean tokens and one copy of the response per state: 2272 + n * 2048 tokens."""
        trace = hand_made_trace(random_prompt(256), random_prompt(2048, 1), [0] * 2048, 32)
        tokens, got = forward_tokens([likelihood.states(trace, M)], 2304)
        assert got == pytest.approx(multiple, abs=1e-3) and tokens == round(got * 2304)

    def test_exact_has_a_copy_per_step(self):
        steps = np.tile(np.arange(32) % 13, 64)
        trace = hand_made_trace(random_prompt(256), random_prompt(2048, 1), steps, 32)
        tokens, multiple = forward_tokens([Exact().states(trace, M)], 2304)
        assert tokens == 2272 + 13 * 2048 and multiple == pytest.approx(12.5, abs=0.1)


class TestNames:
    def test_defaults(self):
        assert make_likelihood("exact") == Exact() and make_likelihood("elbo") == Elbo()
        assert make_likelihood("elbo", {"samples": 4, "noise": "coupled", "beta": 2}) == Elbo(4, "coupled", 2.0)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            (
                "guess",
                {},
                r"dllm.likelihood='guess' does not exist; use one of \['coupled', 'elbo', 'exact', ",
            ),
            ("elbo", {"sample": 1}, r"'sample' is not an option of elbo; valid keys are \['beta', 'mix', 'noise', "),
            ("elbo", {"samples": 1.5}, "samples=1.5 has the wrong type; expected int"),
            ("elbo", {"samples": True}, "samples=True has the wrong type; expected int"),
            ("elbo", {"samples": 0}, "samples=0 is below 1; use 2 or more"),
            ("elbo", {"noise": "white"}, r"noise='white' does not exist; use one of \['stratified', "),
            ("elbo", {"beta": 0.5}, "beta=0.5 is below 1; SPG uses 1.5"),
            ("elbo", {"mix": 2.0}, r"mix=2.0 is not in \[0, 1\]"),
            ("one_step", {"prompt_mask": 1}, r"prompt_mask=1.0 is not in \[0, 1\); d1 uses 0.15"),
            ("coupled", {"low": 0.9}, r"low=0.9, high=0.8 are not ordered within \(0, 1\)"),
            ("exact", {"keep": 0}, r"keep=0.0 is not in \(0, 1\]; use 1 to score every state"),
            ("exact", {"keep": 0.05}, r"keep_floor=0.1 is not in \(0, keep=0.05\]"),
        ],
    )
    def test_refusals(self, name, options, message):
        with pytest.raises(ConfigError, match=message):
            make_likelihood(name, options)
