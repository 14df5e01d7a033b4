"""An engine's model as the destination of an update: its parameters, and what has been written into them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from dllm.config import attention_heads
from weight_sync.buckets import Placement, view
from weight_sync.checksum import TensorSums, box_sum
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import tensors_digest
from weight_sync.plan import Heads, Part, Plan, PlanError, make_plan

UNSUPPORTED = ("use_triton_kernels", "use_flashinfer_trtllm_moe")
"""Properties of SGLang's experts whose weights lie permuted in memory."""


class Target:
    """A model with the plan of how tensors reach its parameters.

    Args:
        model: has ``config`` (Hugging Face), ``named_parameters`` and ``modules``.
        rank, size: tensor-parallel rank and number of ranks.

    Raises:
        PlanError, ConfigError: the model is not one that the tensors of its config fill.
    """

    def __init__(self, model: Any, rank: int = 0, size: int = 1) -> None:
        config = model.config.to_dict()
        self.bind(model)
        self.layout = CheckpointLayout.from_config(config, self.parameters["lm_head.weight"].dtype)
        self.digest = tensors_digest(self.layout.tensors())
        up_first = _check_experts(model)
        heads = Heads(*attention_heads(config))
        self.plan: Plan = make_plan(
            {name: spec.shape for name, spec in self.layout.wire.items()},
            {name: tuple(p.shape) for name, p in self.parameters.items()},
            heads,
            rank,
            size,
            up_first=up_first,
        )
        for name, parts in self.plan.parts.items():
            for part in parts:
                self._check(name, part)

    def _check(self, name: str, part: Part) -> None:
        spec, held = self.layout.wire[name], self.parameters[part.parameter].dtype
        if held != spec.dtype:
            raise PlanError(
                f"parameter {part.parameter!r} of the engine is {held}, its tensor {spec.dtype}; an engine that is "
                "quantised or that keeps the router in 16 bits cannot be refreshed"
            )
        if part.source and part.source[-1].start * spec.dtype.itemsize % 8:
            raise PlanError(f"shards of {name!r} begin within an 8-byte word; use fewer tensor-parallel ranks")

    def bind(self, model: Any) -> None:
        """Look up the memory of the parameters, which a reload may have replaced."""
        self.parameters = {name: parameter.data for name, parameter in model.named_parameters()}

    def checksum(self) -> int:
        """This rank's share of the checksum of all that the engine holds (see ``TensorSums``); shares add up."""
        sums = TensorSums()
        for name, parts in self.plan.parts.items():
            shape = self.layout.wire[name].shape
            for part in parts:
                if part.first:
                    held = self.parameters[part.parameter][part.target]
                    origin = tuple(s.start for s in part.source)
                    sums.add(name, held, origin, shape[1] if len(shape) == 3 else None)
        return sums.value()

    @property
    def device(self) -> torch.device:
        return self.parameters["lm_head.weight"].device


def _check_experts(model: Any) -> bool:
    """Whether the fused experts hold up before gate.

    Raises:
        PlanError: they lie permuted in memory, so that nothing can be copied into them.
    """
    experts = [module for module in model.modules() if hasattr(module, "w13_weight")]
    if not experts:
        return False
    method = getattr(experts[0], "quant_method", None)
    for name in UNSUPPORTED:
        if getattr(method, name, False):
            raise PlanError(f"the engine's experts are permuted ({name}); start it with --moe-runner-backend triton")
    if getattr(experts[0], "use_intel_amx_backend", False):
        raise PlanError("the engine's experts are packed for AMX and cannot be refreshed")
    return bool(getattr(method, "load_up_proj_weight_first", False))


class Progress:
    """What has arrived of an update and what of a target has been written."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.rows: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self._copies: list[tuple[str, Part]] = []
        self._replicas: list[tuple[Part, Tensor]] = []

    def check(self, placements: list[Placement], data: Tensor) -> list[tuple[Placement, Tensor]]:
        """The placements of a bucket with their rows, if they are the next ones of their tensors.

        Raises:
            ValueError: a tensor is unknown, of another shape or dtype, or its rows are not the next ones.
        """
        rows = dict(self.rows)
        pieces = []
        for placement in placements:
            spec = self.target.layout.wire.get(placement.name)
            if spec is None:
                raise ValueError(f"tensor {placement.name!r} is not part of this checkpoint")
            if placement.torch_dtype != spec.dtype:
                raise ValueError(
                    f"tensor {placement.name!r} arrived as {placement.dtype}, the engine needs {spec.dtype}"
                )
            count = placement.shape[0] if spec.shape else 1
            fits = len(placement.shape) == len(spec.shape) and placement.shape[1:] == spec.shape[1:]
            if not fits or placement.start < 0 or placement.start + count > (spec.shape or (1,))[0]:
                raise ValueError(
                    f"tensor {placement.name!r} has shape {placement.shape} from row {placement.start}, the engine "
                    f"needs {spec.shape}"
                )
            arrived = rows.get(placement.name, 0)
            if placement.start != arrived:
                late = placement.start > arrived
                raise ValueError(
                    f"tensor {placement.name!r} "
                    + (f"continues at row {placement.start} after {arrived}" if late else "arrived twice")
                )
            rows[placement.name] = arrived + count
            pieces.append((placement, view(data, placement)))
        return pieces

    @torch.no_grad()
    def copy(self, pieces: list[tuple[Placement, Tensor]]) -> None:
        """Write checked rows into the parameters."""
        for placement, piece in pieces:
            count = placement.shape[0] if placement.shape else 1
            self.rows[placement.name] = self.rows.get(placement.name, 0) + count
            for whole in self.target.plan.parts[placement.name]:
                part = whole.clip(placement.start, placement.start + count)
                if part is None:
                    continue
                sent = piece[part.source]
                self.target.parameters[part.parameter][part.target].copy_(sent)
                self.written[part.parameter] = self.written.get(part.parameter, 0) + prod(part.shape)
                if not part.first:
                    self._replicas.append((part, box_sum(sent)))

    def finish(self) -> int:
        """Check that every element was written, and read everything back.

        Returns:
            This rank's share of the checksum of the whole.

        Raises:
            ValueError: tensors never arrived, a parameter was not filled exactly once, or it does not hold what was
                sent.
        """
        target = self.target
        rows = {name: (spec.shape or (1,))[0] for name, spec in target.layout.wire.items()}
        if missing := sorted(name for name, count in rows.items() if self.rows.get(name, 0) != count):
            raise ValueError(f"{len(missing)} tensors never arrived, e.g. {missing[0]!r}")
        for name, count in target.plan.elements.items():
            if self.written.get(name) != count:
                raise ValueError(f"{self.written.get(name, 0)} of {count} elements of parameter {name!r} were written")
        for name, box in target.plan.padding.items():
            target.parameters[name][box].zero_()
        for part, sent in self._replicas:
            if int(box_sum(target.parameters[part.parameter][part.target])) != int(sent):
                raise ValueError(f"parameter {part.parameter!r} does not hold what was sent")
        return target.checksum()
