"""Greedy decoding against SGLang's own LowConfidence and JointThreshold, run unchanged under their own names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dllm.decoding import BlockBatch, SamplingParams, make_decoder
from rollout.engine import GenerateParams
from rollout.records import RolloutError
from tests.integration.conftest import JOINT_OPTIONS, STOCK, STOCK_JOINT
from tests.integration.oracle import TinyModel, assert_same
from tests.integration.test_engine_decoding import LENGTHS
from tests.support import sampling_batch

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


class TestJointThreshold:
    def test_temperature_0_gives_stock_tokens(self, stock_joint, tiny: TinyModel):
        """Edits, the end without a change and the end of the edit budget: all as in SGLang."""
        assert stock_joint.report.effective["dllm_algorithm"] == STOCK_JOINT
        decoder = make_decoder("JointThreshold", tiny.config.mask_id, JOINT_OPTIONS)
        traces = []
        for length in (1, 31, 40, 64):
            for variant in range(40):
                prompt = tiny.prompt(length, variant)
                trace, close = tiny.watched(prompt, decoder=decoder, sampling=SamplingParams(0), max_new_tokens=40)
                if not close:
                    traces.append(trace)
                    break
        assert len(traces) == 4 and sum(len(t.edits) for t in traces) > 10
        requests = [GenerateParams(SamplingParams(0), 40).to_sglang(None)] * 4
        prompts = [t.prompt_ids.tolist() for t in traces]
        for trace, answer in zip(
            traces, stock_joint.sglang.generate(input_ids=prompts, sampling_params=requests), strict=True
        ):
            assert answer["output_ids"] == trace.replay_ids[: trace.visible].tolist()

    @pytest.mark.parametrize("edit_threshold", [0.0, 0.3, 0.9])
    @pytest.mark.parametrize("budget", [0, 2, 16])
    def test_step_by_step(self, stock_joint, edit_threshold, budget):
        """SGLang's class and ours on the same logits, from the first step of a block to its end."""
        from sglang.srt.dllm.algorithm.joint_threshold import JointThreshold

        rows, size, vocab, mask = 40, 8, 12, 11
        options = {"threshold": 0.4, "edit_threshold": edit_threshold, "max_post_edit_steps": budget}
        settings = SimpleNamespace(
            block_size=size, mask_id=mask, first_done_first_out_mode=True, algorithm_config=options
        )
        stock, ours = JointThreshold(settings), make_decoder("JointThreshold", mask, options)
        generator = torch.Generator().manual_seed(budget)
        ids = torch.randint(0, mask, (rows, size), generator=generator)
        ids[:, 2:] = mask
        zero = torch.zeros(rows, dtype=torch.int64)
        batch = SimpleNamespace(input_ids=ids.clone().view(-1), batch_size=rows)
        states = stock.init_step_state(batch)
        blocks = BlockBatch(ids, ids != mask, zero, zero, zero, sampling_batch(SamplingParams(0), rows))
        edits = 0
        for step in range(ours.max_steps(size)):
            # The mask token is never the best one: there ours would not write it, and stock does.
            logits = torch.randn(rows, size, vocab, generator=generator) * 2
            logits[..., mask] = -9.0
            # Half of the blocks converge: their logits want what is already there.
            keep = (blocks.ids != mask) & (torch.arange(rows) % 2 == 0)[:, None]
            logits.scatter_add_(2, blocks.ids[..., None], 30.0 * keep[..., None].float())
            done = stock.step(batch, logits.clone().view(-1, vocab), states)
            result = ours.step(blocks, logits)
            assert batch.input_ids.view(rows, size).tolist() == result.ids.tolist(), step
            assert done == result.done.tolist(), step
            edits += int(((result.ids != blocks.ids) & (blocks.ids != mask)).sum())
            blocks = BlockBatch(result.ids, blocks.given, zero, zero + step + 1, result.counter, blocks.sampling)
        assert all(done) and edits > 0
