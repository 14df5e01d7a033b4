"""Which tensors an engine must receive: names, shapes and dtypes of a checkpoint, derived from its config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from dllm.models import BlockDiffusionLM, meta_model
from dllm.models.checkpoint import split_experts
from weight_sync.buckets import largest_bucket


class LayoutError(ValueError):
    """Tensors do not match what the engine needs; the engine keeps its weights."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint: Hugging Face name, full (unsharded) shape, dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """Where a tensor of one of the accepted layouts belongs: ``wire[index]``.

    Attributes:
        cells: names of the published tensors that it stands for.
    """

    wire: str
    index: tuple[Any, ...]
    shape: tuple[int, ...]
    cells: tuple[str, ...]


@dataclass
class Assembly:
    """A tensor of the wire that is made of pieces of the source (a ``weight_sync.buckets.Source``)."""

    spec: TensorSpec
    pieces: list[tuple[tuple[Any, ...], Tensor]] = field(default_factory=list)
    missing: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        return self.pieces[0][1].device

    def write(self, out: Tensor, start: int) -> None:
        for index, tensor in self.pieces:
            if not index:
                out.copy_(tensor[start : start + len(out)] if out.dim() else tensor)
            elif isinstance(index[0], int):
                if start <= index[0] < start + len(out):
                    out[(index[0] - start, *index[1:])].copy_(tensor)
            else:
                out[index].copy_(tensor[start : start + len(out)])


class CheckpointLayout:
    """Tensors of a checkpoint.

    Args:
        model: the network, on any device: its names and shapes count, not its weights.
        dtype: dtype of the engine's weights; what the model's ``fp32_suffixes`` name is always fp32, because a rounded
            router or bias changes which experts are chosen (sglang PR 37133).

    Attributes:
        specs: the published tensors, one per expert.
        wire: the same as they travel: all experts of a layer in one tensor.
    """

    def __init__(self, model: BlockDiffusionLM, dtype: torch.dtype) -> None:
        self.dtype, self.fp32_suffixes = dtype, model.fp32_suffixes
        wire_dtype = lambda name: torch.float32 if name.endswith(model.fp32_suffixes) else dtype
        state = model.state_dict()
        spec = lambda name, tensor: TensorSpec(name, tuple(tensor.shape), wire_dtype(name))
        self.specs = {name: spec(name, tensor) for name, tensor in split_experts(state.items())}
        self.wire = {name: spec(name, tensor) for name, tensor in state.items()}
        self.slots = {slot_name: slot for s in self.wire.values() for slot_name, slot in _slots(s)}

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> CheckpointLayout:
        """Layout of a published config.json.

        Raises:
            ConfigError: its architecture is not one of ``dllm.models.MODELS``, or its keys do not describe one.
        """
        return cls(meta_model(hf_config), dtype)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.wire.values())

    def tensors(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """(name, shape, dtype) of everything on the wire, as a manifest lists it."""
        return tuple((s.name, s.shape, str(s.dtype).removeprefix("torch.")) for s in self.wire.values())

    def largest_bucket(self, bucket_bytes: int) -> int:
        """Bytes of the largest bucket that an update makes with this limit."""
        return largest_bucket(((spec.shape, spec.dtype) for spec in self.wire.values()), bucket_bytes)

    def normalise(
        self, named: Iterable[tuple[str, Tensor]], *, rounded_router: bool = False
    ) -> Iterator[tuple[str, Assembly]]:
        """Tensors of the wire from those of a checkpoint or a model, checked as they pass.

        Experts come one by one (``experts.7.gate_proj.weight``), per projection (``experts.gate_proj`` [E, I, H]) or
        with gate and up fused (``experts.gate_up_proj`` [E, 2I, H]); nothing is copied before its bucket is filled.

        Args:
            rounded_router: accept 16-bit values where fp32 is needed; right only for a checkpoint published so.

        Raises:
            LayoutError: a tensor is unexpected, duplicate, of the wrong shape or dtype, or one is missing at the end.
        """
        missing = dict.fromkeys(self.specs)
        open_: dict[str, Assembly] = {}
        for name, tensor in named:
            slot = self._slot(name, tuple(tensor.shape), tensor.dtype, missing, rounded_router)
            spec = self.wire[slot.wire]
            assembly = open_.setdefault(slot.wire, Assembly(spec, missing=len(self.slots[slot.wire].cells)))
            assembly.pieces.append((slot.index, tensor.detach()))
            assembly.missing -= len(slot.cells)
            if not assembly.missing:
                yield slot.wire, open_.pop(slot.wire)
            # Or a tensor that was gathered for this would stay until the next one has been gathered.
            del tensor, assembly
        self._complete(missing)

    def check(self, named: Iterable[tuple[str, tuple[int, ...], torch.dtype]], *, rounded_router: bool = False) -> None:
        """Refuse a list of (name, shape, dtype) that is not a checkpoint of this layout.

        Raises:
            LayoutError: as ``normalise``.
        """
        missing = dict.fromkeys(self.specs)
        for name, shape, dtype in named:
            self._slot(name, shape, dtype, missing, rounded_router)
        self._complete(missing)

    def _slot(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, missing: dict[str, None], rounded_router: bool
    ) -> Slot:
        slot = self.slots.get(name)
        if slot is None:
            raise LayoutError(f"tensor {name!r} is not part of this checkpoint; send every tensor of it once")
        if shape != slot.shape:
            raise LayoutError(f"tensor {name!r} has shape {shape}, the engine needs {slot.shape}")
        spec = self.wire[slot.wire]
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise LayoutError(f"tensor {name!r} has dtype {dtype}, the engine needs {spec.dtype}")
        if dtype.itemsize < 4 and self.fp32_suffixes and name.endswith(self.fp32_suffixes) and not rounded_router:
            raise LayoutError(
                f"tensor {name!r} has dtype {dtype}, the engine needs torch.float32: a rounded router chooses other "
                "experts; keep it in fp32 on the trainer"
            )
        for cell in slot.cells:
            if missing.pop(cell, self) is self:
                raise LayoutError(f"tensor {name!r} is sent twice; send every tensor of the checkpoint once")
        return slot

    def _complete(self, missing: dict[str, None]) -> None:
        if missing:
            raise LayoutError(
                f"{len(missing)} of {len(self.specs)} tensors are missing, e.g. {next(iter(missing))!r}; send buffers "
                "(expert_bias) as well as parameters"
            )


LLaDA2Layout = CheckpointLayout
"""The same for LLaDA2 checkpoints, the first that it was written for."""

_EXPERTS = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


def _slots(spec: TensorSpec) -> Iterator[tuple[str, Slot]]:
    """Every name under which (a part of) a wire tensor may come."""
    match = _EXPERTS.match(spec.name)
    if match is None:
        yield spec.name, Slot(spec.name, (), spec.shape, (spec.name,))
        return
    prefix, fused = match.groups()
    count, rows, columns = spec.shape
    halves = {"down_proj": slice(0, rows)}
    if fused == "gate_up_proj":
        halves = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    cells = {p: tuple(f"{prefix}.{e}.{p}.weight" for e in range(count)) for p in halves}
    whole = Slot(spec.name, (), spec.shape, tuple(c for p in halves for c in cells[p]))
    yield spec.name, whole
    yield f"{spec.name}.weight", whole
    for projection, part in halves.items():
        shape = (part.stop - part.start, columns)
        if fused == "gate_up_proj":
            all_experts = Slot(spec.name, (slice(None), part), (count, *shape), cells[projection])
            yield f"{prefix}.{projection}", all_experts
            yield f"{prefix}.{projection}.weight", all_experts
        for expert, cell in enumerate(cells[projection]):
            yield cell, Slot(spec.name, (expert, part), shape, (cell,))
