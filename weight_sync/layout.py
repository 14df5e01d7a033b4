"""Which tensors an engine must receive: names, shapes and dtypes of a checkpoint, derived from its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm.models.checkpoint import FP32_SUFFIXES, split_experts
from dllm.models.llada2 import LLaDA2Config


class LayoutError(ValueError):
    """Tensors do not match what the engine needs; nothing was sent."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint: Hugging Face name, full (unsharded) shape, dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class LLaDA2Layout:
    """Tensors of a LLaDA2 checkpoint in the published per-expert naming.

    Args:
        config: sizes of the network.
        dtype: dtype of the engine's weights; the router's weight and bias are always fp32, because a rounded
            bias changes which experts are chosen (sglang PR 37133).
    """

    def __init__(self, config: LLaDA2Config, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.specs = {spec.name: spec for spec in _llada2_specs(config, dtype)}

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> LLaDA2Layout:
        """Layout of a published config.json."""
        return cls(LLaDA2Config.from_hf(hf_config), dtype)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def normalise(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Split fused experts, cast to the wire dtype and check every tensor as it passes.

        Raises:
            LayoutError: a tensor is unexpected, duplicate or of the wrong shape, or one is missing at the end.
        """
        missing = dict(self.specs)
        for name, tensor in split_experts(named):
            spec = missing.pop(name, None)
            if spec is None:
                what = "sent twice" if name in self.specs else "not part of this checkpoint"
                raise LayoutError(f"tensor {name!r} is {what}; send every tensor of the checkpoint once")
            if tuple(tensor.shape) != spec.shape:
                raise LayoutError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the engine needs {spec.shape}")
            yield name, tensor.detach().to(spec.dtype)
        if missing:
            raise LayoutError(
                f"{len(missing)} of {len(self.specs)} tensors are missing, e.g. {next(iter(missing))!r}; send buffers "
                "(expert_bias) as well as parameters"
            )


def _llada2_specs(c: LLaDA2Config, dtype: torch.dtype) -> Iterator[TensorSpec]:
    hidden = c.hidden_size

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, shape, torch.float32 if name.endswith(FP32_SUFFIXES) else dtype)

    def mlp(prefix: str, inner: int) -> Iterator[TensorSpec]:
        yield spec(f"{prefix}.gate_proj.weight", inner, hidden)
        yield spec(f"{prefix}.up_proj.weight", inner, hidden)
        yield spec(f"{prefix}.down_proj.weight", hidden, inner)

    yield spec("model.word_embeddings.weight", c.vocab_size, hidden)
    yield spec("model.norm.weight", hidden)
    yield spec("lm_head.weight", c.vocab_size, hidden)
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}"
        yield spec(f"{p}.input_layernorm.weight", hidden)
        yield spec(f"{p}.post_attention_layernorm.weight", hidden)
        heads = c.num_attention_heads + 2 * c.num_key_value_heads
        yield spec(f"{p}.attention.query_key_value.weight", heads * c.head_dim, hidden)
        yield spec(f"{p}.attention.dense.weight", hidden, c.num_attention_heads * c.head_dim)
        yield spec(f"{p}.attention.query_layernorm.weight", c.head_dim)
        yield spec(f"{p}.attention.key_layernorm.weight", c.head_dim)
        if layer < c.first_k_dense_replace:
            yield from mlp(f"{p}.mlp", c.intermediate_size)
            continue
        yield spec(f"{p}.mlp.gate.weight", c.num_experts, hidden)
        yield spec(f"{p}.mlp.gate.expert_bias", c.num_experts)
        for expert in range(c.num_experts):
            yield from mlp(f"{p}.mlp.experts.{expert}", c.moe_intermediate_size)
        yield from mlp(f"{p}.mlp.shared_experts", c.moe_intermediate_size * c.num_shared_experts)
