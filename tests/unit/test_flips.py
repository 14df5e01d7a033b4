"""Flips of the schedule and of the routers: a changed model flips, the same one does not."""

from __future__ import annotations

import copy
from itertools import combinations

import numpy as np
import pytest
import torch

from dllm.attention import dense_attention
from dllm.decoding import make_decoder
from dllm.likelihood.exact import pack_traces, target_head
from dllm.reference import decode
from dllm.routing import expert_set_hash
from tests.support import SMALL_MASK, random_prompt, sampling_batch, small_model
from trainers import flips
from trainers.flips import recorded_routing, router_flips, schedule_probe, with_flips

DECODERS = {
    "SelectThenSample": {"threshold": 0.1},
    "StaticSteps": {"tokens_per_step": 2},
    "EntropyBound": {},
    "FastDLLMv2": {"threshold": 0.1, "sub_block_size": 2},
    "JointThreshold": {"threshold": 0.1, "edit_threshold": 0.15},
}


@pytest.fixture(scope="module")
def model():
    return small_model(seed=4)


def changed(model, seed=9, size=0.3):
    """The model with noise on its head and its routers."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (other.lm_head.weight, *(router.weight for router in other.routers())):
            weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


def traces_of(model, name):
    decoder = make_decoder(name, SMALL_MASK, DECODERS[name])
    return [decode(model, random_prompt(n, n), decoder, block_size=4, max_new_tokens=10, seed=n) for n in (3, 4, 6)]


def measure(model, traces, name, limit=1000):
    batch = pack_traces(traces, SMALL_MASK, "cpu")
    sampling = sampling_batch([t.sampling for t in traces])
    probe = schedule_probe(batch, traces, make_decoder(name, SMALL_MASK, DECODERS[name]), sampling, limit)
    head = with_flips(target_head(batch, sampling, SMALL_MASK), probe)
    with torch.no_grad():
        values, flipped = model(batch.input_ids, batch.position, dense_attention(batch), head)
    return batch, probe, values, flipped


@pytest.mark.parametrize("name", DECODERS)
def test_the_model_that_decoded_does_not_flip_and_another_one_does(model, name):
    traces = traces_of(model, name)
    _, probe, values, flipped = measure(model, traces, name)
    states = sum(len({((t.prompt_len + i) // 4, s) for i, s in enumerate(t.reveal_step.tolist())}) for t in traces)
    assert len(flipped) == states and not flipped.any()
    assert len(values.logprob) == len(probe.target)
    _, probe, _, flipped = measure(changed(model), traces, name)
    assert flipped.any()
    per_target = probe.per_target(flipped, len(values.logprob))
    assert per_target.unique().tolist() in ([1.0, 2.0], [2.0])


def test_the_probe_sees_the_blocks_that_were_decoded(model):
    traces = traces_of(model, "SelectThenSample")
    _, probe, _, _ = measure(model, traces, "SelectThenSample")
    hidden = probe.blocks.ids == SMALL_MASK
    assert (probe.revealed & ~hidden).sum() == 0 and probe.revealed.any(1).all()
    assert not (probe.blocks.given & hidden).any()
    assert (probe.blocks.start % 4 == 0).all()
    assert int(probe.blocks.given.sum()) == sum((t.prompt_len % 4) * t.steps_per_block[0] for t in traces), (
        "the prompt's tail is in every state of its block"
    )


def test_a_sample_of_states_is_spread_and_the_rest_is_not_measured(model):
    traces = traces_of(model, "SelectThenSample")
    batch, probe, values, flipped = measure(model, traces, "SelectThenSample", limit=3)
    assert len(flipped) == 3
    per_target = probe.per_target(flipped, len(values.logprob))
    measured = per_target > 0
    assert 3 <= int(measured.sum()) < len(measured)
    assert len(set(batch.target_sample[measured].tolist())) > 1
    assert measure(model, traces, "SelectThenSample", limit=0)[1] is None


def test_chunks_change_nothing(model, monkeypatch):
    traces, other = traces_of(model, "SelectThenSample"), changed(model)
    whole = measure(other, traces, "SelectThenSample")[3]
    monkeypatch.setattr(flips, "CHUNK_BYTES", 1)
    assert measure(other, traces, "SelectThenSample")[3].tolist() == whole.tolist()


def test_a_random_choice_of_positions_is_not_measured(model):
    decoder = make_decoder("SampleThenSelect", SMALL_MASK, {"threshold": 0.1})
    traces = [decode(model, random_prompt(4), decoder, block_size=4, max_new_tokens=4, seed=1)]
    batch = pack_traces(traces, SMALL_MASK, "cpu")
    assert schedule_probe(batch, traces, decoder, sampling_batch(traces[0].sampling), 10) is None


def test_hashes_tell_sets_apart_and_ignore_their_order():
    sets = torch.tensor(list(combinations(range(24), 3)))
    hashes = expert_set_hash(sets)
    assert len(hashes.unique()) == len(sets)
    assert torch.equal(expert_set_hash(sets.flip(-1).int()), hashes)
    assert int(hashes.min()) >= 0 and int(hashes.max()) < 2**31


def routing(model, traces):
    batch = pack_traces(traces, SMALL_MASK, "cpu")
    head = target_head(batch, sampling_batch([t.sampling for t in traces]), SMALL_MASK)
    with torch.no_grad(), recorded_routing(model, batch) as hashes:
        model(batch.input_ids, batch.position, dense_attention(batch), head)
    return batch, hashes


def logged(batch, hashes, traces):
    """What an engine with these routers would have logged."""
    tables = [np.zeros((len(t.replay_ids), len(hashes)), np.int64) for t in traces]
    for sample, index, *chosen in torch.stack([batch.target_sample, batch.target_index, *hashes], 1).tolist():
        tables[sample][index] = chosen
    return tables


def test_the_same_routers_do_not_flip_and_others_do(model):
    traces = traces_of(model, "SelectThenSample")
    batch, hashes = routing(model, traces)
    assert len(hashes) == 2 and not any(router._forward_hooks for router in model.routers())
    engine = logged(batch, hashes, traces)
    assert router_flips(batch, hashes, engine).tolist() == [1.0] * len(batch.target_row)
    _, others = routing(changed(model), traces)
    share = router_flips(batch, others, engine)
    assert (share > 1).any() and (share <= 2).all()
    engine[1] = None
    partly = router_flips(batch, hashes, engine)
    assert torch.equal(partly == 0, batch.target_sample == 1)


def test_one_flipped_router_of_two_is_a_half(model):
    traces = traces_of(model, "SelectThenSample")
    batch, hashes = routing(model, traces)
    engine = logged(batch, hashes, traces)
    engine[0][0, 1] += 1
    share = router_flips(batch, hashes, engine)
    hit = (batch.target_sample == 0) & (batch.target_index == 0)
    assert share[hit].tolist() == [1.5] and (share[~hit] == 1).all()


def test_another_number_of_routers_is_an_error(model):
    traces = traces_of(model, "SelectThenSample")
    batch, hashes = routing(model, traces)
    with pytest.raises(ValueError, match="recorded 1 routers of a model that has 2"):
        router_flips(batch, hashes, [np.zeros((len(t.replay_ids), 1), np.int64) for t in traces])
