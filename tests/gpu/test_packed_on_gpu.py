"""The packed forward on a GPU: compiled FlexAttention and grouped experts against the dense path."""

from __future__ import annotations

import pytest
import torch

from dllm.attention import FLEX_TILE, dense_attention, flex_attention
from dllm.decoding import SamplingBatch, make_decoder
from dllm.likelihood.exact import replay_logprobs, scatter_targets, target_head
from dllm.models.base import init_weights
from dllm.models.llada2 import LLaDA2MoeModelLM
from dllm.reference import decode
from dllm.replay import PackedBatch, build_slices, pack
from tests.support import SMALL_MASK, random_prompt, small_config, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def traces():
    model, decoder = small_model(seed=4), make_decoder("SelectThenSample", SMALL_MASK, {"threshold": 0.1})
    return [decode(model, random_prompt(n, n), decoder, block_size=32, max_new_tokens=70, seed=n) for n in (3, 32, 70)]


def packed(traces) -> PackedBatch:
    """One long row, which both implementations can take."""
    samples = [build_slices(trace, SMALL_MASK) for trace in traces]
    return pack(samples, 32, sum(s.packed_length for s in samples), FLEX_TILE).to("cuda")


def logprobs(model, traces, attention) -> torch.Tensor:
    batch = packed(traces)
    sampling = SamplingBatch.from_params([t.sampling for t in traces], [0] * len(traces), "cuda")
    values = model(batch.input_ids, batch.position, attention(batch), target_head(batch, sampling, SMALL_MASK))
    return torch.cat(scatter_targets(batch, values.logprob, [len(t.replay_ids) for t in traces]))


@pytest.mark.parametrize("attention", [dense_attention, flex_attention])
def test_fp32_log_probs_equal_those_of_the_cpu(traces, attention):
    """Both the dense mask and FlexAttention reproduce what the CPU reference decoder logged."""
    model = small_model(seed=4).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        got = logprobs(model, traces, attention)
    logged = torch.cat([torch.from_numpy(trace.logprob) for trace in traces])
    torch.testing.assert_close(got.cpu(), logged, atol=1e-3, rtol=0)


def test_the_choice_for_the_device_gives_the_same(traces):
    """What the trainer uses: prefixes shared, rows by length, attention by row length."""
    model = small_model(seed=4).cuda()
    with torch.no_grad():
        replayed = torch.cat(replay_logprobs(model, traces, SMALL_MASK, device="cuda"))
        torch.testing.assert_close(replayed, logprobs(model, traces, flex_attention), atol=1e-3, rtol=0)


def test_bf16_flex_equals_bf16_dense(traces):
    model = LLaDA2MoeModelLM(small_config(hidden_size=64, moe_intermediate_size=32, head_dim=64))
    init_weights(model, 4)
    model = model.to("cuda", torch.bfloat16)
    with torch.no_grad():
        flex, dense = (logprobs(model, traces, attention) for attention in (flex_attention, dense_attention))
    assert float((flex - dense).abs().mean()) < 2e-2


def test_gradients_of_flex_attention_are_those_of_the_dense_mask(traces):
    grads = []
    for attention in (flex_attention, dense_attention):
        model = small_model(seed=4).cuda()
        logprobs(model, traces, attention).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], atol=1e-2, rtol=1e-2)
