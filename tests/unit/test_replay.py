"""Slices, packing and the attention rule; packed log-probs against one forward pass per state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dllm.attention import dense_attention, dense_mask, flex_attention, sees
from dllm.decoding import SamplingParams, make_decoder
from dllm.decoding.sampling import drawn_logprob, sampling_logprobs
from dllm.likelihood.exact import pack_traces, replay_logprobs, router_tie_targets, scatter_targets, target_head
from dllm.models.llada2 import LLaDA2MoeModelLM
from dllm.reference import block_logits, decode
from dllm.replay import (
    CLEAN,
    PADDING,
    PackedBatch,
    SampleSlices,
    Slice,
    assign_rows,
    build_slices,
    pack,
    share_prefixes,
)
from dllm.trace import RolloutTrace
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, sampling_batch, small_model

M = SMALL_MASK
SIZE = 4


@pytest.fixture(scope="module")
def model() -> LLaDA2MoeModelLM:
    return small_model(seed=3)


def schedule(prompt: int, response: int, seed: int, block_size: int = SIZE) -> RolloutTrace:
    """Random tokens with a random schedule: in every block some steps, each with at least one token."""
    generator = np.random.default_rng(seed)
    steps: list[int] = []
    while len(steps) < response:
        length = min(block_size - (prompt + len(steps)) % block_size, response - len(steps))
        count = int(generator.integers(1, length + 1))
        block = list(range(count)) + generator.integers(0, count, length - count).tolist()
        steps += generator.permutation(block).tolist()
    return hand_made_trace(random_prompt(prompt, seed), random_prompt(response, seed + 1), steps, block_size)


def sequential_logprobs(model: LLaDA2MoeModelLM, trace: RolloutTrace, mask_id: int) -> np.ndarray:
    """One forward pass over the whole sequence so far for every (block, step): what the engine computes."""
    size, prompt = trace.block_size, trace.prompt_len
    ids = np.concatenate([trace.prompt_ids, trace.replay_ids]).astype(np.int64)
    steps = np.concatenate([np.full(prompt, -2), trace.reveal_step])
    result = np.zeros(len(trace.replay_ids))
    for block in range(trace.first_block, len(ids) // size):
        rows = range(block * size, (block + 1) * size)
        for step in range(int(steps[list(rows)].max()) + 1):
            state = ids[: (block + 1) * size].copy()
            for i in rows:
                if steps[i] >= step or steps[i] == -1:
                    state[i] = mask_id
            logits = block_logits(model, torch.from_numpy(state), size)
            sampling = sampling_batch(trace.sampling, size)
            logp = sampling_logprobs(logits, sampling, mask_id)
            for i in rows:
                if steps[i] == step:
                    token = torch.tensor([ids[i]] * size)
                    result[i - prompt] = drawn_logprob(logp, sampling, token)[i - block * size]
    return result


class TestSlices:
    def test_states_of_a_schedule(self):
        """Prompt p0 p1, then a b | c d e f with steps (1, 0) and (0, 2, 1, 0), block size 4."""
        p0, p1, a, b, c, d, e, f = range(10, 18)
        sample = build_slices(hand_made_trace([p0, p1], [a, b, c, d, e, f], [1, 0, 0, 2, 1, 0], 4), M)
        assert sample.clean.tolist() == [p0, p1, a, b]
        assert [s.ids.tolist() for s in sample.slices] == [
            [p0, p1, M, M],
            [p0, p1, M, b],
            [M, M, M, M],
            [c, M, M, f],
            [c, M, e, f],
        ]
        assert [s.tokens.tolist() for s in sample.slices] == [[b], [a], [c, f], [e], [d]]
        assert [s.start for s in sample.slices] == [0, 0, 4, 4, 4]
        assert [s.step for s in sample.slices] == [0, 1, 0, 1, 2]
        assert [s.token_index.tolist() for s in sample.slices] == [[1], [0], [2, 5], [4], [3]]
        assert sample.packed_length == 4 + 5 * 4

    @pytest.mark.parametrize("prompt", [4, 5, 6, 7, 8])
    def test_every_token_is_a_target_once(self, prompt):
        trace = schedule(prompt, 24 - prompt, seed=prompt)
        sample = build_slices(trace, M)
        targets = np.concatenate([s.token_index for s in sample.slices])
        assert sorted(targets.tolist()) == list(range(24 - prompt))
        for piece in sample.slices:
            assert (piece.ids[piece.columns] == M).all()
            assert np.array_equal(piece.tokens, trace.replay_ids[piece.token_index])

    def test_a_token_that_was_never_drawn_stays_masked(self):
        sample = build_slices(hand_made_trace([10, 11], [12, 13], [0, -1], 4), M)
        assert [s.ids.tolist() for s in sample.slices] == [[10, 11, M, M]]
        assert sample.slices[0].tokens.tolist() == [12]


class TestMask:
    def test_bd3lm(self):
        """Block size 2, four tokens, one noisy copy (0-3) beside the clean one (4-7): the published matrix."""
        doc = torch.zeros(8, dtype=torch.int64)
        block = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
        slice_id = torch.tensor([0, 0, 1, 1, CLEAN, CLEAN, CLEAN, CLEAN])
        seen = sees(doc[:, None], doc[None], block[:, None], block[None], slice_id[:, None], slice_id[None])
        assert ["".join(map(str, row)) for row in seen.int().tolist()] == [
            "11000000",
            "11000000",
            "00111100",
            "00111100",
            "00001100",
            "00001100",
            "00001111",
            "00001111",
        ]

    def test_samples_of_a_row_do_not_see_each_other_and_padding_sees_padding(self):
        samples = [build_slices(schedule(6, 10, seed), M) for seed in range(3)]
        batch = pack(samples, SIZE, row_length=10**6, multiple=64)
        assert batch.input_ids.shape[0] == 1 and batch.input_ids.shape[1] % 64 == 0
        seen, doc = dense_mask(batch)[0, 0], batch.doc[0]
        assert not seen[doc[:, None] != doc[None]].any()
        assert seen.any(1).all(), "a softmax over nothing would be NaN"
        assert (doc == PADDING).any()

    def test_slices_of_one_block_do_not_see_each_other(self):
        batch = pack([build_slices(schedule(4, 12, 0), M)], SIZE)
        seen, slice_id = dense_mask(batch)[0, 0], batch.slice_id[0]
        noisy = slice_id != CLEAN
        other = (slice_id[:, None] != slice_id[None]) & noisy[:, None] & noisy[None]
        assert not seen[other].any()
        assert not seen[~noisy][:, noisy].any(), "clean tokens never see a slice"


@pytest.mark.parametrize("prompt", [4, 5, 6, 7, 1])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 0.9, 12)], ids=["plain", "filtered"])
def test_packed_equals_sequential(model, prompt, params):
    trace = replace(schedule(prompt, 20 - prompt, seed=prompt), sampling=params)
    (packed,) = replay_logprobs(model, [trace], M)
    expected = sequential_logprobs(model, trace, M)
    if not params.filtered:
        np.testing.assert_allclose(packed.detach().numpy(), expected, atol=2e-5)
        return
    # Tokens of a random schedule may lie outside of the support: the replay forces them into it.
    finite = np.isfinite(expected)
    assert finite.any() and torch.isfinite(packed).all()
    np.testing.assert_allclose(packed.detach().numpy()[finite], expected[finite], atol=2e-5)


def response_aligned(trace: RolloutTrace, mask_id: int) -> PackedBatch:
    """The wrong layout: blocks counted from the first response token instead of from the first token."""
    size, prompt = trace.block_size, trace.prompt_len
    ids = np.concatenate([trace.prompt_ids, trace.replay_ids]).astype(np.int64)
    steps = np.concatenate([np.full(prompt, -2, np.int64), trace.reveal_step.astype(np.int64)])
    padded = -(len(ids) - prompt) % size
    ids, steps = np.pad(ids, (0, padded), constant_values=mask_id), np.pad(steps, (0, padded), constant_values=-1)
    slices = []
    for start in range(prompt, len(ids), size):
        final, step_of = ids[start : start + size], steps[start : start + size]
        for step in sorted(set(step_of[step_of >= 0].tolist())):
            hidden, columns = (step_of >= step) | (step_of == -1), np.flatnonzero(step_of == step)
            slices.append(
                Slice(np.where(hidden, mask_id, final), start, columns, final[columns], columns + start - prompt, step)
            )
    batch = pack([SampleSlices(ids[: len(ids) - size], slices)], size)
    return replace(batch, block=(batch.position - prompt) // size)


def test_a_response_aligned_grid_fails(model):
    trace = schedule(6, 14, seed=6)
    batch = response_aligned(trace, M)
    with torch.no_grad():
        values = model(
            batch.input_ids,
            batch.position,
            dense_attention(batch),
            target_head(batch, sampling_batch(trace.sampling), M),
        )
    (wrong,) = scatter_targets(batch, values.logprob, [14])
    difference = np.abs(wrong.numpy() - sequential_logprobs(model, trace, M))
    assert difference.mean() > 1e-2 and difference.max() > 0.1
    # With a prompt that ends on the grid both layouts are the same, so the construction above is sound.
    aligned = schedule(8, 12, seed=6)
    batch = response_aligned(aligned, M)
    with torch.no_grad():
        values = model(
            batch.input_ids,
            batch.position,
            dense_attention(batch),
            target_head(batch, sampling_batch(SamplingParams()), M),
        )
    (same,) = scatter_targets(batch, values.logprob, [12])
    np.testing.assert_allclose(same.numpy(), sequential_logprobs(model, aligned, M), atol=2e-5)


def test_several_samples_in_one_row_equal_one_per_row(model):
    traces = [schedule(prompt, response, seed) for seed, (prompt, response) in enumerate([(6, 10), (3, 5), (8, 16)])]
    samples, lengths = [build_slices(t, M) for t in traces], [len(t.replay_ids) for t in traces]
    sampling = sampling_batch([t.sampling for t in traces])
    results = []
    for row_length, multiple in ((None, 1), (10**6, 1), (10**6, 128), (120, 1)):
        batch = pack(samples, SIZE, row_length, multiple)
        with torch.no_grad():
            values = model(batch.input_ids, batch.position, dense_attention(batch), target_head(batch, sampling, M))
        results.append(scatter_targets(batch, values.logprob, lengths))
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            torch.testing.assert_close(left, right, atol=2e-5, rtol=0)


def test_samples_of_a_group_share_their_prefix(model):
    """Three samples of one prompt in its last block, one of them again a block later, and another prompt."""
    group = [replace(schedule(6, 2, seed=s), prompt_ids=schedule(6, 2, seed=9).prompt_ids) for s in (1, 2, 3)]
    longer = replace(schedule(6, 6, seed=4), prompt_ids=group[0].prompt_ids)
    traces = [group[0], longer, schedule(7, 5, seed=5), group[1], group[2]]
    samples = [build_slices(t, M) for t in traces]
    merged = share_prefixes(samples)
    assert [sorted(set(m.owners)) for m in merged] == [[0, 3, 4], [1], [2]]
    assert sum(len(m.slices) for m in merged) == sum(len(s.slices) for s in samples)
    batch = pack(merged, SIZE)
    with torch.no_grad():
        sampling = sampling_batch([t.sampling for t in traces])
        values = model(batch.input_ids, batch.position, dense_attention(batch), target_head(batch, sampling, M))
    for trace, shared in zip(traces, scatter_targets(batch, values.logprob, [2, 6, 5, 2, 2]), strict=True):
        np.testing.assert_allclose(shared.numpy(), sequential_logprobs(model, trace, M), atol=2e-5)


def test_a_shared_row_is_bounded():
    sample = build_slices(schedule(6, 2, seed=0), M)
    count = len(sample.slices)
    merged = share_prefixes([sample] * 5, slices_per_row=2 * count)
    assert [len(m.slices) // count for m in merged] == [2, 2, 1]


class TestSharedPrefixes:
    """Samples of one prompt in the same block stand behind one copy of their clean tokens."""

    def group(self, count: int, prompt: int = 14, seed: int = 0) -> list[RolloutTrace]:
        """Responses of two tokens to one prompt, all in the prompt's last block."""
        made = [schedule(prompt, 2, seed + i) for i in range(count)]
        return [replace(trace, prompt_ids=made[0].prompt_ids) for trace in made]

    def logprobs(self, model, samples, traces):
        batch = pack(samples, SIZE)
        head = target_head(batch, sampling_batch([t.sampling for t in traces]), M)
        with torch.no_grad():
            values = model(batch.input_ids, batch.position, dense_attention(batch), head)
        return scatter_targets(batch, values.logprob, [len(t.replay_ids) for t in traces]), batch.tokens

    def test_log_probs_are_those_of_separate_copies(self, model):
        mixed = [*self.group(3), *self.group(2, seed=50), schedule(6, 10, 7), *self.group(2)]
        samples = [build_slices(t, M) for t in mixed]
        apart, cost_apart = self.logprobs(model, samples, mixed)
        shared, cost_shared = self.logprobs(model, share_prefixes(samples), mixed)
        assert [len(s.slices) for s in samples] == [len(build_slices(t, M).slices) for t in mixed], "inputs are kept"
        assert cost_shared < cost_apart
        for left, right, trace in zip(apart, shared, mixed, strict=True):
            torch.testing.assert_close(left, right, atol=2e-5, rtol=0)
            np.testing.assert_allclose(right.numpy(), sequential_logprobs(model, trace, M), atol=2e-5)

    def test_only_equal_prefixes_are_shared(self):
        first, second = self.group(2), self.group(2, seed=50)
        merged = share_prefixes([build_slices(t, M) for t in (first[0], second[0], first[1], second[1])])
        assert len(merged) == 2
        assert [sorted(set(row.owners)) for row in merged] == [[0, 2], [1, 3]]

    def test_rows_stay_short(self):
        samples = [build_slices(t, M) for t in self.group(12)]
        merged = share_prefixes(samples, slices_per_row=4)
        assert all(len(row.slices) <= 4 for row in merged)
        assert sorted(owner for row in merged for owner in row.owners) == sorted(
            i for i, s in enumerate(samples) for _ in s.slices
        )

    def test_a_tie_in_a_shared_prefix_reaches_every_sample(self):
        samples = share_prefixes([build_slices(t, M) for t in self.group(3)], slices_per_row=100)
        batch = pack(samples, SIZE)
        gap = torch.ones(batch.doc.shape)
        gap[0, 0] = 1e-7
        tied = router_tie_targets(batch, gap.reshape(-1))
        assert set(batch.target_sample[tied].tolist()) == {0, 1, 2} and tied.all()


