"""The network against the same mathematics written without tricks."""

from __future__ import annotations

import json

import pytest
import torch

from dllm.config import ConfigError
from dllm.models.base import init_weights
from dllm.models.layers import RMSNorm, rotary_tables, rotate, selection_gap
from dllm.models.llada2 import LLaDA2Config, LLaDA2MoeModelLM
from dllm.reference import block_logits
from tests.support import DATA, SMALL_VOCAB, random_prompt, small_config, small_model


def naive_moe(moe, x: torch.Tensor) -> torch.Tensor:
    """One token at a time: sigmoid scores, groups by their two best biased scores, experts by biased score."""
    c = moe.gate.config
    size = c.num_experts // c.n_group
    out = []
    for token in x:
        score = (moe.gate.weight @ token).sigmoid()
        biased = (score + moe.gate.expert_bias).tolist()
        groups = [biased[g * size : (g + 1) * size] for g in range(c.n_group)]
        best_groups = sorted(range(c.n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))[: c.topk_group]
        allowed = [e for e in range(c.num_experts) if e // size in best_groups]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: c.num_experts_per_tok]
        total = sum(float(score[e]) for e in chosen)
        result = moe.shared_experts(token)
        for e in chosen:
            gate, up = moe.experts.gate_up_proj[e].chunk(2)
            inner = torch.nn.functional.silu(gate @ token) * (up @ token)
            weight = float(score[e]) / total * c.routed_scaling_factor
            result = result + weight * (moe.experts.down_proj[e] @ inner)
        out.append(result)
    return torch.stack(out)


@pytest.mark.parametrize("seed", range(3))
def test_mixture_of_experts(seed):
    moe = small_model(seed).model.layers[1].mlp
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        torch.testing.assert_close(moe(x[None])[0], naive_moe(moe, x), atol=1e-5, rtol=1e-4)


def test_the_bias_steers_the_choice_but_not_the_weights():
    model = small_model(0)
    gate = model.model.layers[1].mlp.gate
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.expert_bias.zero_()
        gate.expert_bias[5] = 10.0
        experts, weights = gate(x)
    assert (experts == 5).any(1).all()
    score = (x @ gate.weight.T).sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, score / score.sum(1, keepdim=True) * 2.5, atol=1e-5, rtol=1e-5)


def test_rotary_embedding_turns_pairs_of_half_the_head():
    """Rotation of the first half of the features, as complex numbers; the rest passes through."""
    dim, theta = 8, 600000.0
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([0, 1, 2, 70, 1000])
    got = rotate(x, *rotary_tables(position, dim, theta))
    frequency = theta ** (-torch.arange(0, dim, 2).double() / dim)
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), position[:, None] * frequency)
    turned = torch.complex(x[:, :4].double(), x[:, 4:8].double()) * turn
    torch.testing.assert_close(got[:, :4].double(), turned.real, atol=1e-4, rtol=0)
    torch.testing.assert_close(got[:, 4:8].double(), turned.imag, atol=1e-4, rtol=0)
    assert torch.equal(got[:, 8:], x[:, 8:])


def test_rms_norm_is_computed_in_fp32():
    norm = RMSNorm(64, 1e-6)
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 100).bfloat16()
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected.bfloat16())


def test_first_layer_is_dense():
    model = LLaDA2MoeModelLM(small_config(first_k_dense_replace=2))
    assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == [False, False, True]


def test_attention_is_bidirectional_in_a_block_and_causal_between_blocks():
    model, ids = small_model(0), torch.tensor(random_prompt(12))
    base = block_logits(model, ids, 4)
    changed = ids.clone()
    changed[11] = (changed[11] + 1) % SMALL_VOCAB
    assert (block_logits(model, changed, 4)[0] - base[0]).abs().max() > 1e-3, "first of the block sees the last"
    first = block_logits(model, ids[:8], 4)
    with torch.no_grad():
        from dllm.attention import dense_attention
        from dllm.reference import _clean_batch

        batch = _clean_batch(ids, 4)
        whole = model(batch.input_ids, batch.position, dense_attention(batch), lambda hidden, head: head(hidden[0]))
    torch.testing.assert_close(whole[4:8], first, atol=1e-5, rtol=0)


def test_selection_gap():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.45], [0.2, 0.2, 0.2, 0.1]])
    torch.testing.assert_close(selection_gap(scores, 2), torch.tensor([0.05, 0.0]), atol=1e-6, rtol=0)
    assert selection_gap(scores, 4).tolist() == [torch.inf, torch.inf]


def test_weights_are_reproducible_and_the_head_can_be_scaled():
    config = small_config()
    models = [LLaDA2MoeModelLM(config) for _ in range(3)]
    for model, seed, std in zip(models, (1, 1, 2), (None, None, 0.3), strict=True):
        init_weights(model, seed, std)
    first, second, third = (m.state_dict() for m in models)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])
    assert float(third["lm_head.weight"].std()) == pytest.approx(0.3, rel=0.1)


def published() -> dict:
    return json.loads((DATA / "llada2_mini_config.json").read_text())


def test_published_configuration():
    config = LLaDA2Config.from_hf(published())
    assert (config.num_experts, config.num_experts_per_tok, config.n_group, config.topk_group) == (256, 8, 8, 4)
    assert (config.rope_theta, config.rotary_dim, config.routed_scaling_factor) == (600000, 64, 2.5)


def test_rope_parameters_of_newer_configs():
    config = published()
    del config["rope_theta"], config["partial_rotary_factor"]
    config["rope_parameters"] = {"rope_theta": 1234.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
    read = LLaDA2Config.from_hf(config)
    assert (read.rope_theta, read.rotary_dim) == (1234.0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_function": "softmax"}, "config.json score_function='softmax' is not supported; LLaDA2 has 'sigmoid'"),
        ({"tie_word_embeddings": True}, "config.json tie_word_embeddings=True is not supported; LLaDA2 has False"),
        ({"rope_scaling": {"type": "yarn"}}, "config.json rope_scaling=.* is not supported"),
        ({"num_experts": 250}, "config.json n_group=8, topk_group=4 do not divide num_experts=250 into groups"),
        ({"topk_group": 9}, "config.json n_group=8, topk_group=9 do not divide"),
        ({"hidden_size": None}, "not a complete LLaDA2 configuration: .*hidden_size"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        LLaDA2Config.from_hf(published() | change)
