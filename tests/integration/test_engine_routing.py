"""Experts recorded by the real engine, against those of the trainer's model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from dllm.attention import attention_for
from dllm.decoding import SamplingParams
from dllm.likelihood.exact import pack_traces, router_tie_targets, target_head
from dllm.models.base import BlockDiffusionLM
from rollout.engine import GenerateParams
from rollout.records import RolloutSample
from tests.support import sampling_batch
from trainers.flips import recorded_routing, router_flips

LIMIT = 40


@pytest.fixture
def samples(synchronous, tiny) -> tuple[list[RolloutSample], RolloutSample]:
    """Responses whose experts were asked for, and one whose were not."""
    params = GenerateParams(SamplingParams(), LIMIT, ignore_eos=True, routing=True)
    asked = synchronous.generate([tiny.prompt(n) for n in (33, 40, 64, 75)], params, seed=1)
    ((plain,),) = synchronous.generate([tiny.prompt(20)], GenerateParams(SamplingParams(), LIMIT), seed=1)
    return [group[0] for group in asked], plain


def flips(model: BlockDiffusionLM, samples: list[RolloutSample], mask_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of flipped routers per target, and which targets depend on a router tie."""
    traces = [sample.trace for sample in samples]
    batch = pack_traces(traces, mask_id, "cpu")
    head = target_head(batch, sampling_batch([t.sampling for t in traces]), mask_id)
    model.record_router_gaps(True)
    with torch.no_grad(), recorded_routing(model, batch) as hashes:
        model(batch.input_ids, batch.position, attention_for(batch), head)
    ties = router_tie_targets(batch, model.router_gap())
    return router_flips(batch, hashes, [sample.routing for sample in samples]) - 1, ties


def test_every_token_has_its_experts(samples, tiny):
    asked, plain = samples
    routers = len(list(tiny.model.routers()))
    for sample in asked:
        assert sample.routing.shape == (len(sample.trace.replay_ids), routers)
        assert sample.to_line()["routing"] == sample.routing.tolist()
    chosen = np.concatenate([sample.routing for sample in asked])
    assert all(len(np.unique(column)) > 1 for column in chosen.T), "they differ from token to token"
    assert plain.routing is None and "routing" not in plain.to_line()


def test_engine_and_trainer_choose_the_same_experts(samples, tiny):
    share, ties = flips(tiny.model, samples[0], tiny.config.mask_id)
    assert (share[~ties] == 0).all() and int((~ties).sum()) > 0.5 * len(ties)


def test_changed_routers_are_seen(samples, tiny):
    other = copy.deepcopy(tiny.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in other.routers():
            router.weight += 0.1 * router.weight.std() * torch.randn(router.weight.shape, generator=generator)
    share, _ = flips(other, samples[0], tiny.config.mask_id)
    assert 0.01 < share.mean() < 0.9
