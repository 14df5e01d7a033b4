"""SDAR: the network against the same mathematics written plainly, and both families against what is published."""

from __future__ import annotations

import json

import pytest
import torch

from dllm.config import ConfigError
from dllm.models import MODELS
from dllm.models.checkpoint import load_model, save_checkpoint
from dllm.reference import block_logits
from tests.support import DATA, SMALL_VOCAB, random_prompt, sdar_hf_config, small_sdar
from weight_sync.layout import CheckpointLayout

KINDS = pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])


def published(name: str) -> dict:
    return json.loads((DATA / f"{name}_config.json").read_text())


def naive_logits(model, ids: list[int], block: int) -> torch.Tensor:
    """One token, one head, one expert at a time in fp64; a token sees every block up to its own."""
    c, w = model.shape, {name: tensor.double() for name, tensor in model.state_dict().items()}
    norm = lambda v, weight: v / (v.pow(2).mean() + c.rms_norm_eps).sqrt() * weight
    half = c.head_dim // 2
    frequency = c.rope_theta ** (-torch.arange(half).double() / half)

    def turned(v: torch.Tensor, position: int) -> torch.Tensor:
        pair = torch.complex(v[:half], v[half:]) * torch.polar(torch.ones(half).double(), position * frequency)
        return torch.cat([pair.real, pair.imag])

    def mlp(v, gate, up, down):
        return down @ (torch.nn.functional.silu(gate @ v) * (up @ v))

    x = [w["model.embed_tokens.weight"][i] for i in ids]
    for index in range(c.num_hidden_layers):
        p = f"model.layers.{index}"
        h = [norm(v, w[f"{p}.input_layernorm.weight"]) for v in x]
        heads = lambda v, name, p=p: (w[f"{p}.self_attn.{name}_proj.weight"] @ v).view(-1, c.head_dim)
        q = [[turned(norm(a, w[f"{p}.self_attn.q_norm.weight"]), i) for a in heads(v, "q")] for i, v in enumerate(h)]
        k = [[turned(norm(a, w[f"{p}.self_attn.k_norm.weight"]), i) for a in heads(v, "k")] for i, v in enumerate(h)]
        value = [heads(v, "v") for v in h]
        shared = c.num_attention_heads // c.num_key_value_heads
        for i in range(len(ids)):
            seen, out = range(min(len(ids), (i // block + 1) * block)), []
            for a in range(c.num_attention_heads):
                score = torch.stack([q[i][a] @ k[j][a // shared] for j in seen]) / c.head_dim**0.5
                weight = score.softmax(0)
                out.append(sum(weight[j] * value[j][a // shared] for j in seen))
            x[i] = x[i] + w[f"{p}.self_attn.o_proj.weight"] @ torch.cat(out)
        for i in range(len(ids)):
            v = norm(x[i], w[f"{p}.post_attention_layernorm.weight"])
            if not c.num_experts:
                x[i] = x[i] + mlp(v, *(w[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
                continue
            share = (w[f"{p}.mlp.gate.weight"] @ v).softmax(0)
            chosen = sorted(range(c.num_experts), key=lambda e: -float(share[e]))[: c.num_experts_per_tok]
            total = sum(share[e] for e in chosen) if c.norm_topk_prob else 1.0
            for e in chosen:
                gate, up = w[f"{p}.mlp.experts.gate_up_proj"][e].chunk(2)
                x[i] = x[i] + share[e] / total * mlp(v, gate, up, w[f"{p}.mlp.experts.down_proj"][e])
    return torch.stack([w["lm_head.weight"] @ norm(v, w["model.norm.weight"]) for v in x[-block:]])


@pytest.mark.parametrize(
    ("moe", "changes"),
    [(False, {}), (True, {}), (True, {"norm_topk_prob": False})],
    ids=["dense", "moe", "moe, weights not normalised"],
)
def test_forward(moe, changes):
    model, ids = small_sdar(moe, 1, num_hidden_layers=2, **changes), random_prompt(12, vocab=SMALL_VOCAB)
    got = block_logits(model, torch.tensor(ids), 4)
    torch.testing.assert_close(got.double(), naive_logits(model, ids, 4), atol=2e-4, rtol=1e-4)


@KINDS
def test_router_gaps(moe):
    model, ids = small_sdar(moe), torch.tensor(random_prompt(8))
    model.record_router_gaps(True)
    block_logits(model, ids, 4)
    gap = model.router_gap()
    assert gap.shape == (8,) and bool((gap >= 0).all())
    assert bool(torch.isfinite(gap).all()) == moe
    assert model.fp32_modules() == []


@KINDS
def test_round_trip(tmp_path, moe):
    """Everything, the router too, is written in the dtype asked for: stock SGLang's router has the model's dtype."""
    model, config = small_sdar(moe, 5), sdar_hf_config(moe, vocab_size=SMALL_VOCAB)
    save_checkpoint(tmp_path / "exact", model.state_dict(), config)
    again = load_model(tmp_path / "exact").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    save_checkpoint(tmp_path / "rounded", model.state_dict(), config, torch.bfloat16)
    assert {t.dtype for t in load_model(tmp_path / "rounded").state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "tensors", "width", "published_size", "rounding"),
    [
        ("llada2_mini", 14_813, 2, 32_511_286_784, 0),
        ("llada2_flash", 24_161, 1, 102.9e9, 0.05e9),
        ("sdar_4b", 399, 2, 4.97e9 + 3.86e9, 2 * 0.005e9),
        ("sdar_8b", 399, 2, 4.9e9 + 4.92e9 + 4.98e9 + 1.58e9, 4 * 0.005e9),
        ("sdar_30b_a3b", 18_867, 2, 61_064_245_248, 0),
    ],
)
def test_counts_of_published_models(name, tensors, width, published_size, rounding):
    """Names and elements (buffers included) of the published configurations, on the meta device.

    Published are the bytes in bf16 (width 2): by the weight index of LLaDA2.0-mini and SDAR-30B-A3B-Chat to the byte,
    by the sizes of the files of SDAR-4B-Chat and SDAR-8B-Chat; of flash the parameters, 102.9 B.
    """
    specs = CheckpointLayout.from_config(published(name)).specs
    elements = sum(torch.Size(s.shape).numel() for s in specs.values())
    print(f"{name}: {len(specs)} tensors, {elements:,} elements")
    assert len(specs) == tensors
    assert abs(width * elements - published_size) <= rounding


def test_names_of_sdar():
    names = set(CheckpointLayout.from_config(published("sdar_30b_a3b")).specs)
    layer = [n.removeprefix("model.layers.47.") for n in names if n.startswith("model.layers.47.")]
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} == {
        n for n in names if ".layers." not in n
    }
    assert sorted(n for n in layer if ".experts." not in n) == [
        "input_layernorm.weight",
        "mlp.gate.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{n}.weight" for n in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")),
    ]
    assert {n for n in layer if ".experts.127." in n} == {
        f"mlp.experts.127.{n}_proj.weight" for n in ("gate", "up", "down")
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.word_embeddings.weight", (157184, 4096)),
        ("model.layers.0.mlp.gate_proj.weight", (9216, 4096)),
        ("model.layers.31.attention.query_key_value.weight", (5120, 4096)),
        ("model.layers.31.attention.dense.weight", (4096, 4096)),
        ("model.layers.31.mlp.gate.expert_bias", (256,)),
        ("model.layers.31.mlp.experts.255.down_proj.weight", (4096, 1024)),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", (1024, 4096)),
    ],
)
def test_shapes_of_flash(name, shape):
    assert CheckpointLayout.from_config(published("llada2_flash")).specs[name].shape == shape


@pytest.mark.parametrize(
    ("moe", "change", "message"),
    [
        (False, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported; SDAR has False"),
        (False, {"attention_bias": True}, "attention_bias=True is not supported"),
        (False, {"rope_scaling": {"type": "yarn"}}, "rope_scaling=.* is not supported"),
        (False, {"head_dim": None}, "not a complete SDAR configuration: .*head_dim"),
        (True, {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] is not supported; SDAR has \[\]"),
        (True, {"num_experts": None}, r"not a complete SDAR configuration: missing \['num_experts'\]"),
        (True, {"num_experts_per_tok": 129}, "num_experts_per_tok=129 is not in 1 to num_experts=128"),
    ],
)
def test_unsupported_configurations_are_refused(moe, change, message):
    config = published("sdar_30b_a3b" if moe else "sdar_8b") | change
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        MODELS[config["architectures"][0]].from_hf(config)
