"""What SGLang 0.5.17's CPU engine lacks for LLaDA2-MoE block diffusion.

Four gaps: the compiled kernels cannot be imported without CUDA libraries, the page allocator is a Triton
kernel, the native mixture of experts drops ``routed_scaling_factor``, and tensor-parallel ranks want NCCL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KERNELS = Path(__file__).parent / "cpu_kernels"


def cpu_requested() -> bool:
    """Whether the engine of this process runs on the CPU: asked for by environment, or no GPU is visible."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return True
    import torch

    return not torch.cuda.is_available()


def cpu_environment() -> dict[str, str]:
    """Environment variables of a process that runs the CPU engine.

    ``TORCHDYNAMO_DISABLE``: without it the first request compiles for half a minute and gains nothing on a
    model small enough for a CPU.
    """
    path = os.environ.get("PYTHONPATH", "")
    entries = [str(KERNELS), *(e for e in path.split(os.pathsep) if e and e != str(KERNELS))]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(entries),
    }


def prepare_environment() -> None:
    """Make the CPU engine importable in this process and its children, if it is the one that will run."""
    if not cpu_requested():
        return
    os.environ.update(cpu_environment())
    if str(KERNELS) not in sys.path:
        sys.path.insert(0, str(KERNELS))


def _scale_experts(result: Any, layer: Any, x: Any, topk_output: Any, runner_config: Any) -> Any:
    factor = runner_config.routed_scaling_factor
    return None if factor is None or factor == 1.0 else result * factor


class _AnyGrid:
    """A plain function that accepts Triton's ``kernel[grid](...)`` call syntax."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable:
        return self.function


def install() -> None:
    if not cpu_requested():
        return
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", _scale_experts, HookType.AFTER)

    def alloc_extend(prefix: Any, seq: Any, last: Any, free: Any, out: Any, _batch: int, page_size: int) -> None:
        paged.alloc_extend_naive(prefix, seq, last, free, out, page_size, out.device)

    paged.alloc_extend_kernel = _AnyGrid(alloc_extend)
    # SGLang makes a NCCL communicator for every group of several ranks.
    pynccl.PyNcclCommunicator = lambda *arguments, **options: SimpleNamespace(disabled=True)
