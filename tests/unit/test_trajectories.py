"""Every decoder is a distribution over trajectories, and the trainer's replay is its log-prob.

On tables of B = 3 positions and V = 3 tokens all trajectories are enumerated. Their probabilities must add up to one,
the replay must give the logged log-probs, the score function must have mean zero, and its product with a reward must be
the derivative of the expected reward. The sum of token log-probs of sample-then-select must fail all of that.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dllm.config import ConfigError
from dllm.decoding import Decoder, SamplingParams, make_decoder
from dllm.trace import RolloutTrace
from tests.examples import third_party_decoder
from tests.unit.enumeration import (
    MASK,
    TOKENS,
    State,
    Table,
    actions,
    block,
    fixed,
    logged,
    replayed,
    table_of,
    target_values,
    trajectories,
)

SIZE = 3
SEQUENCES = list(itertools.product(range(TOKENS), repeat=SIZE))
FILTERED = SamplingParams(0.7, 0.95)

DETERMINISTIC: dict[str, tuple[str, dict[str, Any]]] = {
    "SelectThenSample .9": ("SelectThenSample", {"threshold": 0.9}),
    "SelectThenSample .5": ("SelectThenSample", {"threshold": 0.5}),
    "StaticSteps 1": ("StaticSteps", {"tokens_per_step": 1}),
    "StaticSteps 2": ("StaticSteps", {"tokens_per_step": 2}),
    "EntropyBound": ("EntropyBound", {"gamma": 0.7}),
    "Margin": ("Margin", {"threshold": 0.4}),
    "FastDLLMv2": ("FastDLLMv2", {"threshold": 0.5, "sub_block_size": 2}),
}
"""Positions are a function of the state: one trajectory per sequence."""

RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    f"SampleThenSelect {threshold} {count}": ("SampleThenSelect", {"threshold": threshold, "tokens_per_step": count})
    for threshold in (0.9, 0.6, 0.4)
    for count in (1, 2)
}

EDITING: dict[str, tuple[str, dict[str, Any]]] = {
    f"JointThreshold {edit}": ("JointThreshold", {"threshold": 0.5, "edit_threshold": edit}) for edit in (0.0, 0.5, 0.8)
}

ALL = DETERMINISTIC | RANDOM | EDITING


def by_name(name: str) -> Decoder:
    algorithm, options = ALL[name]
    return make_decoder(algorithm, MASK, options)


@pytest.mark.parametrize("params", [SamplingParams(), FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("name", ALL)
def test_trajectories_are_a_distribution_and_the_replay_is_its_log(name, params):
    decoder, table = by_name(name), table_of({}, SIZE, seed=1)
    traces = trajectories(decoder, table, SIZE, params)
    assert np.exp(logged(traces)).sum() == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(replayed(traces, table).numpy(), logged(traces), atol=2e-5)
    finals = Counter(tuple(t.replay_ids.tolist()) for t in traces)
    if params.filtered:
        return
    assert (len(traces) == len(finals) == 27) == (name in DETERMINISTIC)
    if name in RANDOM:
        assert len(finals) == 27 < len(traces), "a sequence has many trajectories"
    if name in EDITING:
        assert any(t.edits for t in traces)
        assert any(t.steps_per_block[0] > t.reveal_step.max() + 1 for t in traces), "some steps only edit"


@pytest.mark.parametrize(
    "name", ["SelectThenSample .5", "EntropyBound", "SampleThenSelect 0.6 2", "JointThreshold 0.5"]
)
def test_sampling_follows_the_enumerated_probabilities(name):
    decoder, table, count = by_name(name), table_of({}, SIZE, seed=1), 4000
    states, done = [(MASK,) * SIZE] * count, torch.zeros(count, dtype=torch.bool)
    counter = torch.zeros(count, dtype=torch.int64)
    for step in range(decoder.max_steps(SIZE)):
        rows = {state: table(state).detach() for state in set(states)}
        logits = torch.stack([rows[state] for state in states])
        blocks = block(states, step, SamplingParams(), range(count))
        blocks.counter = counter
        result = decoder.step(blocks, logits)
        states, done, counter = [tuple(row) for row in result.ids.tolist()], result.done, result.counter
    assert done.all()
    expected: dict[State, float] = defaultdict(float)
    traces = trajectories(decoder, table, SIZE)
    for trace, logp in zip(traces, logged(traces), strict=True):
        expected[tuple(trace.replay_ids.tolist())] += count * math.exp(logp)
    seen = Counter(states)
    assert seen.keys() <= expected.keys()
    statistic = sum((seen[y] - e) ** 2 / e for y, e in expected.items() if e >= 5)
    assert statistic < 54.1, "chi-square with at most 26 degrees of freedom, 0.1 % level"


class Gradients:
    """Derivatives along one random direction of all entries of a table."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.decoder, self.parameters = decoder, {}
        self.table: Table = table_of(self.parameters, SIZE, seed)
        self.traces = trajectories(decoder, self.table, SIZE)
        self.draw_rewards(0)
        generator = torch.Generator().manual_seed(0)
        # States in an order that does not depend on the table.
        self.states = sorted(self.parameters)
        self.direction = {s: torch.randn(SIZE, TOKENS, generator=generator) for s in self.states}

    def draw_rewards(self, seed: int) -> None:
        values = np.random.default_rng(seed).standard_normal(27).tolist()
        self.rewards = dict(zip(SEQUENCES, values, strict=True))

    def reward(self, trace: RolloutTrace) -> float:
        return self.rewards[tuple(trace.replay_ids.tolist())]

    def along(self, value: Tensor) -> float:
        for parameter in self.parameters.values():
            parameter.grad = None
        value.backward()
        grads = ((self.parameters[s].grad, self.direction[s]) for s in self.states)
        return sum(float((grad * direction).sum()) for grad, direction in grads if grad is not None)

    def scores(self, tokens_only: bool = False) -> tuple[float, float]:
        """E[grad log p] and E[R grad log p], with the true probabilities of the trajectories."""
        probability = torch.from_numpy(np.exp(logged(self.traces))).float()
        reward = torch.tensor([self.reward(t) for t in self.traces])
        value = lambda weight: (weight * replayed(self.traces, self.table, tokens_only)).sum()
        return self.along(value(probability)), self.along(value(probability * reward))

    def difference(self, step: float = 1e-3) -> float:
        """Derivative of E[R], trajectories and probabilities enumerated anew on either side."""
        values = []
        with torch.no_grad():
            for sign in (1, -2, 1):
                for s in self.states:
                    self.parameters[s] += sign * step * self.direction[s]
                traces = trajectories(self.decoder, self.table, SIZE)
                values.append(float(np.exp(logged(traces)) @ np.asarray([self.reward(t) for t in traces])))
        return (values[0] - values[1]) / (2 * step)


