"""Stock SGLang's SDAR classes, dense and mixture of experts, against the reference decoder and the trainer's replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dllm.config import resolve
from dllm.decoding import SamplingParams
from dllm.likelihood.exact import replay_logprobs
from tests.integration.conftest import LocalEngine, Request
from tests.integration.oracle import TOLERANCE, TinyModel, assert_same
from tests.support import write_tiny_sdar

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


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_the_reference_and_replays(heavy, models, kind):
    """Prompts that end within, before and behind a block of 4, sampled and greedy, alone and together.

    The replay is the trainer's packed forward pass. Labels that are shifted, another rotary base or another block size
    in the engine would decode other tokens at once.
    """
    tiny = models[kind]
    assert (tiny.config.block_size, tiny.config.architecture.startswith("SDAR")) == (4, True)
    cases = [tiny.case(n, SamplingParams(t)) for n in LENGTHS for t in TEMPERATURES]
    engine = heavy.use(f"sdar {kind}", lambda: LocalEngine(tiny)).engine
    samples = engine.sglang.loop.run_until_complete(_generate(engine, cases))
    for sample, case in zip(samples, cases, strict=True):
        assert_same(sample.trace, case.trace)
    traces = [sample.trace for sample in samples]
    with torch.no_grad():
        replayed = replay_logprobs(tiny.model, traces, tiny.config.mask_id)
    worst = max(float(np.abs(a.numpy() - t.logprob).max()) for a, t in zip(replayed, traces, strict=True))
    per_step = sum(len(t.replay_ids) for t in traces) / sum(sum(t.steps_per_block) for t in traces)
    print(f"{kind}: {sum(len(t.replay_ids) for t in traces)} tokens, {per_step:.2f} a step, |dlogp| {worst:.1e}")
    assert worst < TOLERANCE
    assert per_step > 1.2, "the schedule must reveal several tokens at some steps"


async def _generate(engine, cases):
    import asyncio

    from rollout.records import sample_from_response

    size = engine.block_diffusion.block_size

    async def one(case):
        request = Request.of(case)
        answer = await engine.sglang.async_generate(input_ids=list(case.prompt), sampling_params=request.sglang())
        return sample_from_response(answer, case.prompt, size, case.sampling, request.max_new_tokens, case.seed)

    return await asyncio.gather(*(one(case) for case in cases))
