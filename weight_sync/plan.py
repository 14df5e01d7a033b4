"""Which slice of which tensor goes where in an engine: computed from shapes alone, once per engine.

An engine fuses tensors (gate and up, query, key and value, all experts of a layer) and shards them over its
tensor-parallel ranks. The rules are those of SGLang's ``weight_loader`` functions for LLaDA2 and SDAR; how a parameter
is sharded follows from its shape, and a parameter that the rules do not fill exactly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

Shape = tuple[int, ...]
Box = tuple[slice, ...]


class PlanError(ValueError):
    """The engine's parameters are not those that these tensors fill."""


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model; needed to shard query, key and value."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Part:
    """A rectangular copy ``parameter[target] = tensor[source]``; one slice per dimension.

    Attributes:
        first: no lower rank holds the same part, so that over all ranks every element counts once.
    """

    parameter: str
    source: Box
    target: Box
    first: bool = True

    @property
    def shape(self) -> Shape:
        return tuple(s.stop - s.start for s in self.target)

    def clip(self, start: int, stop: int) -> Part | None:
        """What of it lies in rows [start, stop) of the tensor, with ``source`` counted from ``start``."""
        if not self.source:
            return self
        rows, first = self.source[0], self.target[0].start
        low, high = max(rows.start, start), min(rows.stop, stop)
        if low >= high:
            return None
        target = slice(first + low - rows.start, first + high - rows.start)
        source = slice(low - start, high - start)
        return replace(self, source=(source, *self.source[1:]), target=(target, *self.target[1:]))


@dataclass
class Plan:
    """Attributes:
    parts: copies by tensor name.
    elements: how many elements of each parameter an update writes.
    padding: rows at the end of a vocabulary shard that stand for no token; they are zero.
    """

    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    padding: dict[str, slice] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rank:
    """The engine seen by the rules."""

    parameters: Mapping[str, Shape]
    heads: Heads
    rank: int
    size: int
    up_first: bool

    def shape(self, name: str, tensor: str) -> Shape:
        if name not in self.parameters:
            raise PlanError(f"tensor {tensor!r} belongs to parameter {name!r}, which the engine does not have")
        return self.parameters[name]

    def shard(self, full: int, local: int, name: str) -> slice:
        """This rank's part of a dimension of ``full``, of which the engine holds ``local``."""
        if local == full:
            return slice(0, full)
        if local * self.size != full:
            raise PlanError(f"parameter {name!r} holds {local} of {full}; expected all or 1/{self.size} of them")
        return slice(self.rank * local, (self.rank + 1) * local)


