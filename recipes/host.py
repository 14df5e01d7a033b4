"""What machine this is: device choice and a figure for its speed."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

import torch


def choose_hardware(requested: str) -> tuple[str, str]:
    """Config group for ``hardware=`` and why: ``auto`` takes one GPU if CUDA is visible, else the CPU."""
    if requested != "auto":
        return requested, "as asked"
    if torch.cuda.is_available():
        return "gpu1", f"CUDA is visible ({torch.cuda.get_device_name(0)})"
    return "cpu", "no CUDA device is visible"


def visible_gpus() -> tuple[int, int | None]:
    """Number of GPUs, and bytes of the first; (0, None) without any."""
    if not torch.cuda.is_available():
        return 0, None
    return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory


def matmul_gflops_per_core(size: int = 512, repeats: int = 8) -> float:
    """fp32 matrix product on one thread, in GFLOP/s: hosts of one kind differ several times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(size, size), torch.randn(size, size)
        a @ b
        begin = time.perf_counter()
        for _ in range(repeats):
            a @ b
        return 2 * size**3 * repeats / (time.perf_counter() - begin) / 1e9
    finally:
        torch.set_num_threads(threads)


def host_report() -> dict[str, Any]:
    """Cores, memory, speed of one core, GPU."""
    import psutil

    report: dict[str, Any] = {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "fp32_gflops_per_core": round(matmul_gflops_per_core(), 1),
    }
    if torch.cuda.is_available():
        report["gpu"] = torch.cuda.get_device_name(0)
    return report


def package_versions() -> dict[str, str]:
    """Versions of the stack a figure depends on."""
    return {name: version(name) for name in ("torch", "sglang", "verl", "transformers", "ray")}
