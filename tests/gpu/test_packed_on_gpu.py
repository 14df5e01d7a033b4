"""The packed forward on a GPU: compiled FlexAttention and grouped experts against the dense path."""

from __future__ import annotations

import pytest
import torch

from dllm.attention import dense_attention, flex_attention
from dllm.decoding import SamplingParams, make_decoder
from dllm.likelihood.exact import pack_traces, replay_logprobs, target_head
from dllm.models.llada2 import LLaDA2MoeModelLM, init_weights
from dllm.reference import decode
from tests.support import SMALL_MASK, random_prompt, sampling_batch, small_config, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def traces():
    model, decoder = small_model(seed=4), make_decoder("SelectThenSample", SMALL_MASK, {"threshold": 0.1})
    return [decode(model, random_prompt(n, n), decoder, block_size=32, max_new_tokens=70, seed=n) for n in (3, 32, 70)]


def test_fp32_log_probs_equal_those_of_the_cpu(traces):
    """Both the dense mask and FlexAttention reproduce what the CPU reference decoder logged."""
    model = small_model(seed=4).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    for attention in (dense_attention, flex_attention):
        with torch.no_grad():
            replayed = replay_logprobs(model, traces, SMALL_MASK, device="cuda", attention=attention)
        for got, trace in zip(replayed, traces, strict=True):
            torch.testing.assert_close(got.cpu(), torch.from_numpy(trace.logprob), atol=1e-3, rtol=0)


def test_bf16_flex_equals_bf16_dense(traces):
    model = LLaDA2MoeModelLM(small_config(hidden_size=64, moe_intermediate_size=32, head_dim=64))
    init_weights(model, 4)
    model = model.to("cuda", torch.bfloat16)
    batch = pack_traces(traces, SMALL_MASK, "cuda")
    sampling = sampling_batch([t.sampling for t in traces])
    sampling = type(sampling)(**{k: v.cuda() if torch.is_tensor(v) else v for k, v in vars(sampling).items()})
    head = target_head(batch, sampling, SMALL_MASK)
    with torch.no_grad():
        flex, dense = (
            model(batch.input_ids, batch.position, attention(batch), head).logprob
            for attention in (flex_attention, dense_attention)
        )
    assert float((flex - dense).abs().mean()) < 2e-2


def test_gradients_flow_through_flex_attention(traces):
    model = small_model(seed=4).cuda()
    (first, *_) = replay_logprobs(model, traces, SMALL_MASK, device="cuda", sampling=[SamplingParams()] * len(traces))
    first.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.model.layers[0].attention.query_key_value.weight.grad.abs().sum() > 0
