"""The sum of ``weight_sync.checksum`` on a GPU: one pass over the words, at the speed of the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 128


# Strides are specialised: where they are even multiples, two words are loaded at a time.
@triton.jit(do_not_specialize=["planes", "rows", "columns", "first", "per_slice"])
def _kernel(  # type: ignore[no-untyped-def]
    words,
    a,
    b,
    out,
    planes,
    rows,
    columns,
    plane_stride,
    row_stride,
    first,
    per_slice,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    index = program * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = index < planes.to(tl.int64) * rows
    plane, row = index // rows, index % rows
    start = plane * plane_stride + row * row_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    for at in range(0, columns, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < columns)[None, :]
        word = tl.load(words + start[:, None] + column[None, :], mask=mask, other=0)
        factor = tl.load(b + column, mask=column < columns, other=0)
        total += word * factor[None, :]
    factor = tl.load(a + first + plane * per_slice + row, mask=inside, other=0)
    tl.store(out + program, tl.sum(tl.sum(total, axis=1) * factor, axis=0))


def sum_words(words: Tensor, a: Tensor, b: Tensor, first: int, per_slice: int) -> Tensor:
    """Sum of words[i, r, c] * a[first + i * per_slice + r] * b[c], modulo 2^64.

    Args:
        words: int64 [planes, rows, columns] with contiguous columns.
        a, b: int64 factors of rows and columns.
    """
    planes, rows, columns = words.shape
    programs = triton.cdiv(planes * rows, ROWS)
    out = torch.empty(programs, dtype=torch.int64, device=words.device)
    # Triton launches on the current device, whatever the tensors lie on.
    with torch.cuda.device_of(words):
        _kernel[(programs,)](
            words,
            a,
            b,
            out,
            planes,
            rows,
            columns,
            words.stride(0),
            words.stride(1),
            first,
            per_slice,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out.sum()
