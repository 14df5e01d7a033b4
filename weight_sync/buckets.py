"""Group a stream of tensors into flat buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes, so that any dtype can be viewed in place."""


@dataclass(frozen=True)
class Placement:
    """Where rows of a tensor lie in their bucket: at ``offset`` bytes, from row ``start`` of the whole tensor on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    start: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Bucket:
    """A flat uint8 buffer and what lies in it."""

    index: int
    data: Tensor
    placements: list[Placement]
    last: bool = False


def aligned(size: int) -> int:
    """``size`` rounded up to ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def view(data: Tensor, placement: Placement) -> Tensor:
    """The tensor at ``placement``, sharing memory with the bucket's ``data`` (uint8 [n])."""
    dtype = placement.torch_dtype
    count = 1
    for size in placement.shape:
        count *= size
    return data[placement.offset : placement.offset + count * dtype.itemsize].view(dtype).view(placement.shape)


def fill_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors into buckets as they come; a sender never holds more than one bucket and one tensor.

    A tensor larger than ``bucket_bytes`` gets a bucket of its own. The last bucket is marked.
    """
    pending: list[tuple[Placement, Tensor]] = []
    used, index = 0, 0

    def flush(last: bool) -> Bucket:
        device = pending[0][1].device if pending else "cpu"
        data = torch.empty(used, dtype=torch.uint8, device=device)
        for placement, tensor in pending:
            view(data, placement).copy_(tensor)
        return Bucket(index, data, [placement for placement, _ in pending], last)

    for name, tensor in named:
        size = aligned(tensor.nbytes)
        if pending and used + size > bucket_bytes:
            yield flush(False)
            pending, used, index = [], 0, index + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        pending.append((Placement(name, tuple(tensor.shape), dtype, used), tensor))
        used += size
    yield flush(True)