@pytest.mark.parametrize("name", ALL)
def test_score_function_is_the_gradient(name):
    """E[grad log p] = 0, and E[R grad log p] equals the finite difference of E[R]; log p is the trainer's."""
    gradients = Gradients(by_name(name), seed=2)
    mean, score = gradients.scores()
    difference = gradients.difference()
    assert abs(mean) < 1e-5
    assert score == pytest.approx(difference, abs=3e-4)
    assert abs(difference) > 1e-2


@pytest.mark.parametrize("name", RANDOM)
def test_the_token_sum_of_sample_then_select_is_no_log_prob(name):
    """Without the choice of positions: the sum is more than 1, the score has a mean, the gradient is off."""
    gradients = Gradients(by_name(name), seed=2)
    with torch.no_grad():
        total = float(replayed(gradients.traces, gradients.table, tokens_only=True).exp().sum())
    assert total > 1.5
    errors = []
    for seed in range(5):
        gradients.draw_rewards(seed)
        mean, score = gradients.scores(tokens_only=True)
        errors.append(abs(score - gradients.scores()[1]))
    assert abs(mean) > 1e-2 and max(errors) > 5e-2


class TestOneStepOfSampleThenSelect:
    """Two hidden positions with p = (.92, .05, .03) and (.60, .30, .10), threshold 0.9."""

    table = staticmethod(fixed([[0.92, 0.05, 0.03], [0.60, 0.30, 0.10]]))

    def test_outcomes(self):
        made = actions(make_decoder("SampleThenSelect", MASK, {"threshold": 0.9}), self.table, (MASK, MASK), 0, PLAIN)
        found = {a.revealed: math.exp(a.logprob) for a in made}
        expected = {((0, 0),): 0.92, ((1, 0),): 0.048, ((1, 1),): 0.024, ((1, 2),): 0.008}
        assert found == pytest.approx(expected, abs=1e-6)
        second = next(a for a in made if a.revealed == ((1, 0),))
        assert second.logged["logprob"] == pytest.approx([math.log(0.6)]) and second.logprob == pytest.approx(
            -3.037, abs=1e-3
        )

    def test_two_tokens_per_step_take_both(self):
        options = {"threshold": 0.9, "tokens_per_step": 2}
        made = actions(make_decoder("SampleThenSelect", MASK, options), self.table, (MASK, MASK), 0, PLAIN)
        assert len(made) == 9 and all(a.logged["select_logprob"] == 0 for a in made)


