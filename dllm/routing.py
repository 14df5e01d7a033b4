"""Sets of experts in one number each, to tell whether two routers chose the same."""

from __future__ import annotations

from torch import Tensor

_FACTOR = 0x5851F42D4C957F2D
_MASK = (1 << 31) - 1


def expert_set_hash(ids: Tensor) -> Tensor:
    """A number that depends on which experts were chosen, not on their order.

    Two different sets share it with a probability of about 5e-10.

    Args:
        ids: integers [..., k].

    Returns:
        int64 [...], 0 to 2**31 - 1.
    """
    state = (ids.long() + 1) * _FACTOR
    state = (state ^ ((state >> 29) & ((1 << 35) - 1))) * _FACTOR
    return (state.sum(-1) >> 20) & _MASK
