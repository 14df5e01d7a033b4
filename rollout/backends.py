"""Which attention backends of SGLang 0.5.17 run block diffusion, on what device, with or without CUDA graphs.

A block attends in both directions to itself and to its prefix. FlashInfer alone captures that in a CUDA graph: SGLang
turns any other backend into it without asking, and two different backends for prefill and decode end in an attribute
error at the first capture. The rest of the choices either refuse bidirectional layers with a bare assert or compute
something else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dllm.config import ConfigError, attention_heads

CPU_ATTENTION = "torch_native"
GPU_ATTENTION = ("flashinfer", "triton", "fa3", "torch_native")
GRAPH_ATTENTION = "flashinfer"
FLASHINFER_HEAD_DIMS = (64, 128, 256)
DETERMINISTIC_ATTENTION = "triton"


def default_device() -> str:
    """cuda if a GPU is visible and the CPU engine was not asked for, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" else "cpu"


def graphs_disabled(flags: Mapping[str, Any]) -> bool:
    """Whether the flags switch CUDA graphs of denoise steps off, in any of SGLang's spellings."""
    decode = (flags.get("cuda_graph_config") or {}) if isinstance(flags.get("cuda_graph_config"), Mapping) else {}
    backends = (flags.get("cuda_graph_backend_decode"), (decode.get("decode") or {}).get("backend"))
    off = any(flags.get(name) for name in ("disable_cuda_graph", "disable_decode_cuda_graph"))
    return off or "disabled" in backends


def fill_attention(flags: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What to set: name to (value, reason); empty where the flags decide.

    Args:
        flags: with ``device`` and ``dtype`` filled in.

    Raises:
        ConfigError: the combination would assert later, or SGLang would replace it.
    """
    found: dict[str, tuple[Any, str]] = {}
    for phase in ("prefill_attention_backend", "decode_attention_backend"):
        if flags.get(phase) not in (None, flags.get("attention_backend")):
            raise ConfigError(
                f"{phase}={flags[phase]!r} splits prompt and response, which share their boundary block; set "
                "attention_backend alone"
            )
    if flags["device"] == "cpu":
        return _fill_cpu(flags)
    if flags["dtype"] == "float32":
        raise ConfigError(
            "dtype='float32' does not run on a GPU: SGLang's norm kernels take bfloat16 or float16; use one"
        )
    backend, off = flags.get("attention_backend"), graphs_disabled(flags)
    _, _, head_dim = attention_heads(config)
    odd = head_dim not in FLASHINFER_HEAD_DIMS
    no_graphs = f"FlashInfer has no kernels for heads of {head_dim}"
    if flags.get("enable_deterministic_inference"):
        # FlashInfer's graphs split keys by the batch, and SGLang keeps no radix cache with it in this mode.
        backend = backend or DETERMINISTIC_ATTENTION
        found["attention_backend"] = backend, "enable_deterministic_inference: keys are split by length alone"
        no_graphs = "enable_deterministic_inference: graphs of blocks split keys by the batch"
    elif backend is None:
        backend = "triton" if odd else GRAPH_ATTENTION
        found["attention_backend"] = backend, no_graphs if odd else "runs with CUDA graphs"
    if backend not in GPU_ATTENTION:
        raise ConfigError(f"attention_backend={backend!r} does not run block diffusion; use one of {GPU_ATTENTION}")
    if backend == "flashinfer" and odd:
        raise ConfigError(
            f"attention_backend='flashinfer' has no kernels for heads of {head_dim} (it has "
            f"{FLASHINFER_HEAD_DIMS}); use 'triton' with --disable-cuda-graph"
        )
    if not off and backend != GRAPH_ATTENTION:
        if flags.get("attention_backend") is not None and not flags.get("enable_deterministic_inference"):
            raise ConfigError(
                f"attention_backend={backend!r} cannot capture CUDA graphs of block diffusion; use "
                "'flashinfer' or add --disable-cuda-graph"
            )
        found["disable_cuda_graph"] = True, no_graphs
    return {name: item for name, item in found.items() if flags.get(name) != item[0]}


def _fill_cpu(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    backend = flags.get("attention_backend")
    if backend not in (None, CPU_ATTENTION):
        raise ConfigError(
            f"attention_backend={backend!r} does not run block diffusion on a CPU; use {CPU_ATTENTION!r} or leave it "
            "unset"
        )
    if flags.get("enable_deterministic_inference"):
        raise ConfigError("enable_deterministic_inference=True has GPU kernels only; leave it out on a CPU")
    found: dict[str, tuple[Any, str]] = {}
    if backend is None:
        found["attention_backend"] = CPU_ATTENTION, "the CPU engine's"
    if not flags.get("disable_cuda_graph"):
        found["disable_cuda_graph"] = True, "no GPU"
    if not flags.get("sleep_on_idle"):
        found["sleep_on_idle"] = True, "an idle scheduler would spin on a whole core"
    return found