PLAIN = SamplingParams()


@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.9, 0.6, 0.4, 0.2])
def test_closed_form_equals_brute_force(threshold, count, params):
    """Random states of four positions: each outcome against the sum over all draws that lead to it."""
    decoder = make_decoder("SampleThenSelect", MASK, {"threshold": threshold, "tokens_per_step": count})
    branches = set()
    for seed in range(5):
        hidden = np.random.default_rng(seed).random(4) < 0.8
        state = tuple(MASK if h else 1 for h in hidden)
        if MASK not in state:
            continue
        made = actions(decoder, table_of({}, 4, seed, scale=2.0), state, 0, params)
        for action in made:
            assert math.exp(action.logprob) == pytest.approx(action.brute_force, abs=2e-7)
            worst = min(math.exp(v) for v in action.logged["logprob"])
            branches.add(decoder.selection.reached(len(action.revealed), int(hidden.sum()), worst))
        assert sum(a.brute_force for a in made) == pytest.approx(1, abs=1e-6)
    assert branches == {True, False} or (count == 3 and threshold > 0.5), "three draws above it are rare"


def test_equal_probabilities_are_ordered_by_position():
    """A symmetric table: every draw has a twin of the same probability."""
    decoder, table = make_decoder("SampleThenSelect", MASK, {"threshold": 0.9}), fixed([[0.5, 0.3, 0.2]] * 3)
    traces = trajectories(decoder, table, 3)
    assert np.exp(logged(traces)).sum() == pytest.approx(1, abs=1e-5)
    for action in actions(decoder, table, (MASK,) * 3, 0, PLAIN):
        assert math.exp(action.logprob) == pytest.approx(action.brute_force, abs=1e-6)
    np.testing.assert_allclose(replayed(traces, table).numpy(), logged(traces), atol=2e-5)


def test_nearly_certain_losers_keep_their_digits():
    """1 - A of 1e-7, where the complement of the sum in fp32 would be 0 or off by a factor."""
    certain = [1 - 1e-7, 5e-8, 5e-8]
    table = fixed([[0.5, 0.3, 0.2], certain])
    decoder = make_decoder("SampleThenSelect", MASK, {"threshold": 0.4})
    made = actions(decoder, table, (MASK, MASK), 0, PLAIN)
    (found,) = [a for a in made if a.revealed == ((0, 0),)]
    assert found.logged["select_logprob"] == pytest.approx(math.log(1e-7), abs=0.1)


def test_a_position_that_could_not_lose_has_a_finite_log_prob_and_gradient():
    """Weights moved after the rollout: every token of the rest is above the threshold now."""
    parameters: dict[State, Tensor] = {}
    decoder = make_decoder("SampleThenSelect", MASK, {"threshold": 0.3})
    traces = trajectories(decoder, table_of(parameters, SIZE, seed=1), SIZE)
    flat: dict[State, Tensor] = {s: torch.zeros(SIZE, TOKENS, requires_grad=True) for s in parameters}
    table = table_of(flat, SIZE, seed=1)
    batch, values = target_values(traces, table)
    assert batch.rest is not None and (batch.rest.threshold > 0).any()
    assert values.select.isfinite().all()
    values.select.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in flat.values())


