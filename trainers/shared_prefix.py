"""Samples with the same clean tokens share one copy of them in a packed batch.

A slice sees its own tokens and clean tokens of earlier blocks, nothing else, so the slices of many samples may
stand behind one prefix. Prompts of one task often differ only behind their first blocks, and the samples of a group
do: then about half of the forward pass is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dllm.replay import SampleSlices

T = TypeVar("T")

# Longer rows save more clean tokens and cost more attention; on a CPU the sum is smallest about here.
SLICES_PER_ROW = 8


def share_prefixes(
    samples: Sequence[tuple[SampleSlices, list[T]]], slices_per_row: int = SLICES_PER_ROW
) -> list[tuple[SampleSlices, list[T]]]:
    """Merge samples whose clean tokens are equal.

    Args:
        samples: slices, and a list of notes that belong to them (weights of their targets, say).
        slices_per_row: at most this many slices share a copy, which bounds the length of a row.

    Returns:
        Merged slices with their joined notes, in the order in which each merged sample began.
    """
    merged: list[tuple[SampleSlices, list[T]]] = []
    open_row: dict[bytes, int] = {}
    for sample, notes in samples:
        key = sample.clean.tobytes()
        index = open_row.get(key)
        if index is None or len(merged[index][0].slices) + len(sample.slices) > slices_per_row:
            open_row[key] = len(merged)
            merged.append((SampleSlices(sample.clean, list(sample.slices)), list(notes)))
        else:
            merged[index][0].slices.extend(sample.slices)
            merged[index][1].extend(notes)
    return merged
