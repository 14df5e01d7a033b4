"""Greedy decoding against SGLang's own LowConfidence, run unchanged under its own name."""

from __future__ import annotations

import pytest

from dllm.decoding import SamplingParams
from rollout.engine import GenerateParams
from rollout.records import RolloutError
from tests.integration.conftest import STOCK
from tests.integration.oracle import TinyModel, assert_same
from tests.integration.test_engine_decoding import LENGTHS

LIMIT = 88


def test_it_is_the_stock_class(stock):
    assert stock.report.effective["dllm_algorithm"] == STOCK


def test_temperature_0_gives_stock_tokens(stock, tiny: TinyModel):
    """The reference at temperature 0, which the engine's decoder equals (``test_engine_decoding.py``), equals stock."""
    cases = [tiny.case(n, SamplingParams(0), max_new_tokens=LIMIT) for n in LENGTHS]
    requests = [GenerateParams(SamplingParams(0), LIMIT).to_sglang(None)] * len(cases)
    answers = stock.sglang.generate(input_ids=[c.prompt for c in cases], sampling_params=requests)
    for case, answer in zip(cases, answers, strict=True):
        assert "dllm_block" not in answer["meta_info"], "stock logs nothing"
        assert answer["output_ids"] == case.trace.replay_ids[: case.trace.visible].tolist()
        low = tiny.reference(case.prompt, "LowConfidence", sampling=SamplingParams(1), max_new_tokens=LIMIT)
        assert_same(low, case.trace)


def test_its_answers_cannot_pass_for_rollouts(stock, tiny):
    with pytest.raises(RolloutError, match="without a reveal log; .* use one of its decoders"):
        stock.generate([tiny.prompt(9)], GenerateParams(SamplingParams(0), 20))