def test_greedy_requests_choose_without_chance():
    decoder, table = make_decoder("SampleThenSelect", MASK, {"threshold": 0.6}), table_of({}, SIZE, seed=3)
    result = decoder.step(block([(MASK,) * SIZE], 0, SamplingParams(0)), table((MASK,) * SIZE)[None].detach())
    assert not result.logprob.any() and not result.select_logprob.any() and result.revealed.any()
    best = table((MASK,) * SIZE).argmax(-1)
    assert torch.equal(result.ids[0][result.revealed[0]], best[result.revealed[0]])


class TestJointThreshold:
    """Sampled tokens, edited by argmax."""

    def test_many_trajectories_share_a_final_sequence(self):
        table = table_of({}, SIZE, seed=1)
        counts = {}
        for edit in (0.0, 0.9, 1.0):
            decoder = make_decoder("JointThreshold", MASK, {"threshold": 0.5, "edit_threshold": edit})
            traces = trajectories(decoder, table, SIZE)
            assert len(traces) == 27, "draws decide everything"
            counts[edit] = len({tuple(t.replay_ids.tolist()) for t in traces})
        assert counts[0.0] < counts[0.9] <= counts[1.0] == 27, "a high edit threshold keeps what sampling explored"

    def test_an_edit_takes_part_in_the_next_state_only(self):
        """Step 0 draws position 0; step 1 draws 1 and replaces 0: the second state still shows the old token."""
        parameters: dict[State, Tensor] = {}
        sure = lambda *tokens: 9.0 * torch.nn.functional.one_hot(torch.tensor(tokens), TOKENS).float()
        parameters[MASK, MASK, MASK] = torch.tensor([[4.0, 0, 0], [0.1, 0, 0], [0.1, 0, 0]])
        parameters[1, MASK, MASK] = torch.stack([sure(2)[0], sure(1)[0], torch.zeros(TOKENS)])
        parameters[2, 1, MASK] = sure(2, 1, 0)
        parameters[2, 1, 0] = sure(2, 1, 0)
        decoder = make_decoder("JointThreshold", MASK, {"threshold": 0.5, "edit_threshold": 0.9})
        traces = trajectories(decoder, table_of(parameters, SIZE, seed=1), SIZE)
        (trace,) = [t for t in traces if t.drawn_ids.tolist() == [1, 1, 0] and t.reveal_step.tolist() == [0, 1, 2]]
        assert trace.edits == [(0, 1, 0, 1, 2)] and trace.replay_ids.tolist() == [2, 1, 0]
        batch, _ = target_values([trace], table_of(parameters, SIZE, seed=1))
        assert batch.input_ids.view(-1, SIZE).tolist() == [[MASK] * 3, [1, MASK, MASK], [2, 1, MASK]]
        assert batch.target_token.tolist() == [1, 1, 0]

    def test_the_edit_budget_ends_a_block(self):
        """The table wants another token wherever one is: without a budget it would edit for ever."""
        want = {}
        for state in itertools.product(range(TOKENS + 1), repeat=2):
            rows = [[9.0 if t == (s + 1) % TOKENS else 0.0 for t in range(TOKENS)] for s in state]
            want[state] = torch.tensor(rows)
        for budget in (0, 1, 3):
            options = {"threshold": 0.5, "edit_threshold": 0.5, "max_post_edit_steps": budget}
            traces = trajectories(make_decoder("JointThreshold", MASK, options), table_of(want, 2, seed=0), 2)
            for trace in traces:
                assert trace.steps_per_block[0] == int(trace.reveal_step.max()) + 1 + budget

    def test_the_prompt_is_not_edited(self):
        logits = torch.full((1, SIZE, TOKENS + 1), LOW_LOGIT)
        logits[..., 2] = 9.0
        state = block([(0, 1, MASK)], 0, PLAIN)
        state.given[0, 0] = True
        result = make_decoder("JointThreshold", MASK).step(state, logits)
        assert result.ids.tolist() == [[0, 2, 2]] and result.revealed.tolist() == [[False, False, True]]


LOW_LOGIT = -9.0


