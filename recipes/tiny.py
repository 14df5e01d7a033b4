"""Tiny LLaDA2 checkpoints in Hugging Face layout: configuration, fresh weights, tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from dllm.config import ConfigError
from dllm.models.base import init_weights
from dllm.models.checkpoint import save_checkpoint
from dllm.models.llada2 import LLaDA2Config, LLaDA2MoeModelLM
from recipes.tokenizer import save_tokenizer

CONFIGURATION_MODULE = Path(__file__).with_name("configuration_llada2_moe.py")


@dataclass
class TinyShape:
    """Sizes of a tiny LLaDA2. The first layer is dense, the others are mixtures of experts.

    A head dimension of 128 is that of the published models, so that kernels compiled for them serve tiny ones too.
    """

    layers: int = 4
    hidden: int = 96
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    intermediate: int = 256
    experts: int = 8
    experts_per_token: int = 2
    expert_intermediate: int = 64
    groups: int = 4
    top_groups: int = 2
    block_size: int = 32
    max_position: int = 2048


def hf_config(shape: TinyShape, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """config.json of a tiny LLaDA2 with every key that the published one has and stock SGLang reads.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    for key, value, divisor, of in (
        ("heads", shape.heads, shape.kv_heads, "kv_heads"),
        ("experts", shape.experts, shape.groups, "groups"),
        ("head_dim", shape.head_dim, 4, "4 (half of it is rotated in pairs)"),
    ):
        if value % divisor:
            raise ConfigError(f"{key}={value} is not a multiple of {of}; choose sizes that divide")
    config = {
        "architectures": ["LLaDA2MoeModelLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": f"{CONFIGURATION_MODULE.stem}.LLaDA2MoeConfig"},
        "block_size": shape.block_size,
        "dtype": "float32",
        "embedding_dropout": 0.0,
        "eos_token_id": tokenizer.eos_token_id,
        "first_k_dense_replace": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "mask_token_id": tokenizer.mask_token_id,
        "max_position_embeddings": shape.max_position,
        "model_type": "llada2_moe",
        "moe_intermediate_size": shape.expert_intermediate,
        "moe_router_enable_expert_bias": True,
        "n_group": shape.groups,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "pad_token_id": tokenizer.pad_token_id,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 600000.0,
        "rotary_dim": shape.head_dim // 2,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": shape.top_groups,
        "use_bias": False,
        "use_cache": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "vocab_size": len(tokenizer),
    }
    LLaDA2Config.from_hf(config)
    return config


def write_model_dir(
    path: str | Path,
    model: LLaDA2MoeModelLM,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a complete checkpoint directory: weights, config.json, its Python class, tokenizer.

    The directory loads in ``dllm.models.checkpoint.load_model``, in stock SGLang and in
    ``AutoConfig.from_pretrained(path, trust_remote_code=True)``.
    """
    root = Path(path)
    save_checkpoint(root, model.state_dict(), config, dtype)
    stops = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    (root / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")
    shutil.copyfile(CONFIGURATION_MODULE, root / CONFIGURATION_MODULE.name)
    save_tokenizer(tokenizer, root)


@torch.no_grad()
def shrink_weights(model: LLaDA2MoeModelLM, embedding: float = 0.2, residual: float = 0.5) -> None:
    """Scale fresh weights down for training from scratch.

    With small embeddings and small residual branches a small network learns rules before it learns examples by
    heart (Liu et al., "Omnigrok", ICLR 2023).
    """
    model.model.word_embeddings.weight.mul_(embedding)
    for name, parameter in model.named_parameters():
        if "down_proj" in name or name.endswith("attention.dense.weight"):
            parameter.mul_(residual)


def make_model_dir(
    path: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    head_std: float | None = None,
) -> LLaDA2MoeModelLM:
    """Write a tiny LLaDA2 with fresh fp32 weights into ``path`` and return the model.

    Args:
        shape: sizes; None takes the defaults.
        seed: of the weights.
        head_std: standard deviation of the head's weights, the mask token's row included; None scales by width.
    """
    config = hf_config(shape or TinyShape(), tokenizer)
    model = LLaDA2MoeModelLM(LLaDA2Config.from_hf(config))
    init_weights(model, seed, head_std)
    write_model_dir(path, model, config, tokenizer)
    return model
