"""Stand-in for ``sgl_kernel`` on machines without a GPU, where the compiled package cannot be imported.

Found first on ``sys.path`` only when the CPU engine runs. It has the one operation the LLaDA2 path needs; any
other name can be imported, and says so when it is called.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__version__ = "0.4.5"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write consecutive runs of ``out_cache_loc`` into ``req_to_token[request, start:end]``, request by request."""
    taken = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU implementation in this package")

    unavailable.__name__ = name
    return unavailable
