"""The distribution a token is drawn from: filters, temperature, mask rule, greedy, and the draw itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dllm.decoding import SamplingParams, sampling
from dllm.decoding.sampling import draw, drawn_logprob, sampling_logprobs
from tests.support import sampling_batch

OFF = 1 << 20
"""A mask id outside of the vocabulary: nothing is excluded."""


def probabilities(logits: list[float], params: SamplingParams, mask_id: int = OFF) -> list[float]:
    return sampling_logprobs(torch.tensor([logits]), sampling_batch(params), mask_id).exp()[0].tolist()


def oracle(logits: list[float], params: SamplingParams, mask_id: int) -> dict[int, float]:
    """The same distribution, written with lists: top-k, then top-p, then min-p, each on the renormalised rest."""
    weight = {i: math.exp(z / params.temperature) for i, z in enumerate(logits) if i != mask_id}
    kept = sorted(weight, key=lambda i: -weight[i])
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        if params.top_p < 1 and mass >= params.top_p:
            break
        nucleus.append(i)
        mass += weight[i] / total
    total = sum(weight[i] for i in nucleus)
    survivors = [i for i in nucleus if weight[i] / total >= params.min_p * weight[nucleus[0]] / total]
    total = sum(weight[i] for i in survivors)
    return {i: weight[i] / total for i in survivors}


def test_temperature_and_nucleus_figures():
    """Logits (2, 1, 0, -1): the distributions at temperature 1 and 0.6, and the latter with top-p 0.95."""
    logits = [2.0, 1.0, 0.0, -1.0]
    plain = probabilities(logits, SamplingParams())
    assert plain == pytest.approx([0.6439, 0.2369, 0.0871, 0.0321], abs=5e-5)
    assert probabilities(logits, SamplingParams(0.6)) == pytest.approx([0.8122, 0.1534, 0.0290, 0.0055], abs=5e-5)
    cut = probabilities(logits, SamplingParams(0.6, 0.95))
    assert cut == pytest.approx([0.8411, 0.1589, 0, 0], abs=5e-5)
    divergence = sum(p * math.log(p / q) for p, q in zip(cut, plain, strict=True) if p > 0)
    assert divergence == pytest.approx(0.1613, abs=5e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.7),
        SamplingParams(1.3, top_k=5),
        SamplingParams(1.0, top_p=0.8),
        SamplingParams(1.0, min_p=0.2),
        SamplingParams(0.8, 0.9, 6, 0.05),
        SamplingParams(2.0, 0.5, 50, 0.5),
    ],
    ids=str,
)
def test_filters_match_the_written_out_rule(params, seed):
    logits = (np.random.default_rng(seed).standard_normal(20) * 2).tolist()
    expected = oracle(logits, params, mask_id=3)
    got = probabilities(logits, params, mask_id=3)
    assert {i for i, p in enumerate(got) if p > 0} == set(expected)
    assert [got[i] for i in expected] == pytest.approx(list(expected.values()), abs=1e-6)


def test_rows_keep_their_own_parameters():
    """A batch of different requests equals each request alone."""
    rows = [SamplingParams(), SamplingParams(0.5), SamplingParams(1, 0.7), SamplingParams(1, 1, 3), SamplingParams(0)]
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(0))
    together = sampling_logprobs(logits, sampling_batch(rows), 7)
    for i, params in enumerate(rows):
        alone = sampling_logprobs(logits[i : i + 1], sampling_batch(params), 7)
        torch.testing.assert_close(together[i : i + 1], alone)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.5), SamplingParams(1, 0.9, 5), SamplingParams(0)]
)
def test_the_mask_token_has_no_probability_however_likely(params):
    logits = torch.zeros(1, 10)
    logits[0, 4] = 50.0
    logp = sampling_logprobs(logits, sampling_batch(params), 4)
    assert logp[0, 4] == -torch.inf
    assert float(logp.exp().sum()) == pytest.approx(1)


def test_raw_ignores_temperature_and_filters_but_not_the_mask_rule():
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    raw = sampling_logprobs(logits, sampling_batch(SamplingParams(0.3, 0.5, 2)), 4, raw=True)
    torch.testing.assert_close(raw, sampling_logprobs(logits, sampling_batch(SamplingParams()), 4))


def test_a_token_outside_the_support_can_be_forced_into_it():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    params = sampling_batch(SamplingParams(1, 1, 2))
    assert sampling_logprobs(logits, params, OFF)[0, 2] == -torch.inf
    forced = sampling_logprobs(logits, params, OFF, keep=torch.tensor([2]))[0]
    expected = logits[0, :3].log_softmax(-1)
    torch.testing.assert_close(forced[:3], expected)
    assert forced[3] == -torch.inf


def test_half_precision_logits_are_computed_in_fp32():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = sampling_logprobs(logits, sampling_batch(SamplingParams(), 4), OFF)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), logits.double().log_softmax(-1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("params", [SamplingParams(0), SamplingParams(0.8, 0.9, 1)], ids=["temperature 0", "top_k 1"])
def test_greedy_is_the_argmax_over_other_tokens_than_the_mask(params):
    logits = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    logits[:, 11] += 3
    batch = sampling_batch(params, 64)
    logp = sampling_logprobs(logits, batch, 11)
    token = draw(logp, batch, torch.arange(64), torch.zeros(64, dtype=torch.int64))
    best = [max((v, -i) for i, v in enumerate(row) if i != 11)[1] * -1 for row in logits.tolist()]
    assert token.tolist() == best
    assert drawn_logprob(logp, batch, token).tolist() == [0.0] * 64


def test_greedy_and_sampled_rows_in_one_batch():
    rows = [SamplingParams(0), SamplingParams(1)] * 50
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(2)).expand(100, -1)
    batch = sampling_batch(rows)
    logp = sampling_logprobs(logits, batch, OFF)
    token = draw(logp, batch, torch.arange(100), torch.zeros(100, dtype=torch.int64))
    value = drawn_logprob(logp, batch, token)
    assert set(token[::2].tolist()) == {int(logits[0].argmax())} and set(value[::2].tolist()) == {0.0}
    assert len(set(token[1::2].tolist())) > 5
    torch.testing.assert_close(value[1::2], logp[torch.arange(1, 100, 2), token[1::2]])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 0.9, 6, 0.02)], ids=["plain", "filtered"])
def test_draws_follow_the_distribution(params):
    """Pearson's statistic of 40,000 draws stays below the 0.1 % quantile; nothing outside the support is drawn."""
    count, vocab, mask = 40000, 12, 3
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    batch = sampling_batch(params, count)
    logp = sampling_logprobs(logits.expand(count, -1), batch, mask)
    token = draw(logp, batch, torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    seen = np.bincount(token.numpy(), minlength=vocab)
    expected = logp[0].exp().numpy() * count
    support = expected > 0
    assert not seen[~support].any() and not support[mask]
    statistic = ((seen - expected)[support] ** 2 / expected[support]).sum()
    assert statistic < 31.3, "chi-square with at most 11 degrees of freedom, 0.1 % level"


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
def test_extreme_noise_still_draws_a_possible_token(monkeypatch, noise):
    monkeypatch.setattr(
        sampling, "uniform", lambda seed, position, step: torch.full(seed.shape, noise, dtype=torch.float64)
    )
    logits = torch.tensor([[-200.0, 1.0, 2.0, 0.5, 60.0, -200.0]])
    batch = sampling_batch(SamplingParams(1.0, 0.999))
    logp = sampling_logprobs(logits, batch, mask_id=4)
    token = draw(logp, batch, torch.tensor([0]), torch.tensor([0]))
    assert logp[0, int(token)] > -torch.inf and int(token) in (1, 2, 3)


def test_a_draw_does_not_depend_on_the_batch():
    count = 32
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(4))
    batch = sampling_batch(SamplingParams(0.9, 0.95), count)
    logp = sampling_logprobs(logits, batch, 9)
    position, step = torch.arange(count) + 100, torch.arange(count) % 5
    together = draw(logp, batch, position, step)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))
    assert torch.equal(draw(logp[order], batch.rows(order), position[order], step[order]), together[order])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 is negative; use 0"),
        ({"temperature": float("nan")}, r"temperature=nan is not finite; use 1"),
        ({"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]; use 1"),
        ({"top_p": 1.5}, r"top_p=1.5 is not in"),
        ({"top_k": 0}, r"top_k=0 is not positive; use -1"),
        ({"min_p": 1.5}, r"min_p=1.5 is not in \[0, 1\]; use 0"),
    ],
)
def test_impossible_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)
