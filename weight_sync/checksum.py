"""Checksums: xxh3 for bytes in host memory; a sum that does not care how a tensor was cut for everything else.

A tensor's sum is ``sum_r A[r] * sum_c B[c] * w[r, c]`` modulo 2^64, where w[r, c] is the c-th word (8 bytes, the last
of a row filled up with zeros) of row r of the whole tensor, and A and B are odd pseudo-random factors. A part of a
tensor contributes the same terms wherever it lies, so buckets, tensor-parallel shards and a trainer's own copy can be
compared by adding up. One wrong bit always changes the sum, because every factor is odd; other damage that does not
depend on the factors goes unseen with a probability near 2^-63 (multiply-shift hashing: Dietzfelbinger et al., 1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from torch import Tensor

if TYPE_CHECKING:
    from weight_sync.buckets import Placement

MODULUS = 1 << 64

CHUNK = 1 << 22
"""Words that are multiplied at a time without a fused kernel; bounds the temporary memory to 32 MiB."""


def box_sum(box: Tensor, origin: Sequence[int] = (), rows: int | None = None) -> Tensor:
    """The terms that a part of a tensor contributes to its sum.

    Args:
        box: up to three dimensions, any strides. Vectors and scalars count as one row.
        origin: where in the whole tensor it begins; zeros if empty.
        rows: size of the whole tensor's middle dimension, if it has three; the box's own by default.

    Returns:
        int64 scalar on the box's device (wraps around).

    Raises:
        ValueError: more than three dimensions, or a box that begins within a word.
    """
    if box.dim() > 3:
        raise ValueError(f"a tensor of shape {tuple(box.shape)} has more than three dimensions")
    start = (0,) * 3 if not origin else (*(0,) * (3 - len(origin)), *origin)
    if box.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=box.device)
    byte = start[2] * box.element_size()
    if byte % 8:
        raise ValueError(f"a part that begins at column {start[2]} begins within an 8-byte word")
    box = box.detach()
    cube = box.reshape((1,) * (3 - box.dim()) + tuple(box.shape)) if box.dim() < 3 else box
    words = _words(cube)
    per_slice = cube.shape[1] if rows is None else rows
    last_row = (start[0] + words.shape[0] - 1) * per_slice + start[1] + words.shape[1]
    a = factors(0, last_row, box.device)
    columns = slice(byte // 8, byte // 8 + words.shape[2])
    b = factors(1, columns.stop, box.device)[columns]
    first = start[0] * per_slice + start[1]
    if words.is_cuda:
        from weight_sync.triton_sum import sum_words

        return sum_words(words, a, b, first, per_slice)
    return _sum_words(words, a, b, first, per_slice)


def _words(cube: Tensor) -> Tensor:
    """[n, rows, columns] as int64 words; a copy only if rows do not consist of whole aligned words."""
    size = cube.element_size()
    whole = cube.shape[2] * size % 8 == 0 and cube.stride(2) == 1 and cube.data_ptr() % 8 == 0
    if whole and all(cube.stride(i) * size % 8 == 0 for i in (0, 1)) and cube.storage_offset() * size % 8 == 0:
        return cube if size == 8 else cube.view(torch.int64)
    flat = cube.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.shape[2] % 8)).view(torch.int64)


def _sum_words(words: Tensor, a: Tensor, b: Tensor, first: int, per_slice: int) -> Tensor:
    planes, rows, columns = words.shape
    row_factors = a.as_strided((planes, rows), (per_slice, 1), a.storage_offset() + first)
    if words.numel() <= CHUNK:
        return ((words * b).sum(2) * row_factors).sum()
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    at_once = max(1, CHUNK // columns)
    for plane, factors_of_plane in zip(words, row_factors, strict=True):
        for part, factor in zip(plane.split(at_once), factors_of_plane.split(at_once), strict=True):
            total += ((part * b).sum(1) * factor).sum()
    return total


@cache
def _table(which: int, size: int, device: str) -> Tensor:
    """Odd factors: splitmix64 of the index (Steele, Lea and Flood, 2014), int64 [size]."""
    with np.errstate(over="ignore"):
        x = (np.arange(size, dtype=np.uint64) * np.uint64(2) + np.uint64(which + 1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


def factors(which: int, count: int, device: torch.device) -> Tensor:
    """At least ``count`` factors of rows (0) or columns (1): int64 on ``device``."""
    return _table(which, 1 << max(10, (count - 1).bit_length()), str(device))


@cache
def name_factor(name: str) -> int:
    """Odd factor of a tensor's name, so that exchanged tensors do not cancel."""
    return xxhash.xxh3_64_intdigest(name.encode()) | 1


class TensorSums:
    """Checksum of many tensors in any order and any pieces; what is on a device stays there until ``value``."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        self._total = 0

    def add(self, name: str, box: Tensor, origin: Sequence[int] = (), rows: int | None = None) -> Tensor:
        """Count a part of tensor ``name``; see ``box_sum``."""
        part = box_sum(box, origin, rows)
        self._names.append(name)
        self._sums.append(part)
        return part

    def value(self) -> int:
        """Sum over all parts so far, in [0, 2^64)."""
        if self._sums:
            for name, part in zip(self._names, torch.stack(self._sums).tolist(), strict=True):
                self._total += name_factor(name) * part
            self._names, self._sums = [], []
        return self._total % MODULUS


def host_checksum(data: Tensor) -> str:
    """``xxh3:<hex>`` of a uint8 tensor in host memory."""
    return "xxh3:" + xxhash.xxh3_128_hexdigest(data.contiguous().numpy().data)


def placement_sums(data: Tensor, placements: Sequence[Placement]) -> list[int]:
    """What each tensor in a bucket contributes to its own sum; bytes between them do not count."""
    from weight_sync.buckets import view

    sums = [box_sum(view(data, placement), origin(placement)) for placement in placements]
    return torch.stack(sums).tolist() if sums else []


def sums_checksum(placements: Sequence[Placement], sums: Sequence[int]) -> str:
    """``sum:<hex>`` of a bucket from its ``placement_sums``."""
    pairs = enumerate(zip(placements, sums, strict=True))
    total = sum(name_factor(f"{i}:{placement.name}") * value for i, (placement, value) in pairs)
    return f"sum:{total % MODULUS:016x}"


def origin(placement: Placement) -> tuple[int, ...]:
    """Where in its tensor a placement begins."""
    return (placement.start, *(0,) * (len(placement.shape) - 1)) if placement.shape else ()


def wire_checksum(data: Tensor, placements: Sequence[Placement]) -> str:
    """Checksum of a bucket (uint8 [n]) where it lies: xxh3 on the host, sums of its tensors on a device."""
    on_host = data.device.type == "cpu"
    return host_checksum(data) if on_host else sums_checksum(placements, placement_sums(data, placements))


def same_checksum(data: Tensor, placements: Sequence[Placement], expected: str) -> bool:
    """Whether a bucket has the checksum ``expected``, of either kind."""
    if expected.startswith("sum:"):
        return sums_checksum(placements, placement_sums(data, placements)) == expected
    return host_checksum(data.cpu()) == expected