def make_plan(
    tensors: Mapping[str, Shape],
    parameters: Mapping[str, Shape],
    heads: Heads,
    rank: int = 0,
    size: int = 1,
    *,
    up_first: bool = False,
) -> Plan:
    """Plan for one tensor-parallel rank.

    Args:
        tensors: full shapes by name, experts fused per layer (``experts.gate_up_proj`` [E, 2I, H],
            ``experts.down_proj`` [E, H, I]).
        parameters: the rank's shapes by the engine's names.
        rank, size: tensor-parallel rank and number of ranks.
        up_first: the engine's fused experts hold up before gate.

    Raises:
        PlanError: a tensor has no place, or a parameter would not be filled exactly once.
    """
    views = [_Rank(parameters, heads, number, size, up_first) for number in range(rank + 1)]
    plan = Plan()
    for name, shape in tensors.items():
        rule = next((rule for suffix, rule in RULES if _matches(name, suffix)), _replicated)
        *below, parts = (rule(name, shape, view) for view in views)
        held = [part.source for other in below for part in other]
        plan.parts[name] = tuple(replace(part, first=part.source not in held) for part in parts)
        for part in parts:
            local = parameters[part.parameter]
            if len(local) != len(part.target) or any(s.stop > n for s, n in zip(part.target, local, strict=True)):
                raise PlanError(f"tensor {name!r} {shape} does not fit parameter {part.parameter!r} {local}")
            plan.elements[part.parameter] = plan.elements.get(part.parameter, 0) + prod(part.shape)
    for name, shape in parameters.items():
        if name not in plan.elements:
            raise PlanError(f"no tensor fills parameter {name!r} of the engine")
        missing = prod(shape) - plan.elements[name]
        if missing and _matches(name, VOCABULARY) and missing % shape[1] == 0 and missing > 0:
            plan.padding[name] = slice(shape[0] - missing // shape[1], shape[0])
        elif missing:
            raise PlanError(f"the tensors fill {plan.elements[name]} of {prod(shape)} elements of parameter {name!r}")
    return plan


def _matches(name: str, suffix: str | tuple[str, ...]) -> bool:
    return name.endswith(suffix)


def _full(shape: Shape) -> Box:
    return tuple(slice(0, n) for n in shape)


def _replicated(name: str, shape: Shape, view: _Rank) -> list[Part]:
    if view.shape(name, name) != shape:
        raise PlanError(f"tensor {name!r} has shape {shape}, the engine's parameter {view.shape(name, name)}")
    return [Part(name, _full(shape), _full(shape))]


def _vocabulary(name: str, shape: Shape, view: _Rank) -> list[Part]:
    """Rows split in equal shards of the padded vocabulary; the last shard may have rows of padding."""
    local = view.shape(name, name)[0]
    start = 0 if local >= shape[0] else view.rank * local
    count = max(0, min(local, shape[0] - start))
    rest = _full(shape[1:])
    return [Part(name, (slice(start, start + count), *rest), (slice(0, count), *rest))]


def _rows(name: str, shape: Shape, view: _Rank) -> list[Part]:
    """Row-parallel layer: input features (dimension 1) are sharded."""
    local = view.shape(name, name)
    columns = view.shard(shape[1], local[1], name)
    return [Part(name, (slice(0, shape[0]), columns), _full(local))]


def _stacked(suffix: str, fused: str, second: bool) -> Callable[[str, Shape, _Rank], list[Part]]:
    """Gate or up: its rows are the first or the second half of the fused parameter."""

    def rule(name: str, shape: Shape, view: _Rank) -> list[Part]:
        parameter = name.removesuffix(suffix) + fused
        local = view.shape(parameter, name)[0] // 2
        rows = view.shard(shape[0], local, parameter)
        rest = _full(shape[1:])
        return [Part(parameter, (rows, *rest), (slice(local * second, local * (second + 1)), *rest))]

    return rule


def _qkv_parts(name: str, parameter: str, which: str, offset: int, rest: Box, view: _Rank) -> list[Part]:
    """Copies of query, key or value, whose rows start at ``offset`` in the tensor."""
    heads, dim = view.heads, view.heads.dim
    query = heads.query // view.size
    kv = max(1, heads.kv // view.size)
    if view.shape(parameter, name)[0] != (query + 2 * kv) * dim:
        # Attention may be replicated (data-parallel attention), which needs another plan.
        raise PlanError(
            f"parameter {parameter!r} has {view.shape(parameter, name)[0]} rows, expected {(query + 2 * kv) * dim} for "
            f"{heads.query} + 2 x {heads.kv} heads over {view.size} ranks"
        )
    if which == "q":
        first, count, start = view.rank * query, query, 0
    else:
        # With more ranks than key-value heads, neighbouring ranks hold the same head.
        first = view.rank * heads.kv // view.size
        count, start = kv, query + (kv if which == "v" else 0)
    source = slice(offset + first * dim, offset + (first + count) * dim)
    return [Part(parameter, (source, *rest), (slice(start * dim, (start + count) * dim), *rest))]


def _fused_qkv(name: str, shape: Shape, view: _Rank) -> list[Part]:
    heads, rest = view.heads, _full(shape[1:])
    if shape[0] != (heads.query + 2 * heads.kv) * heads.dim:
        raise PlanError(f"tensor {name!r} has {shape[0]} rows, not those of {heads}")
    if view.size == 1:
        return _replicated(name, shape, view)
    offsets = {"q": 0, "k": heads.query * heads.dim, "v": (heads.query + heads.kv) * heads.dim}
    return [part for which, at in offsets.items() for part in _qkv_parts(name, name, which, at, rest, view)]


def _single_qkv(which: str) -> Callable[[str, Shape, _Rank], list[Part]]:
    def rule(name: str, shape: Shape, view: _Rank) -> list[Part]:
        stem = f"{which}_proj"
        parameter = name.replace(f".{stem}.", ".qkv_proj.")
        return _qkv_parts(name, parameter, which, 0, _full(shape[1:]), view)

    return rule


def _experts_in(name: str, shape: Shape, view: _Rank) -> list[Part]:
    """[E, 2I, H] -> ``w13_weight`` [E, 2I / ranks, H]: one copy if nothing is sharded, else one for gate and one for
    up."""
    parameter = name.removesuffix("gate_up_proj") + "w13_weight"
    local = view.shape(parameter, name)
    _check_experts(parameter, local, (shape[0], None, shape[2]))
    inner, width = shape[1] // 2, local[1] // 2
    rows = view.shard(inner, width, parameter)
    if width == inner and not view.up_first:
        return [Part(parameter, _full(shape), _full(shape))]
    parts = []
    for half in (0, 1):
        place = 1 - half if view.up_first else half
        source = slice(half * inner + rows.start, half * inner + rows.stop)
        target = slice(place * width, (place + 1) * width)
        experts, hidden = slice(0, shape[0]), slice(0, shape[2])
        parts.append(Part(parameter, (experts, source, hidden), (experts, target, hidden)))
    return parts


def _experts_out(name: str, shape: Shape, view: _Rank) -> list[Part]:
    """[E, H, I] -> ``w2_weight`` [E, H, I / ranks]."""
    parameter = name.removesuffix("down_proj") + "w2_weight"
    local = view.shape(parameter, name)
    _check_experts(parameter, local, (shape[0], shape[1], None))
    columns = view.shard(shape[2], local[2], parameter)
    return [Part(parameter, (slice(0, shape[0]), slice(0, shape[1]), columns), _full(local))]


def _check_experts(parameter: str, local: Shape, expected: tuple[int | None, ...]) -> None:
    """Refuse transposed and expert-parallel layouts, which look alike from afar."""
    if len(local) != 3 or any(want is not None and have != want for have, want in zip(local, expected, strict=True)):
        raise PlanError(
            f"parameter {parameter!r} has shape {local}, expected {expected} (None: sharded); expert parallelism and "
            "transposed experts (moe_runner_backend=triton_kernels) are not supported"
        )


VOCABULARY = ("word_embeddings.weight", "embed_tokens.weight", "lm_head.weight")

RULES: tuple[tuple[str | tuple[str, ...], Callable[[str, Shape, _Rank], list[Part]]], ...] = (
    ("experts.gate_up_proj", _experts_in),
    ("experts.down_proj", _experts_out),
    (VOCABULARY, _vocabulary),
    ("query_key_value.weight", _fused_qkv),
    (".q_proj.weight", _single_qkv("q")),
    (".k_proj.weight", _single_qkv("k")),
    (".v_proj.weight", _single_qkv("v")),
    ((".dense.weight", ".o_proj.weight", ".down_proj.weight"), _rows),
    (".gate_proj.weight", _stacked("gate_proj.weight", "gate_up_proj.weight", False)),
    (".up_proj.weight", _stacked("up_proj.weight", "gate_up_proj.weight", True)),
)
"""The first rule whose suffix matches; a tensor without one is replicated under its own name."""
