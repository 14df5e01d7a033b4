"""Load and save checkpoints in Hugging Face layout.

Three published layouts of the experts are read: one tensor per expert (``experts.7.gate_proj.weight``), fused
per projection (``experts.gate_proj`` [E, I, H]) and fused gate and up (``experts.gate_up_proj`` [E, 2I, H]).
Written is the per-expert layout, which stock SGLang loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dllm.config import ConfigError, architecture_name, load_hf_config
from dllm.models import BlockDiffusionLM, meta_model, model_class

_PER_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_FUSED = re.compile(r"^(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj|gate_up_proj)(?:\.weight)?$")

SHARD_BYTES = 5 << 30
"""Size of a weights file at most; the published checkpoints have files of this size."""


def iterate_safetensors(model_dir: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint directory, file by file.

    Raises:
        ConfigError: there are no safetensors files.
    """
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model path {str(model_dir)!r} has no *.safetensors file; pass a complete checkpoint")
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, reader.get_tensor(name)


def fuse_experts(named: Iterable[tuple[str, Tensor]], num_experts: int) -> dict[str, Tensor]:
    """State dict with fused experts from any of the three layouts; a model without experts passes through.

    Raises:
        ConfigError: experts of a layer are incomplete.
    """
    state: dict[str, Tensor] = {}
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, tensor in named:
        if match := _PER_EXPERT.match(name):
            prefix, index, projection = match.groups()
            parts.setdefault((prefix, projection), {})[int(index)] = tensor
        elif match := _FUSED.match(name):
            prefix, projection = match.groups()
            if projection in ("gate_up_proj", "down_proj"):
                state[f"{prefix}.{projection}"] = tensor
            else:
                parts.setdefault((prefix, projection), {}).update(enumerate(tensor))
        else:
            state[name] = tensor
    for (prefix, projection), experts in parts.items():
        if sorted(experts) != list(range(num_experts)):
            raise ConfigError(f"{prefix}.{projection}: found {len(experts)} of {num_experts} experts")
    for prefix in sorted({prefix for prefix, _ in parts}):
        stacked = {
            projection: torch.stack([parts[prefix, projection][e] for e in range(num_experts)])
            for projection in ("gate_proj", "up_proj", "down_proj")
            if (prefix, projection) in parts
        }
        if "down_proj" in stacked:
            state[f"{prefix}.down_proj"] = stacked["down_proj"]
        if "gate_proj" in stacked and "up_proj" in stacked:
            state[f"{prefix}.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], 1)
    return state


def split_experts(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Published per-expert tensors from a state dict with fused experts; other tensors pass through."""
    for name, tensor in named:
        match = _FUSED.match(name)
        if match is None or tensor.dim() != 3:
            yield name, tensor
            continue
        prefix, projection = match.groups()
        for index, expert in enumerate(tensor):
            if projection == "gate_up_proj":
                gate, up = expert.chunk(2)
                yield f"{prefix}.{index}.gate_proj.weight", gate
                yield f"{prefix}.{index}.up_proj.weight", up
            else:
                yield f"{prefix}.{index}.{projection}.weight", expert


def load_model(
    model_dir: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> BlockDiffusionLM:
    """Load a checkpoint of one of ``dllm.models.MODELS``.

    Args:
        dtype: dtype of the weights; None keeps the checkpoint's. What the model's ``fp32_suffixes`` name stays fp32.

    Raises:
        ConfigError: the directory is not such a checkpoint, or tensors are missing or unexpected.
    """
    hf_config = load_hf_config(model_dir)
    model = meta_model(hf_config, model_dir)
    state = fuse_experts(iterate_safetensors(model_dir), model.shape.num_experts)
    expected = set(model.state_dict())
    if missing := sorted(expected - set(state)):
        raise ConfigError(f"{model_dir} lacks {len(missing)} tensors, e.g. {missing[0]}; the checkpoint is incomplete")
    if unexpected := sorted(set(state) - expected):
        raise ConfigError(f"{model_dir} has {len(unexpected)} unknown tensors, e.g. {unexpected[0]}")
    for name, tensor in state.items():
        target = torch.float32 if name.endswith(model.fp32_suffixes) else dtype or tensor.dtype
        state[name] = tensor.to(device=device, dtype=target)
    model.load_state_dict(state, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


def save_checkpoint(
    model_dir: str | Path,
    state: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``model.safetensors`` and ``config.json`` in the published per-expert layout.

    Args:
        state: state dict of the model.
        hf_config: its ``architectures`` says which model this is.
        dtype: dtype to write; None keeps each tensor's. What the model's ``fp32_suffixes`` name is written in fp32.
        shard_bytes: weights that are larger go into several files with an index, one file in memory at a time.
    """
    fp32 = model_class(architecture_name(hf_config)).fp32_suffixes
    root = Path(model_dir)
    root.mkdir(parents=True, exist_ok=True)
    config = root / "config.json"
    config.write_text(json.dumps(dict(hf_config), indent=2, sort_keys=True) + "\n")
    named = dict(split_experts(state.items()))
    dtypes = {n: torch.float32 if n.endswith(fp32) else dtype or tensor.dtype for n, tensor in named.items()}
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in named.items()}
    shards = _shards(sizes, shard_bytes)
    place: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: named[name].detach().to("cpu", dtypes[name]).contiguous().clone() for name in names}
        save_file(tensors, str(root / file), metadata={"format": "pt"})
        # safetensors creates files that nobody else may read; an engine may run as another user.
        (root / file).chmod(config.stat().st_mode & 0o777)
        place |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place}
        (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, grouped so that no group exceeds ``limit`` bytes unless a single tensor does."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
