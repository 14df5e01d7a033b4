"""Which tensors an engine must receive: names, shapes and dtypes of a checkpoint, derived from its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm.models import BlockDiffusionLM, model_class
from dllm.models.checkpoint import split_experts


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


class CheckpointLayout:
    """Tensors of a checkpoint in the published naming, one per expert.

    Args:
        model: the network, on any device: its names and shapes count, not its weights.
        dtype: dtype of the engine's weights; what the model's ``fp32_suffixes`` name is always fp32, because a rounded
            router or bias changes which experts are chosen (sglang PR 37133).
    """

    def __init__(self, model: BlockDiffusionLM, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.specs: dict[str, TensorSpec] = {}
        for name, tensor in split_experts(model.state_dict().items()):
            wire = torch.float32 if name.endswith(model.fp32_suffixes) else dtype
            self.specs[name] = TensorSpec(name, tuple(tensor.shape), wire)

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> CheckpointLayout:
        """Layout of a published config.json.

        Raises:
            ConfigError: its architecture is not one of ``dllm.models.MODELS``.
        """
        with torch.device("meta"):
            model = model_class((hf_config.get("architectures") or ["unknown"])[0]).from_hf(hf_config)
        return cls(model, dtype)

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
