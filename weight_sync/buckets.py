"""Group a stream of tensors into flat buckets of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes, so that any dtype can be viewed in place."""


@dataclass(frozen=True)
class Placement:
    """Where rows of a tensor lie in their bucket.

    Attributes:
        shape: of the rows that lie here.
        offset: bytes from the beginning of the bucket.
        start: the first of these rows in the whole tensor; a tensor larger than a bucket is split by rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    start: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


class Source(Protocol):
    """A tensor that is written into its bucket row by row; it need not exist as a whole before."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def write(self, out: Tensor, start: int) -> None:
        """Fill ``out`` with the rows from ``start`` on."""


@dataclass(frozen=True)
class WholeTensor:
    """A tensor as a source."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def write(self, out: Tensor, start: int) -> None:
        out.copy_(self.tensor[start : start + len(out)] if out.dim() else self.tensor)


@dataclass
class Bucket:
    """A flat uint8 buffer and what lies in it.

    Attributes:
        ready: event after which a device buffer is complete.
    """

    index: int
    data: Tensor
    placements: list[Placement]
    last: bool = False
    ready: Any = None

    def wait(self) -> None:
        """Block until the bytes are there."""
        if self.ready is not None:
            self.ready.synchronize()


def aligned(size: int) -> int:
    """``size`` rounded up to ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def view(data: Tensor, placement: Placement) -> Tensor:
    """The rows at ``placement``, sharing memory with the bucket's ``data`` (uint8 [n]).

    Raises:
        ValueError: they do not lie within ``data``, or not on a boundary of ``ALIGNMENT``.
    """
    end = placement.offset + placement.nbytes
    if placement.offset < 0 or placement.offset % ALIGNMENT or end > data.numel():
        raise ValueError(
            f"tensor {placement.name!r} at bytes {placement.offset} to {end} of {data.numel()}; tensors start at "
            f"multiples of {ALIGNMENT} and end within the bucket"
        )
    return data[placement.offset : end].view(placement.torch_dtype).view(placement.shape)


Allocate = Callable[[int, int, torch.device], Tensor]
"""(bucket number, bytes, device of its tensors) -> buffer, uint8 [bytes]."""


def new_buffer(index: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def largest_bucket(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int) -> int:
    """Bytes of the largest bucket that ``fill_buckets`` can make of tensors of these shapes and dtypes."""
    sizes = [
        [aligned(prod(s) * dtype.itemsize) for _, s in _pieces(shape, dtype, bucket_bytes)] for shape, dtype in shapes
    ]
    total, largest = sum(map(sum, sizes)), max((max(each) for each in sizes), default=0)
    return min(total, max(bucket_bytes, largest))


def fill_buckets(
    named: Iterable[tuple[str, Tensor | Source]],
    bucket_bytes: int,
    allocate: Allocate = new_buffer,
    capacity: int | None = None,
) -> Iterator[Bucket]:
    """Copy tensors into buckets as they come; of the stream, no more is held than the tensor that is being copied.

    A tensor larger than ``bucket_bytes`` is split along its first dimension, if it has several; what cannot be split
    further gets a bucket of its own. The last bucket is marked.

    Args:
        capacity: bytes of every buffer, at least ``largest_bucket`` of these tensors; None allocates ``bucket_bytes``,
            or more for what cannot be split.
    """
    filling = Filling(0, allocate)
    for name, given in named:
        source = WholeTensor(given) if isinstance(given, Tensor) else given
        for start, shape in _pieces(source.shape, source.dtype, bucket_bytes):
            size = aligned(prod(shape) * source.dtype.itemsize)
            if filling.placements and filling.used + size > bucket_bytes:
                yield filling.bucket(last=False)
                filling = Filling(filling.index + 1, allocate)
            dtype = str(source.dtype).removeprefix("torch.")
            filling.add(Placement(name, shape, dtype, filling.used, start), source, capacity or max(bucket_bytes, size))
        # Or a tensor that was gathered for this would stay until the next one has been gathered.
        del given, source
    yield filling.bucket(last=True)


@dataclass
class Filling:
    """A bucket that is being filled.

    Attributes:
        used: bytes up to the end of the last tensor.
    """

    index: int
    allocate: Allocate
    used: int = 0
    data: Tensor | None = None
    placements: list[Placement] = field(default_factory=list)

    def add(self, placement: Placement, source: Source, capacity: int) -> None:
        """Copy rows of ``source`` to ``placement``, which begins at ``used``."""
        if self.data is None:
            self.data = self.allocate(self.index, capacity, source.device)
        source.write(view(self.data, placement), placement.start)
        end = placement.offset + placement.nbytes
        self.used = aligned(end)
        # Bytes between tensors count in a checksum of the host.
        self.data[end : self.used].zero_()
        self.placements.append(placement)

    def bucket(self, last: bool) -> Bucket:
        """What has been filled."""
        if self.data is None:
            self.data = self.allocate(self.index, 0, torch.device("cpu"))
        data = self.data[: self.used]
        ready = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        return Bucket(self.index, data, self.placements, last, ready)


def _pieces(shape: tuple[int, ...], dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(first row, shape) of the pieces of a tensor."""
    size = prod(shape) * dtype.itemsize
    if aligned(size) <= bucket_bytes or len(shape) < 2 or shape[0] < 2:
        yield 0, shape
        return
    row = size // shape[0]
    rows = max(1, (bucket_bytes // ALIGNMENT * ALIGNMENT) // row)
    for start in range(0, shape[0], rows):
        yield start, (min(rows, shape[0] - start), *shape[1:])