def test_flex_attention_follows_the_same_rule(model):
    """FlexAttention, run eagerly on the CPU, against the dense mask: the mask itself and the log-probs."""
    from torch.nn.attention.flex_attention import create_mask

    traces = [schedule(6, 10, 0), schedule(3, 5, 1)]
    batch = pack([build_slices(t, M) for t in traces], SIZE, 10**6, 128)
    doc, block, slice_id = batch.doc, batch.block, batch.slice_id

    def rule(row, head, q, k):
        return sees(doc[row, q], doc[row, k], block[row, q], block[row, k], slice_id[row, q], slice_id[row, k])

    length = doc.shape[1]
    assert torch.equal(create_mask(rule, 1, 1, length, length, device="cpu"), dense_mask(batch))
    head = target_head(batch, sampling_batch([t.sampling for t in traces]), M)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        flex = model(batch.input_ids, batch.position, flex_attention(batch), head)
        dense = model(batch.input_ids, batch.position, dense_attention(batch), head)
    torch.testing.assert_close(flex.logprob, dense.logprob, atol=2e-5, rtol=0)


@pytest.mark.parametrize("prompt", [1, 4, 6, 7])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(0.6, 0.9, 15, 0.01), SamplingParams(0)],
    ids=["plain", "filtered", "greedy"],
)
def test_replay_of_a_decoded_response_gives_its_log_probs(model, prompt, params):
    decoder = make_decoder("SelectThenSample", M, {"threshold": 0.08})
    trace = decode(
        model,
        random_prompt(prompt, prompt),
        decoder,
        block_size=SIZE,
        max_new_tokens=13,
        sampling=params,
        seed=5,
    )
    trace.validate()
    (replayed,) = replay_logprobs(model, [trace], M)
    np.testing.assert_allclose(replayed.detach().numpy(), trace.logprob, atol=2e-5)
    assert params.greedy or trace.logprob.min() < -0.1
    (raw,) = replay_logprobs(model, [trace], M, sampling=[SamplingParams()])
    np.testing.assert_allclose(raw.detach().numpy(), trace.logprob_raw, atol=2e-5)


