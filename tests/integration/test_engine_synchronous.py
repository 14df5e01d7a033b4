"""``rollout.engine.Engine`` with synchronous blocks and without radix cache, against the reference decoder."""

from __future__ import annotations

import pytest

from dllm.config import ConfigError
from dllm.decoding import SamplingParams
from dllm.noise import sample_seed
from rollout.engine import GenerateParams, content_seed, greedy
from rollout.service import Block, Finished
from tests.integration.invariance import BATCH, NEW_TOKENS, SAMPLING, assert_same_tokens
from tests.integration.oracle import assert_same
from tests.integration.test_engine_decoding import LENGTHS, TEMPERATURES

PARAMS = GenerateParams(max_new_tokens=50)


def first_seed(prompt: list[int]) -> int:
    return content_seed(4, prompt, 0)


def test_settings_are_the_opposite_of_the_defaults(synchronous):
    args = synchronous.sglang.server_args
    assert args.dllm_fdfo is False and args.disable_radix_cache is True
    assert synchronous.report.effective["max_running_requests"] > 1


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_batched_together(synchronous, tiny, temperature):
    params = GenerateParams(SamplingParams(temperature), 50)
    cases = [tiny.case(n, params.sampling, seed_of=first_seed) for n in LENGTHS]
    samples = synchronous.generate([c.prompt for c in cases], params, seed=4)
    for (sample,), case in zip(samples, cases, strict=True):
        assert sample.seed == case.seed
        assert_same(sample.trace, case.trace)


def test_long_prompts_run_in_chunks(synchronous, tiny):
    cases = [tiny.case(n, seed_of=first_seed) for n in (351, 5, 70)]
    for (sample,), case in zip(synchronous.generate([c.prompt for c in cases], PARAMS, seed=4), cases, strict=True):
        assert_same(sample.trace, case.trace)


def test_batches_give_what_each_request_gives_alone(alone, synchronous, tiny):
    """Alone first done, first out with a radix cache; here in batches, synchronously and without one."""
    made = {}
    for sampling in SAMPLING:
        numbers = [i for i, request in enumerate(alone.requests) if request.sampling == sampling]
        for part in (numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)):
            prompts = [alone.requests[i].prompt for i in part]
            groups = synchronous.generate(prompts, GenerateParams(sampling, NEW_TOKENS), seed=0)
            made |= {i: sample for i, (sample,) in zip(part, groups, strict=True)}
    assert_same_tokens(tiny, alone, [made[i] for i in range(len(alone.requests))])


@pytest.mark.parametrize("length", LENGTHS)
def test_single_and_repeated(synchronous, tiny, length):
    """Without a cache the second time computes everything again; the result is the same."""
    case = tiny.case(length, seed_of=first_seed)
    for _ in range(2):
        ((sample,),) = synchronous.generate([case.prompt], PARAMS, seed=4)
        assert_same(sample.trace, case.trace)


def test_samples_of_a_group(synchronous, tiny):
    """Equal prompts count as further samples; at temperature 1 they are diverse, at 0 identical."""
    prompt = tiny.prompt(12)
    (group,) = synchronous.generate([prompt], PARAMS, n=6, seed=3)
    assert [s.seed for s in group] == [content_seed(3, prompt, i) for i in range(6)]
    repeated = [s.seed for samples in synchronous.generate([prompt] * 3, PARAMS, n=2, seed=3) for s in samples]
    assert repeated == [s.seed for s in group]
    assert len({tuple(s.trace.replay_ids.tolist()) for s in group}) == 6
    (cold,) = synchronous.generate([prompt], greedy(PARAMS), n=6, seed=3)
    assert len({tuple(s.trace.replay_ids.tolist()) for s in cold}) == 1


def test_samples_are_announced_when_they_are_complete(synchronous, tiny):
    seen = []
    prompts = [tiny.prompt(5), tiny.prompt(40)]
    result = synchronous.generate(prompts, PARAMS, n=2, seed=0, on_sample=lambda p, s, made: seen.append((p, s, made)))
    assert sorted((p, s) for p, s, _ in seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(result[p][s] is made for p, s, made in seen)


def test_a_bad_prompt_is_refused_before_anything_is_generated(synchronous, tiny):
    seen = []
    with pytest.raises(ConfigError, match="prompt holds the mask token 5, which stands for a hidden position"):
        synchronous.generate([tiny.prompt(5), [7, 5]], on_sample=lambda *event: seen.append(event))
    assert not seen


def test_the_local_engine_streams_the_same(synchronous, tiny):
    params = GenerateParams(SamplingParams(0.8), max_new_tokens=70)
    whole = synchronous.generate([tiny.prompt(17)], params, n=2, seed=3)
    events = list(synchronous.stream([tiny.prompt(17)], params, n=2, seed=3))
    for event in events:
        if isinstance(event, Finished):
            one, other = event.result, whole[0][event.sample]
            assert_same(one.trace, other.trace)
            assert (one.text, one.finish_reason, one.seed) == (other.text, other.finish_reason, other.seed)
    assert sum(isinstance(e, Block) for e in events) >= 4


def test_incremental_streams_give_the_same(synchronous, tiny, monkeypatch):
    """With SGLang's --incremental-streaming-output its answers hold what is new only."""
    params = GenerateParams(SamplingParams(0.8), max_new_tokens=70)
    whole = synchronous.generate([tiny.prompt(17)], params, seed=3)[0][0]
    monkeypatch.setattr(synchronous.sglang.tokenizer_manager, "incremental_streaming_output", True)
    again = synchronous.generate([tiny.prompt(17)], params, seed=3)[0][0]
    assert len(again.trace.steps_per_block) > 2
    assert_same(again.trace, whole.trace)
    assert (again.text, again.finish_reason) == (whole.text, whole.finish_reason)


def test_texts_messages_steps_and_deadlines(synchronous):
    """As the client of a server takes them."""
    tokenizer = synchronous.sglang.tokenizer_manager.tokenizer
    messages = [{"role": "user", "content": "2 + 3 ="}]
    ids = [
        tokenizer.encode("2 + 3 ="),
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
    ]
    seen = []
    groups = synchronous.generate(
        ["2 + 3 =", messages], PARAMS, n=2, seed=1, step=7, on_sample=lambda i, j, sample: seen.append((i, j))
    )
    for i, group in enumerate(groups):
        for j, sample in enumerate(group):
            assert sample.trace.prompt_ids.tolist() == ids[i] and sample.seed == sample_seed(1, 7, i, j)
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ((cut,),) = synchronous.generate([ids[0]], GenerateParams(max_new_tokens=1500, ignore_eos=True), deadline=0.5)
    assert cut.finish_reason == "abort" and cut.trace.visible < 1500
