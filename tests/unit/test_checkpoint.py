"""Checkpoints in Hugging Face layout: three layouts of the experts, round trips, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.config import ConfigError
from dllm.models.checkpoint import fuse_experts, iterate_safetensors, load_model, save_checkpoint, split_experts
from dllm.models.llada2 import LLaDA2MoeModelLM
from tests.support import small_config, small_model

PREFIX = "model.layers.1.mlp.experts"


def hf_config() -> dict:
    return {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", **asdict(small_config())}


@pytest.fixture(scope="module")
def model() -> LLaDA2MoeModelLM:
    return small_model(seed=7)


def per_projection(state: dict) -> dict:
    """Experts fused per projection, with and without the suffix ``.weight``."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            out[f"{prefix}.gate_proj.weight"], out[f"{prefix}.up_proj"] = gate.contiguous(), up.contiguous()
        else:
            out[name] = tensor
    return out


LAYOUTS = {
    "per expert": lambda state: dict(split_experts(state.items())),
    "fused per projection": per_projection,
    "fused gate and up": dict,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_layout_loads(tmp_path, model, layout, shards):
    tensors = {k: v.detach().contiguous().clone() for k, v in LAYOUTS[layout](model.state_dict()).items()}
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, str(tmp_path / f"model-{shard + 1:05}-of-{shards:05}.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    loaded = load_model(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert all(p.requires_grad for p in loaded.parameters())


def test_what_is_saved_has_published_names_and_loads_again(tmp_path, model):
    save_checkpoint(tmp_path, model.state_dict(), hf_config())
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {
        f"{PREFIX}.7.gate_proj.weight",
        f"{PREFIX}.0.down_proj.weight",
        "model.layers.1.mlp.gate.expert_bias",
    } <= names
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in names)
    again = load_model(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_the_router_stays_in_fp32(tmp_path, model):
    save_checkpoint(tmp_path, model.state_dict(), hf_config(), torch.bfloat16)
    for name, tensor in iterate_safetensors(tmp_path):
        router = name.endswith(("mlp.gate.weight", "mlp.gate.expert_bias"))
        assert tensor.dtype == (torch.float32 if router else torch.bfloat16), name
    loaded = load_model(tmp_path, torch.bfloat16).state_dict()
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(loaded[name], model.state_dict()[name])
    assert loaded["lm_head.weight"].dtype == torch.bfloat16


def test_a_bf16_checkpoint_can_be_loaded_in_fp32(tmp_path, model):
    save_checkpoint(tmp_path, model.state_dict(), hf_config(), torch.bfloat16)
    assert {p.dtype for p in load_model(tmp_path, torch.float32).parameters()} == {torch.float32}


def test_splitting_and_fusing_are_inverse(model):
    state = model.state_dict()
    fused = fuse_experts(split_experts(state.items()), 8)
    assert fused.keys() == state.keys()
    assert all(torch.equal(fused[name], state[name]) for name in state)


def test_missing_experts_are_named(model):
    pairs = [(n, t) for n, t in split_experts(model.state_dict().items()) if n != f"{PREFIX}.3.up_proj.weight"]
    with pytest.raises(ConfigError, match=f"{PREFIX}.up_proj: found 7 of 8 experts"):
        fuse_experts(pairs, 8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), "lacks 1 tensors, e.g. model.norm.weight; the checkpoint is incomplete"),
        (lambda s: s.pop("model.layers.2.mlp.gate.expert_bias"), "lacks 1 tensors, e.g. .*expert_bias"),
        (lambda s: s.update({"model.extra.weight": torch.zeros(1)}), "has 1 unknown tensors, e.g. model.extra.weight"),
    ],
)
def test_incomplete_and_foreign_checkpoints_are_refused(tmp_path, model, edit, message):
    state = dict(model.state_dict())
    edit(state)
    save_checkpoint(tmp_path, state, hf_config())
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_no_weights_at_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    with pytest.raises(ConfigError, match=r"has no \*.safetensors file; pass a complete checkpoint"):
        load_model(tmp_path)


def test_another_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config() | {"architectures": ["NewModel"]}))
    with pytest.raises(
        ConfigError, match=r"architecture 'NewModel' of .* has no trainer model; use one of \['LLaDA2MoeModelLM', "
    ):
        load_model(tmp_path)
