"""Attention over packed states: a dense mask where there is no GPU, FlexAttention where there is one.

Both apply the same rule (``sees``), and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.replay import CLEAN, PackedBatch, SampleSlices, pack, share_prefixes

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(query [rows, heads, L, D], key and value [rows, kv_heads, L, D], scale) -> [rows, heads, L, D]."""

FLEX_TILE = 128

DENSE_LENGTH = 512
"""Rows up to this length take the dense mask on a GPU too: building a block mask costs more than it saves."""


def sees(doc_q: Tensor, doc_k: Tensor, block_q: Tensor, block_k: Tensor, slice_q: Tensor, slice_k: Tensor) -> Tensor:
    """Whether a query token sees a key token (broadcast over any shape).

    Clean keys are seen up to the query's own block by clean queries and strictly before it by slices; slice
    tokens are seen by their own slice only; samples never see each other. Padding sees padding.
    """
    clean_k, clean_q = slice_k == CLEAN, slice_q == CLEAN
    earlier = block_k < block_q
    to_clean = clean_k & (earlier | (clean_q & (block_k == block_q)))
    within_slice = ~clean_q & (slice_q == slice_k)
    return (doc_q == doc_k) & (to_clean | within_slice)


def dense_mask(batch: PackedBatch) -> Tensor:
    """bool [rows, 1, L, L], True where a query (third axis) sees a key (fourth axis)."""
    q, k = (slice(None), slice(None), None), (slice(None), None, slice(None))
    d, b, s = batch.doc, batch.block, batch.slice_id
    return sees(d[q], d[k], b[q], b[k], s[q], s[k])[:, None]


def dense_attention(batch: PackedBatch) -> Attention:
    """Scaled dot-product attention with the dense mask; memory grows with L squared."""
    mask = dense_mask(batch)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

    return attend


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex_attention(batch: PackedBatch) -> Attention:
    """FlexAttention with a block mask; row lengths must be multiples of ``FLEX_TILE``.

    The mask of tiles is built by the compiled path of ``create_block_mask``, which does not materialise the
    [L, L] matrix.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    doc, block, slice_id = batch.doc, batch.block, batch.slice_id
    rows, length = doc.shape

    def mask_mod(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(doc[row, q], doc[row, k], block[row, q], block[row, k], slice_id[row, q], slice_id[row, k])

    mask = create_block_mask(mask_mod, rows, None, length, length, device=doc.device, _compile=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return _compiled_flex()(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)

    return attend


def pack_samples(samples: Sequence[SampleSlices], block_size: int, device: torch.device | str) -> PackedBatch:
    """Pack samples for the implementation that ``attention_for`` takes on ``device``, and move them there.

    Equal prefixes are shared. One row per prefix, or one long row for FlexAttention where samples are long.
    """
    samples = share_prefixes(samples)
    longest = max((s.packed_length for s in samples), default=0)
    if torch.device(device).type != "cuda" or longest <= DENSE_LENGTH:
        return pack(samples, block_size).to(device)
    return pack(samples, block_size, sum(s.packed_length for s in samples), FLEX_TILE).to(device)


def attention_for(batch: PackedBatch) -> Attention:
    """FlexAttention for long rows on a GPU, else the dense mask."""
    return flex_attention(batch) if batch.doc.is_cuda and batch.doc.shape[1] > DENSE_LENGTH else dense_attention(batch)