@pytest.mark.parametrize("name", [*DETERMINISTIC, "JointThreshold 0.5"])
def test_positions_do_not_depend_on_the_draws(name):
    """What select-then-sample means: all combinations of draws reveal the same positions."""
    decoder, table = by_name(name), table_of({}, SIZE, seed=4)
    for state in itertools.product(range(TOKENS + 1), repeat=SIZE):
        if MASK in state:
            made = actions(decoder, table, state, 0, PLAIN)
            assert len({tuple(i for i, _ in action.revealed) for action in made}) == 1
            for action in made:
                assert math.exp(action.logprob) == pytest.approx(action.brute_force, abs=1e-6)


class TestPositions:
    """The rule of each decoder, on one step whose answer can be seen."""

    table = staticmethod(fixed([[0.5, 0.45, 0.05], [0.46, 0.27, 0.27], [0.9, 0.05, 0.05], [0.6, 0.2, 0.2]]))

    @pytest.mark.parametrize(
        ("name", "options", "expected"),
        [
            ("StaticSteps", {"tokens_per_step": 1}, [2]),
            ("StaticSteps", {"tokens_per_step": 3}, [0, 2, 3]),
            # Entropies in nats: .855, 1.064, .394, .950.
            ("EntropyBound", {"gamma": 0.0}, [2]),
            ("EntropyBound", {"gamma": 0.4}, [0, 2]),
            ("EntropyBound", {"gamma": 1.3}, [0, 2, 3]),
            ("EntropyBound", {"gamma": 9.0}, [0, 1, 2, 3]),
            # Margins: .05, .19, .85, .4.
            ("Margin", {"threshold": 0.9}, [2]),
            ("Margin", {"threshold": 0.15}, [1, 2, 3]),
            ("FastDLLMv2", {"threshold": 0.95, "sub_block_size": 2}, [0]),
            ("FastDLLMv2", {"threshold": 0.4, "sub_block_size": 2}, [0, 1]),
            ("FastDLLMv2", {"threshold": 0.4, "sub_block_size": 8}, [0, 1, 2, 3]),
        ],
    )
    def test_which(self, name, options, expected):
        state = block([(MASK,) * 4], 0, PLAIN)
        result = make_decoder(name, MASK, options).step(state, self.table((MASK,) * 4)[None])
        assert result.revealed[0].nonzero()[:, 0].tolist() == expected

    def test_the_next_sub_block_follows(self):
        result = make_decoder("FastDLLMv2", MASK, {"threshold": 0.95, "sub_block_size": 2}).step(
            block([(0, 1, MASK, MASK)], 2, PLAIN), self.table((MASK,) * 4)[None]
        )
        assert result.revealed[0].nonzero()[:, 0].tolist() == [2]


@pytest.fixture
def third_party(tmp_path, monkeypatch) -> str:
    """Name of the decoder that docs/decoders.md shows."""
    monkeypatch.syspath_prepend(tmp_path)
    return third_party_decoder(tmp_path)


class TestTheDecoderOfTheDocumentation:
    def test_it_is_short_and_complete(self, third_party, tmp_path):
        assert len((tmp_path / "left_to_right.py").read_text().splitlines()) <= 30
        decoder = make_decoder(third_party, MASK)
        assert isinstance(decoder, Decoder) and decoder.max_steps(32) == 17
        with pytest.raises(
            ConfigError, match=r"'tokens' is not an option of left_.*; valid keys are \['tokens_per_step'\]"
        ):
            make_decoder(third_party, MASK, {"tokens": 2})
        with pytest.raises(ConfigError, match="tokens_per_step=0 is not positive"):
            make_decoder(third_party, MASK, {"tokens_per_step": 0})

    def test_it_is_a_distribution(self, third_party):
        decoder, table = make_decoder(third_party, MASK), table_of({}, SIZE, seed=1)
        traces = trajectories(decoder, table, SIZE)
        assert len(traces) == 27 and np.exp(logged(traces)).sum() == pytest.approx(1, abs=1e-5)
        assert all(t.reveal_step.tolist() == [0, 0, 1] for t in traces)
        np.testing.assert_allclose(replayed(traces, table).detach().numpy(), logged(traces), atol=2e-5)