def test_values_return_to_their_samples(model):
    traces = [
        schedule(6, 10, 0),
        hand_made_trace(random_prompt(4), random_prompt(4), [0, -1, 1, -1], 4),
        schedule(3, 5, 1),
    ]
    batch = pack_traces(traces, M, "cpu")
    values = torch.arange(len(batch.target_token)).float() + 1
    pieces = scatter_targets(batch, values, [len(t.replay_ids) for t in traces])
    assert [len(p) for p in pieces] == [10, 4, 5]
    assert sorted(torch.cat(pieces).tolist()) == [0.0, 0.0, *range(1, 18)]
    assert (pieces[1] == 0).tolist() == [False, True, False, True]
    for trace, piece in zip(traces, pieces, strict=True):
        for index, value in enumerate(piece.tolist()):
            if value:
                assert int(batch.target_token[int(value) - 1]) == trace.replay_ids[index]


@pytest.mark.parametrize(
    ("lengths", "row_length", "rows"),
    [
        ([3, 5, 2], None, [[0], [1], [2]]),
        ([3, 5, 2], 8, [[1, 0], [2]]),
        ([3, 5, 2], 5, [[1], [0, 2]]),
        ([9, 1], 5, [[0], [1]]),
        ([], 5, []),
    ],
)
def test_row_assignment(lengths, row_length, rows):
    assert assign_rows(lengths, row_length) == rows
