"""The engine against the reference decoder: same tokens, same steps, same log-probs, however requests meet.

Runs on the HTTP server with its default scheduling (first done, first out) and radix cache;
``test_engine_synchronous.py`` repeats the comparison in the other mode.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from dllm.config import resolve
from dllm.decoding import SamplingParams
from rollout.chat.blocks import Block, committed
from rollout.chat.source import Address
from rollout.client import Client
from rollout.generate import load_tokenizer
from rollout.params import GenerateParams, content_seed
from rollout.records import RolloutSample
from rollout.service import Finished
from tests.integration.conftest import Request
from tests.integration.oracle import THRESHOLD, TOLERANCE, Case, TinyModel, assert_same

LENGTHS = (1, 31, 32, 33, 64, 70)
TEMPERATURES = (1.0, 0.0)


@pytest.fixture(scope="module")
def cases(tiny: TinyModel) -> dict[tuple[int, float], Case]:
    """Responses of the reference decoder by prompt length and temperature."""
    made = {(n, t): tiny.case(n, SamplingParams(t)) for n in LENGTHS for t in TEMPERATURES}
    traces = [case.trace for case in made.values()]
    per_step = sum(len(t.replay_ids) for t in traces) / sum(sum(t.steps_per_block) for t in traces)
    assert per_step > 1.5, "the schedule must reveal several tokens at many steps"
    return made


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("length", LENGTHS)
def test_single(server, cases, length, temperature):
    """Twice, so that the second time the prompt's whole blocks come from the radix cache."""
    case = cases[length, temperature]
    for _ in range(2):
        (sample,) = server.generate([Request.of(case)])
        assert_same(sample.trace, case.trace)
        assert sample.finish_reason == ("stop" if sample.trace.visible < 50 else "length")


def test_prompts_are_found_in_the_radix_cache(server, tiny):
    prompt = tiny.prompt(70, variant=100)
    first, second = (server.answers([Request(prompt, seed=1)])[0]["meta_info"]["cached_tokens"] for _ in range(2))
    assert (first, second) == (0, 64), "whole blocks of the prompt, and never a negative number"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_batched_together(server, cases, temperature):
    batch = [cases[length, temperature] for length in LENGTHS]
    for sample, case in zip(server.generate([Request.of(c) for c in batch]), batch, strict=True):
        assert_same(sample.trace, case.trace)


def test_long_prompts_run_in_chunks(server, tiny, cases):
    """A prompt of many blocks takes few passes and changes nothing, for itself or for what is decoded beside it.

    The second time all of its blocks but some come from the radix cache, so that it denoises in the pass in which
    others still read their prompts.
    """
    long = [tiny.case(n) for n in (200, 351)]
    for batch in (long, [long[1], *cases.values(), tiny.case(130), long[0]]):
        for sample, case in zip(server.generate([Request.of(c) for c in batch]), batch, strict=True):
            assert_same(sample.trace, case.trace)


def counters(server) -> dict[str, float]:
    """Samples of ``/metrics`` with our prefix; labels are part of the name."""
    lines = server.client.get("/metrics", follow_redirects=True).text.splitlines()
    return {name: float(value) for name, value in (ln.rsplit(" ", 1) for ln in lines if ln.startswith("dllm_rollout:"))}


def test_metrics(server, tiny):
    """Every number that a person would plot, after three requests of which two are equal."""
    before = counters(server)
    requests = [Request(tiny.prompt(530, variant=70), seed=seed, more={"ignore_eos": True}) for seed in (1, 1, 2)]
    samples = server.generate(requests)
    after = counters(server)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    traces = [s.trace for s in samples]
    steps = [n for t in traces for n in t.steps_per_block]
    tokens = sum(len(t.replay_ids) for t in traces)
    assert grown["dllm_rollout:tokens_total"] == tokens and grown["dllm_rollout:denoise_steps_total"] == sum(steps)
    assert grown["dllm_rollout:steps_per_block_count"] == len(steps)
    assert grown["dllm_rollout:steps_per_block_sum"] == sum(steps)
    assert grown["dllm_rollout:confidence_count"] == tokens
    expected = sum(float(t.confidence.sum()) for t in traces)
    assert grown["dllm_rollout:confidence_sum"] == pytest.approx(expected, rel=1e-4)
    for name in ("queue_time_seconds", "run_time_seconds"):
        assert grown[f"dllm_rollout:{name}_count"] == 3
    assert grown['dllm_rollout:requests_total{reason="length"}'] == 3
    # 16 whole blocks of the prompt, of which no more than the first request's are computed; never one by one.
    passes, read = grown["dllm_rollout:prefill_passes_total"], grown["dllm_rollout:prefill_tokens_total"]
    assert 0 < passes <= 3 and read / passes > 32
    assert 0 < after["dllm_rollout:group_diversity"] < 1


