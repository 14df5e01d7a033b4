"""Counter-based uniform noise: one fp64 number per (seed, position, step), whatever the batch.

A draw depends on nothing but its own counter, so a request gives the same tokens alone, in any batch, on
any tensor-parallel rank and after an abort and resume. The mixer is SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit constant as the signed integer that torch.int64 stores."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MUL_1 = _signed(0xBF58476D1CE4E5B9)
_MUL_2 = _signed(0x94D049BB133111EB)
_POSITION = _signed(0xD6E8FEB86659FD93)
_STEP = _signed(0xA0761D6478BD642F)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MUL_1
    x = (x ^ _shift_right(x, 27)) * _MUL_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits.

    Args:
        seed: int64 [n], seed of the request.
        position: int64 [n], index of the token in the whole sequence.
        step: int64 [n], denoise step within the block.

    Returns:
        float64 [n].
    """
    state = _mix(seed + _GOLDEN)
    state = _mix(state ^ (position * _POSITION))
    state = _mix(state ^ (step * _STEP + _GOLDEN))
    return _shift_right(state, 11).double() * 2.0**-53


STEP_BITS, PROMPT_BITS, SAMPLE_BITS = 20, 23, 20


def sample_seed(base: int, step: int, prompt: int, sample: int) -> int:
    """A 63-bit seed, different for every (step, prompt, sample) under one ``base``.

    The three counters are packed without overlap and the result is XORed with a hash of ``base``, which is a
    bijection for a fixed base: two samples of a run never share their noise.

    Raises:
        ValueError: a counter does not fit (step < 2**20, prompt < 2**23, sample < 2**20).
    """
    for name, value, bits in (
        ("step", step, STEP_BITS),
        ("prompt", prompt, PROMPT_BITS),
        ("sample", sample, SAMPLE_BITS),
    ):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name}={value} does not fit into a seed; it must be in [0, {1 << bits})")
    packed = (step << (PROMPT_BITS + SAMPLE_BITS)) | (prompt << SAMPLE_BITS) | sample
    scrambled = int(_shift_right(_mix(torch.tensor([_signed((base + 1) & (2**64 - 1))])), 1))
    return packed ^ scrambled
