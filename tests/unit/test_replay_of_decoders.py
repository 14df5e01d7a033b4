"""Responses of every decoder, replayed: against their own log, and against one forward pass per state.

The choice of positions (sample-then-select) and edits (joint threshold) are in the log-prob and in the states; packing,
shared prefixes, pieces, chunks and router ties treat them like everything else.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dllm.attention import dense_attention
from dllm.config import ConfigError
from dllm.decoding import DECODERS, SamplingParams, make_decoder
from dllm.likelihood import Exact, exact
from dllm.likelihood.exact import (
    action_logprobs,
    pack_traces,
    replay_logprobs,
    router_tie_targets,
    scatter_targets,
    target_head,
)
from dllm.likelihood.states import pack_states, split, take, token_sums
from dllm.reference import block_logits, decode
from dllm.replay import CLEAN, build_slices, pack, share_prefixes
from dllm.trace import RolloutTrace
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, sampling_batch, small_model
from trainers.generation import generate

M, SIZE = SMALL_MASK, 4

OPTIONS: dict[str, dict[str, Any]] = {
    "SelectThenSample": {"threshold": 0.08},
    "LowConfidence": {"threshold": 0.08},
    "SampleThenSelect": {"threshold": 0.06, "tokens_per_step": 1},
    "JointThreshold": {"threshold": 0.08, "edit_threshold": 0.09, "max_post_edit_steps": 3},
    "StaticSteps": {"tokens_per_step": 2},
    "EntropyBound": {"gamma": 3.3},
    "Margin": {"threshold": 0.02},
    "FastDLLMv2": {"threshold": 0.08, "sub_block_size": 2},
}
"""For a random model with a vocabulary of 40: several tokens at some steps, one at others."""


@pytest.fixture(scope="module")
def model():
    return small_model(seed=3)


def decoded(
    model, name: str, prompt: int, params: SamplingParams | None = None, seed: int = 5, **options
) -> RolloutTrace:
    decoder = make_decoder(name, M, OPTIONS[name] | options)
    trace = decode(
        model,
        random_prompt(prompt, prompt),
        decoder,
        block_size=SIZE,
        max_new_tokens=13,
        sampling=params or SamplingParams(),
        seed=seed,
    )
    trace.validate()
    return trace


def test_every_decoder_is_here():
    assert OPTIONS.keys() == DECODERS.keys()


PARAMS = {"plain": SamplingParams(), "filtered": SamplingParams(0.6, 0.9, 15, 0.01), "greedy": SamplingParams(0)}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_replay_gives_the_log(model, name, params):
    per_step = []
    for prompt in (1, 4, 6, 7):
        trace = decoded(model, name, prompt, params)
        greedy = params.greedy or name == "LowConfidence"
        assert trace.sampling.greedy == greedy, "how the tokens were drawn, not what was asked for"
        (replayed,) = replay_logprobs(model, [trace], M)
        np.testing.assert_allclose(replayed.detach().numpy(), trace.action_logprob, atol=3e-5)
        assert not trace.logprob.any() if greedy else trace.logprob.min() < -0.1
        blocks = (trace.reveal_step[trace.block_slice(index)] for index in range(len(trace.steps_per_block)))
        per_step += [count for steps in blocks for count in np.bincount(steps)]
        back = RolloutTrace.from_line(json.loads(json.dumps(trace.to_line())))
        assert back.edits == trace.edits and back.selection == trace.selection
        np.testing.assert_array_equal(back.action_logprob, trace.action_logprob)
    assert max(per_step) > 1


def sequential(model, trace: RolloutTrace) -> tuple[np.ndarray, list[list[float]]]:
    """One forward pass over the whole sequence so far per (block, step), the log followed to the letter.

    Returns:
        Log-probs of the drawn tokens [R], and per block the log-prob of the choice of positions of each step.
    """
    size, prompt = trace.block_size, trace.prompt_len
    final = [*trace.prompt_ids.tolist(), *trace.replay_ids.tolist()]
    drawn = [*trace.prompt_ids.tolist(), *trace.drawn_ids.tolist()]
    logprob, selects = np.zeros(len(trace.replay_ids)), []
    for index, steps in enumerate(trace.steps_per_block):
        start = (trace.first_block + index) * size
        rows = range(max(start, prompt), start + size)
        state = [final[i] if i < prompt else M for i in range(start, start + size)]
        selects.append([])
        for step in range(steps):
            logits = block_logits(model, torch.tensor(final[:start] + state), size).double()
            logits[:, M] = -torch.inf
            p = (logits / trace.sampling.temperature).softmax(-1).numpy()
            hidden = [i for i in rows if state[i - start] == M]
            kept = [i for i in rows if trace.reveal_step[i - prompt] == step]
            for i in kept:
                logprob[i - prompt] = np.log(p[i - start, drawn[i]])
            if trace.selection is not None:
                selects[-1].append(_choice(trace, p, start, hidden, kept, drawn))
            for i in kept:
                state[i - start] = drawn[i]
            for _, edited, position, old, new in trace.edits:
                if position // size == start // size and edited == step:
                    assert state[position - start] == old
                    state[position - start] = new
        assert state == final[start : start + size]
    return logprob, selects


def _choice(
    trace: RolloutTrace, p: np.ndarray, start: int, hidden: list[int], kept: list[int], drawn: list[int]
) -> float:
    """log of the product over the positions not kept of the probability of a draw that loses (design formula)."""
    rule, taken = trace.selection, {i: p[i - start, drawn[i]] for i in kept}
    above = all(value > rule.threshold for value in taken.values())
    total = 0.0
    for j in set(hidden) - set(kept):
        row = p[j - start]
        if above and len(kept) >= min(rule.tokens_per_step, len(hidden)):
            total += np.log(row[row <= rule.threshold].sum())
        else:
            u = min(taken.values())
            last = max(i for i in kept if taken[i] == u)
            total += np.log(row[(row < u) | ((row == u) & (j > last))].sum())
    return total


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7)], ids=["plain", "temperature"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SampleThenSelect", {}),
        ("SampleThenSelect", {"tokens_per_step": 2}),
        ("SampleThenSelect", {"threshold": 0.95}),
        ("JointThreshold", {}),
        ("JointThreshold", {"edit_threshold": 0.0}),
    ],
)
def test_packed_equals_sequential(model, name, options, params):
    edits, branches = 0, set()
    for prompt in (1, 4, 6, 7):
        trace = decoded(model, name, prompt, params, **options)
        logprob, selects = sequential(model, trace)
        (packed,) = replay_logprobs(model, [trace], M)
        expected = logprob + replace(trace, select_logprobs=selects if trace.selection else None).select_logprob
        np.testing.assert_allclose(packed.detach().numpy(), expected, atol=3e-5)
        np.testing.assert_allclose(trace.action_logprob, expected, atol=3e-5)
        edits += len(trace.edits)
        branches |= {s.rest.threshold > 0 for s in build_slices(trace, M).slices if s.rest is not None}
    assert (edits > 0) == (name == "JointThreshold")
    if name == "SampleThenSelect":
        assert False in branches and (True in branches or "threshold" in options)


def test_steps_that_only_edit_count_and_have_no_slice(model):
    trace = decoded(model, "JointThreshold", 6, edit_threshold=0.0)
    sample = build_slices(trace, M)
    draws = {(s.start // SIZE, s.step) for s in sample.slices}
    assert sum(trace.steps_per_block) > len(draws)
    only = {(b, s) for b, s, *_ in trace.edits} - draws
    assert len(only) == sum(trace.steps_per_block) - len(draws)
    assert sorted(np.concatenate([s.token_index for s in sample.slices]).tolist()) == list(range(len(trace.replay_ids)))
    assert sample.clean.tolist() == [*trace.prompt_ids, *trace.replay_ids][: len(sample.clean)], "final tokens"


@pytest.fixture(scope="module")
def group(model) -> list[RolloutTrace]:
    """Two prompts with three samples each, of both decoders and one without either, greedy and filtered among them."""
    prompt = random_prompt(14, 9)
    made = []
    for seed, (name, params) in enumerate(
        [
            ("SampleThenSelect", SamplingParams()),
            ("SampleThenSelect", SamplingParams(0.7, 0.9)),
            ("SampleThenSelect", SamplingParams(0)),
            ("JointThreshold", SamplingParams()),
            ("SelectThenSample", SamplingParams()),
            ("SampleThenSelect", SamplingParams()),
        ]
    ):
        decoder = make_decoder(name, M, OPTIONS[name])
        limit = 2 if seed < 5 else 9
        made.append(decode(model, prompt, decoder, block_size=SIZE, max_new_tokens=limit, sampling=params, seed=seed))
    return made


def scored(model, batch, traces):
    sampling = sampling_batch([t.sampling for t in traces])
    values = model(batch.input_ids, batch.position, dense_attention(batch), target_head(batch, sampling, M))
    return action_logprobs(batch, values)


@pytest.mark.parametrize(("row_length", "multiple"), [(None, 1), (10**6, 1), (10**6, 128), (60, 1)])
@pytest.mark.parametrize("shared", [False, True])
def test_samples_of_a_batch_do_not_mix(model, group, row_length, multiple, shared):
    samples = [build_slices(t, M) for t in group]
    batch = pack(share_prefixes(samples) if shared else samples, SIZE, row_length, multiple)
    with torch.no_grad():
        pieces = scatter_targets(batch, scored(model, batch, group), [len(t.replay_ids) for t in group])
    for trace, values in zip(group, pieces, strict=True):
        np.testing.assert_allclose(values.numpy(), trace.action_logprob, atol=3e-5)


def test_states_keep_their_choice_of_positions_when_sub_sampled_or_split(model, group):
    """A kept state has the log-prob of its choice on its first token; the pieces of a sample add up to the whole."""
    trace = group[5]
    states = Exact().states(trace, M)
    count, lengths = len(states.sample.slices), [len(trace.replay_ids)]
    assert count > 3

    def values(pieces, owners):
        batch, weights = pack_states(pieces, SIZE, "cpu", owners)
        return token_sums(batch, weights * scored(model, batch, [trace] * len(pieces)), lengths)[0].detach().numpy()

    whole = values([states], [0])
    np.testing.assert_allclose(whole, trace.action_logprob, atol=3e-5)
    chosen = [0, 2, count - 1]
    kept = np.concatenate([states.sample.slices[i].token_index for i in chosen])
    expected = np.zeros_like(whole)
    expected[kept] = whole[kept]
    np.testing.assert_allclose(values([take(states, chosen)], [0]), expected, atol=3e-5)
    pieces = split(states, 24)
    assert len(pieces) > 2
    np.testing.assert_allclose(values(pieces, [0] * len(pieces)), whole, atol=3e-5)


def test_chunks_change_neither_values_nor_gradients(model, group, monkeypatch):
    results = []
    for size in (exact.CHUNK_BYTES, 4 * 40 * 3):
        monkeypatch.setattr(exact, "CHUNK_BYTES", size)
        model.zero_grad()
        batch = pack_traces(group, M, "cpu")
        assert batch.rest is not None and len(batch.rest.row) > 3
        values = scored(model, batch, group)
        values.sum().backward()
        results.append((values.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    model.zero_grad()
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, atol=1e-4, rtol=1e-4)


def test_a_tie_at_a_position_that_lost_reaches_the_tokens_of_its_state(model):
    """Three samples behind one prefix: a tie in the rest of one state is a tie of the tokens drawn there, no others."""
    decoder = make_decoder("SampleThenSelect", M, OPTIONS["SampleThenSelect"] | {"threshold": 0.95})
    prompt = random_prompt(13, 1)
    traces = [decode(model, prompt, decoder, block_size=SIZE, max_new_tokens=3, seed=s) for s in range(3)]
    batch = pack_traces(traces, M, "cpu")
    assert batch.doc[0].unique().numel() <= 2, "one shared row"
    row, column = int(batch.rest.row[-1]), int(batch.rest.column[-1])
    choice = int(batch.rest.choice[-1])
    gap = torch.ones(batch.doc.shape)
    gap[row, column] = 1e-7
    tied = router_tie_targets(batch, gap.reshape(-1)).nonzero()[:, 0].tolist()
    assert tied == batch.rest.kept[batch.rest.kept_choice == choice].tolist()
    gap = torch.ones(batch.doc.shape)
    gap[row, 0] = 1e-7
    assert batch.slice_id[row, 0] == CLEAN
    assert router_tie_targets(batch, gap.reshape(-1)).sum() == int((batch.target_row == row).sum())


def test_other_likelihoods_see_final_tokens_alone(model):
    """Edits and choices of positions are the decoder's business."""
    from dllm.likelihood import Elbo, OneStep

    for name in ("SampleThenSelect", "JointThreshold"):
        trace = decoded(model, name, 6)
        plain = hand_made_trace(trace.prompt_ids, trace.replay_ids, trace.reveal_step, SIZE)
        for likelihood in (Elbo(), OneStep()):
            left, right = likelihood.states(trace, M).sample, likelihood.states(plain, M).sample
            assert all(s.rest is None for s in left.slices)
            assert [s.ids.tolist() for s in left.slices] == [s.ids.tolist() for s in right.slices]
            assert [s.tokens.tolist() for s in left.slices] == [s.tokens.tolist() for s in right.slices]


@pytest.mark.parametrize("name", ["SampleThenSelect", "JointThreshold"])
def test_evaluation_without_an_engine_refuses_what_it_does_not_log(model, name):
    with pytest.raises(ConfigError, match=f"{name} edits tokens or chooses positions at random"):
        generate(model, [[1, 2]], make_decoder(name, M), block_size=SIZE, max_new_tokens=4, eos_ids=())
