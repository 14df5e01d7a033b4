"""Decoders as distributions over trajectories, on tables small enough to enumerate.

Every decoder registered in ``EXACT`` must pass ``TestDistribution``: one trajectory per sequence, probabilities that
sum to one, sampling that follows them, and a score function that is the gradient. A decoder whose choice of positions
is random (sample-then-select) joins with an enumeration of its own, which has to count that choice.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from dllm.config import ConfigError
from dllm.decoding import DECODERS, BlockBatch, Decoder, SamplingParams, decoder_class, make_decoder
from dllm.decoding.sampling import sampling_logprobs
from tests.support import sampling_batch

TOKENS, MASK = 3, 3
LOW = -1e4
Table = Callable[[tuple[int, ...]], Tensor]
"""State of a block (``MASK`` where hidden) -> logits [B, TOKENS + 1]."""

EXACT = ("SelectThenSample",)


def table_of(parameters: dict[tuple[int, ...], Tensor], size: int, seed: int, mask_logit: float = LOW) -> Table:
    """A random table that fills itself in, so that a test can differentiate the entries that were used."""

    def logits(state: tuple[int, ...]) -> Tensor:
        if state not in parameters:
            generator = torch.Generator().manual_seed(hash((seed, state)) & 0xFFFFFFFF)
            values = torch.randn(size, TOKENS, generator=generator) * 1.5
            parameters[state] = values.requires_grad_()
        return torch.cat([parameters[state], torch.full((size, 1), mask_logit)], 1)

    return logits


def fixed(probabilities: list[list[float]]) -> Table:
    """The same distributions in every state."""
    rows = torch.tensor(probabilities).log()
    return lambda state: torch.cat([rows, torch.full((len(rows), 1), LOW)], 1)


def block(states: list[tuple[int, ...]], step: int, params: SamplingParams, seeds: range | None = None) -> BlockBatch:
    ids = torch.tensor(states)
    rows = len(states)
    nothing = torch.zeros(rows, dtype=torch.int64)
    sampling = sampling_batch(params, rows)
    if seeds is not None:
        sampling.seed = torch.tensor(list(seeds))
    return BlockBatch(ids, torch.zeros_like(ids, dtype=torch.bool), nothing, nothing + step, nothing, sampling)


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


def decode(
    decoder: Decoder, table: Table, size: int, params: SamplingParams, seeds: range
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Decode one block per seed; yields the final block and the sum of the logged log-probs."""
    states, sums = [(MASK,) * size] * len(seeds), torch.zeros(len(seeds))
    for step in range(size):
        logits = torch.stack([table(state) for state in states]).detach()
        result = decoder.step(block(states, step, params, seeds), logits)
        sums += (result.logprob * result.revealed).sum(1)
        states = [tuple(row) for row in result.ids.tolist()]
    assert all(MASK not in state for state in states)
    yield from zip(states, sums.tolist(), strict=True)


SEQUENCES = list(itertools.product(range(TOKENS), repeat=3))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("threshold", [0.9, 0.6, 0.4])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 0.95)], ids=["plain", "filtered"])
class TestDistribution:
    def test_trajectories_sum_to_one(self, name, threshold, params):
        decoder, table = make_decoder(name, MASK, {"threshold": threshold}), table_of({}, 3, seed=1)
        with torch.no_grad():
            probabilities = [float(trajectory(decoder, table, y, params)[0].exp()) for y in SEQUENCES]
        assert len(probabilities) == 27
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)

    def test_sampling_follows_the_trajectory_probabilities(self, name, threshold, params):
        decoder, table = make_decoder(name, MASK, {"threshold": threshold}), table_of({}, 3, seed=1)
        count = 4000
        samples = list(decode(decoder, table, 3, params, range(count)))
        with torch.no_grad():
            exact = {y: float(trajectory(decoder, table, y, params)[0]) for y in SEQUENCES}
        for final, logged in samples:
            assert logged == pytest.approx(exact[final], abs=1e-5), "the log is the trajectory log-prob"
        seen = Counter(final for final, _ in samples)
        likely = [y for y in SEQUENCES if math.exp(exact[y]) * count >= 5]
        statistic = sum((seen[y] - count * math.exp(exact[y])) ** 2 / (count * math.exp(exact[y])) for y in likely)
        assert statistic < 54.1, "chi-square with at most 26 degrees of freedom, 0.1 % level"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("threshold", [0.9, 0.6])
def test_score_function_is_the_gradient(name, threshold):
    """E[grad log p] = 0, and E[R grad log p] equals the finite difference of J = E[R] in a random direction."""
    parameters: dict[tuple[int, ...], Tensor] = {}
    decoder, table = make_decoder(name, MASK, {"threshold": threshold}), table_of(parameters, 3, seed=2)
    rewards = dict(zip(SEQUENCES, np.random.default_rng(0).standard_normal(27).tolist(), strict=True))

    def objective() -> Tensor:
        return sum(trajectory(decoder, table, y, SamplingParams())[0].exp() * rewards[y] for y in SEQUENCES)

    objective()
    states = list(parameters)
    generator = torch.Generator().manual_seed(0)
    direction = {s: torch.randn(parameters[s].shape, generator=generator) for s in states}
    score, mean_score = 0.0, 0.0
    for y in SEQUENCES:
        for parameter in parameters.values():
            parameter.grad = None
        logp, _ = trajectory(decoder, table, y, SamplingParams())
        logp.backward()
        along = sum(float((parameters[s].grad * direction[s]).sum()) for s in states if parameters[s].grad is not None)
        probability = float(logp.detach().exp())
        score += probability * rewards[y] * along
        mean_score += probability * along

    step, values = 1e-2, []
    with torch.no_grad():
        for sign in (1, -2):
            for s in states:
                parameters[s] += sign * step * direction[s]
            values.append(float(objective()))
    difference = (values[0] - values[1]) / (2 * step)
    assert abs(mean_score) < 1e-5
    assert score == pytest.approx(difference, abs=2e-4)
    assert abs(difference) > 1e-2


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
        ],
    )
    def test_refusals(self, name, options, message):
        with pytest.raises(ConfigError, match=message):
            make_decoder(name, MASK, options)