def test_greedy_and_sampled_requests_in_one_batch(server, cases):
    for sample, case in zip(server.generate([Request.of(c) for c in cases.values()]), cases.values(), strict=True):
        assert_same(sample.trace, case.trace)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(0.6), SamplingParams(top_p=0.8), SamplingParams(0.9, 0.95, 40, 0.05), SamplingParams(top_k=1)],
    ids=["temperature", "top_p", "all filters", "top_k 1"],
)
def test_other_sampling_parameters(server, tiny, sampling):
    case = tiny.case(33, sampling)
    assert_same(server.generate([Request.of(case)])[0].trace, case.trace)


def test_groups_are_diverse_at_temperature_1_and_identical_at_0(server, tiny, cases):
    groups = {}
    for temperature in TEMPERATURES:
        case = cases[33, temperature]
        requests = [Request(case.prompt, case.sampling, seed=100 + i) for i in range(8)]
        groups[temperature] = {tuple(s.trace.replay_ids.tolist()) for s in server.generate(requests)}
    assert len(groups[1.0]) == 8
    assert groups[0.0] == {tuple(cases[33, 0.0].trace.replay_ids.tolist())}


def test_groups_without_seeds_are_diverse(server, tiny):
    samples = server.generate([Request(tiny.prompt(40))] * 6)
    assert len({tuple(s.trace.replay_ids.tolist()) for s in samples}) == 6


def test_same_seed_same_rollout_in_any_order(server, cases):
    batch = list(cases.values())
    forwards = [s.trace for s in server.generate([Request.of(c) for c in batch])]
    backwards = [s.trace for s in reversed(server.generate([Request.of(c) for c in batch[::-1]]))]
    halves = [s.trace for half in (batch[::2], batch[1::2]) for s in server.generate([Request.of(c) for c in half])]
    for first, second in zip(forwards, backwards, strict=True):
        assert_same(second, first)
    for first, second in zip(forwards[::2] + forwards[1::2], halves, strict=True):
        assert_same(second, first)


def test_invariants_of_the_log(server, tiny):
    """One reveal step per token, steps contiguous, one token or all above the threshold, a whole terminal block."""
    for sample in server.generate([Request(tiny.prompt(n, variant=50), seed=n) for n in LENGTHS]):
        trace = sample.trace
        trace.validate()
        assert (trace.reveal_step >= 0).all() and not (trace.replay_ids == tiny.config.mask_id).any()
        assert np.array_equal(trace.logprob, trace.logprob_raw)
        assert trace.weight_versions == ["default"] * len(trace.steps_per_block)
        for index, steps in enumerate(trace.steps_per_block):
            rows = trace.block_slice(index)
            for step in range(steps):
                confidence = trace.confidence[rows][trace.reveal_step[rows] == step]
                assert len(confidence) == 1 or (confidence > THRESHOLD).all()


def test_streamed_log_is_cumulative(server, cases):
    """The last chunk of a stream carries the same log as an answer in one piece."""
    case = cases[33, 1.0]
    body = {"input_ids": case.prompt, "sampling_params": Request.of(case).sglang(), "stream": True}
    with server.client.stream("POST", "/generate", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    last, visible = json.loads(lines[-1]), case.trace.visible
    assert last["output_ids"] == case.trace.replay_ids[:visible].tolist()
    np.testing.assert_allclose(last["meta_info"]["dllm_logprob"], case.trace.logprob[:visible], atol=TOLERANCE)


def streamed_blocks(source, prompt, params, seed, size) -> tuple[list[Block], RolloutSample]:
    """What the chat shows of a response, and the response."""
    blocks, position = [], len(prompt)
    for event in source.stream([prompt], params, seed=seed):
        if isinstance(event, Finished):
            return blocks, event.result
        blocks += committed(event.fields, position, size)
        position += len(event.fields["output_ids"])
    raise AssertionError("the stream ended without the response")


def test_chat_replays_what_was_decoded(server, tiny):
    """A stream read block by block: the last state of each block is its tokens, and all blocks are the answer."""
    size = tiny.config.block_size
    case = tiny.case(33, SamplingParams(1.0), seed_of=lambda prompt: content_seed(4, prompt, 0))
    address = Address(server.url)
    assert address.tokenizer_path == str(tiny.path) and address.ours
    source = address.source(load_tokenizer(str(tiny.path), False), resolve(tiny.path))
    assert isinstance(source, Client)
    blocks, finished = streamed_blocks(source, case.prompt, GenerateParams(case.sampling, 50), 4, size)
    assert_same(finished.trace, case.trace)
    assert len(blocks) == len(case.trace.steps_per_block) > 1
    assert [token for block in blocks for token in block.ids] == case.trace.replay_ids.tolist()
    assert sum(block.visible for block in blocks) == case.trace.visible
    for block, steps in zip(blocks, case.trace.steps_per_block, strict=True):
        states = list(block.states())
        assert len(states) == steps + 1 and states[-1] == block.ids
        hidden = [state.count(None) for state in states]
        assert hidden[0] == len(block.ids) and hidden == sorted(set(hidden), reverse=True), "every step reveals some"
