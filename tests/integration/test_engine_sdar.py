"""Stock SGLang's SDAR classes, dense and mixture of experts, against the reference decoder and the trainer."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from dllm.config import resolve
from dllm.decoding import SamplingParams
from dllm.likelihood.exact import replay_logprobs
from dllm.trace import RolloutTrace
from tests.integration.conftest import Request, Server
from tests.integration.oracle import TOLERANCE, Case, TinyModel, assert_same
from tests.integration.refresh import Sync
from tests.integration.test_actor_engine import actor, log_probs, make_batch, make_engine, verl
from tests.support import write_tiny_sdar

__all__ = ["verl"]

LENGTHS = (1, 3, 4, 5, 30)
TEMPERATURES = (1.0, 0.0)
KINDS = ("dense", "moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, TinyModel]:
    made = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp(kind)
        model = write_tiny_sdar(path, kind == "moe", seed=3)
        made[kind] = TinyModel(path, model, resolve(path))
    return made


@pytest.fixture
def sdar(heavy, models, tmp_path_factory):
    """A server of one kind."""
    return lambda kind: heavy.use(f"sdar {kind}", lambda: Server(models[kind], tmp_path_factory.mktemp("server")))


def traces_of(server: Server, cases: list[Case]) -> list[RolloutTrace]:
    return [sample.trace for sample in server.generate([Request.of(case) for case in cases])]


@pytest.mark.parametrize("kind", [pytest.param("moe", marks=pytest.mark.slow), "dense"])
def test_decodes_as_the_reference_and_replays(sdar, models, kind):
    """Prompts that end within, before and behind a block of 4, sampled and greedy, alone and together.

    The replay is the trainer's packed forward pass. Labels that are shifted, another rotary base or another block size
    in the engine would decode other tokens at once.
    """
    tiny = models[kind]
    assert (tiny.config.block_size, tiny.config.architecture.startswith("SDAR")) == (4, True)
    cases = [tiny.case(n, SamplingParams(t)) for n in LENGTHS for t in TEMPERATURES]
    traces = traces_of(sdar(kind), cases)
    for trace, case in zip(traces, cases, strict=True):
        assert_same(trace, case.trace)
    with torch.no_grad():
        replayed = replay_logprobs(tiny.model, traces, tiny.config.mask_id)
    worst = max(float(np.abs(a.numpy() - t.logprob).max()) for a, t in zip(replayed, traces, strict=True))
    per_step = sum(len(t.replay_ids) for t in traces) / sum(sum(t.steps_per_block) for t in traces)
    print(f"{kind}: {sum(len(t.replay_ids) for t in traces)} tokens, {per_step:.2f} a step, |dlogp| {worst:.1e}")
    assert worst < TOLERANCE
    assert per_step > 1.2, "the schedule must reveal several tokens at some steps"


def test_what_was_trained_decodes(sdar, models, verl):
    """A step of GRPO: the engine's rollouts, the actor's update on them, its weights in the engine, new rollouts.

    Engine and actor agree before and after, and the update moved both.
    """
    tiny, server = models["dense"], sdar("dense")
    cases = [tiny.case(n, SamplingParams(1.0)) for n in LENGTHS[1:]]
    before = traces_of(server, cases)
    engine = make_engine(verl, tiny.path, None)
    old = [v.numpy() for v in log_probs(verl, engine, before)["log_probs"]]
    for trace, values in zip(before, old, strict=True):
        np.testing.assert_allclose(values, trace.logprob, atol=TOLERANCE)
    with engine.train_mode(disable_auto_offload=True):
        loss = partial(verl.ppo_loss, config=actor(verl, "dapo_constant"))
        engine.train_batch(make_batch(verl, before, old), loss_function=loss)
    state = {name: p.full_tensor().detach() for name, p in engine.module.state_dict().items()}
    sync = Sync(server, tiny)
    try:
        report = sync.publisher.publish(state, "1")
    finally:
        sync.publisher.close()
    assert report.tensors == len(sync.layout.wire)
    after = traces_of(server, cases)
    new = log_probs(verl, engine, after)["log_probs"]
    for trace, values in zip(after, new, strict=True):
        assert set(trace.weight_versions) == {"1"}
        np.testing.assert_allclose(values.numpy(), trace.logprob, atol=TOLERANCE)
    again = log_probs(verl, engine, before)["log_probs"]
    assert max(float(np.abs(v.numpy() - o).max()) for v, o in zip(again, old, strict=True)) > 100 * TOLERANCE
