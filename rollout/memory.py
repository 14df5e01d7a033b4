"""GPU memory of an engine, from a config.json and a few flags: weights, keys and values, CUDA graphs, logits.

Pure arithmetic, no GPU. What is not proportional to anything a user chooses is one constant; the rest follows from
shapes. One fact decides for block diffusion: logits of every position of every running block are alive at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dllm.config import ConfigError, attention_heads, positive_int
from dllm.models import meta_model

LOGIT_COPIES = 3
"""Copies of a [block, vocabulary] fp32 matrix alive in a denoise step: logits, softmax and the draw's work space."""

LIBRARIES = 2 << 30
"""CUDA context, kernels, attention workspaces and the activations of a pass, in bytes."""

GRAPH_INDEX_BYTES = 5
"""FlashInfer's buffers of a CUDA graph: for each of its tokens, a 4-byte key index and a 1-byte mask per position of
the longest context (SGLang 0.5.17, ``FlashInferAttnBackend.init_cuda_graph_state``)."""

GRAPH_LOGIT_BYTES = 6
"""Logits inside a CUDA graph: in the model's dtype and as fp32."""

KV_BLOCKS = 2
"""Blocks a running request must have room for, so that a start makes sense at all."""

DEFAULT_GRAPH_BATCH = ((35, 24, 80), (60, 32, 160), (160, 256, 512), (math.inf, 512, 512))
"""(GiB of a card below, largest CUDA graph below 4-way tensor parallelism, from there on): SGLang 0.5.17's defaults."""

Config = Mapping[str, Any]


def checkpoint_dtype(config: Config) -> str:
    """dtype of the checkpoint's weights as config.json names it; bfloat16 if it does not."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def engine_dtype(config: Config, device: str) -> str:
    """dtype of an engine that was asked for none: the checkpoint's, but bfloat16 for an fp32 checkpoint on a GPU."""
    dtype = checkpoint_dtype(config)
    return "bfloat16" if dtype == "float32" and device != "cpu" else dtype


def width(dtype: str) -> int:
    """Bytes of a number."""
    return 4 if dtype == "float32" else 2


def weight_bytes(config: Config, dtype: str | None = None) -> int | None:
    """Bytes of the weights; routers stay fp32. None for a network that ``dllm.models`` does not have."""
    try:
        model = meta_model(config)
    except ConfigError:
        return None
    usual = width(dtype or checkpoint_dtype(config))
    return sum(
        tensor.numel() * (4 if name.endswith(model.fp32_suffixes) else usual)
        for name, tensor in model.state_dict().items()
    )


def kv_bytes_per_token(config: Config, dtype: str | None = None, tp_size: int = 1) -> int:
    """Bytes of keys and values of one token over all layers on one GPU; a head is never split."""
    _, heads, head_dim = attention_heads(config)
    layers = positive_int(config, "num_hidden_layers")
    return 2 * layers * -(-heads // tp_size) * head_dim * width(dtype or checkpoint_dtype(config))


def logit_bytes(vocab_size: int, block_size: int) -> int:
    """Bytes that one running request's logits take in a denoise step."""
    return vocab_size * block_size * 4 * LOGIT_COPIES


def default_graph_batch(total: int, tp_size: int) -> int:
    """Largest batch SGLang captures a CUDA graph for, on a card of ``total`` bytes."""
    if total < 20 << 30:
        return 8
    return next(
        large if tp_size >= 4 else small for limit, small, large in DEFAULT_GRAPH_BATCH if total < limit * 2**30
    )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU.

    Attributes:
        total: of the card.
        weights: None if the architecture is not known here.
        graphs, logits: at this batch.
        libraries: context, kernels, workspaces.
        kv_per_token: of one token.
        running: requests decoded together.
        block_size: tokens.
        kv_tokens_needed: the least KV cache that makes sense.
        fraction: of the card that SGLang gives to weights and KV cache, if set.
    """

    total: int
    weights: int | None
    graphs: int
    logits: int
    libraries: int
    kv_per_token: int
    running: int
    block_size: int
    kv_tokens_needed: int
    fraction: float | None = None

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return (self.weights or 0) + self.graphs + self.logits + self.libraries

    @property
    def kv(self) -> int:
        """What is left for keys and values, negative if nothing is."""
        left = self.total - self.fixed
        return left if self.fraction is None else min(left, int(self.fraction * self.total) - (self.weights or 0))

    @property
    def kv_tokens(self) -> int:
        return max(0, self.kv // self.kv_per_token)

    def as_dict(self) -> dict[str, Any]:
        """Bytes by name, for machines."""
        names = ("total", "weights", "graphs", "logits", "libraries", "kv", "kv_per_token", "kv_tokens", "running")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        """One line in GB (1e9 bytes)."""
        gb = lambda value: "unknown" if value is None else f"{value / 1e9:.1f}"
        return (
            f"GPU memory {gb(self.total)} GB: weights {gb(self.weights)}, CUDA graphs {gb(self.graphs)}, logits of "
            f"{self.running} blocks {gb(self.logits)}, libraries {gb(self.libraries)}, left for the KV cache "
            f"{gb(self.kv)} ({self.kv_tokens} tokens, {self.kv_tokens // max(1, self.running)} per running request)"
        )

    def check(self) -> None:
        """Refuse what cannot fit.

        Raises:
            ConfigError: the estimate is over the card or over ``mem_fraction_static``.
        """
        needed = self.kv_tokens_needed * self.kv_per_token
        if self.kv >= needed:
            return
        if self.fixed + needed <= self.total:
            least = ((self.weights or 0) + needed) / self.total
            raise ConfigError(
                f"mem_fraction_static={self.fraction} leaves no room for a KV cache of {self.kv_tokens_needed} tokens: "
                f"{self.describe()}; raise it to at least {math.ceil(least * 100) / 100:.2f} or leave it unset"
            )
        raise ConfigError(
            f"not enough GPU memory: {(self.fixed + needed) / 1e9:.1f} GB with a KV cache of {self.kv_tokens_needed} "
            f"tokens. {self.describe()}; use more GPUs (tp_size), fewer running requests (max_running_requests="
            f"{self.running}, {(self.graphs + self.logits) / max(1, self.running) / 1e6:.0f} MB each), or a larger card"
        )


def estimate(
    config: Config,
    total: int,
    *,
    running: int,
    block_size: int,
    dtype: str | None = None,
    tp_size: int = 1,
    graph_batch: int | None = None,
    context_length: int | None = None,
    kv_tokens: int | None = None,
    fraction: float | None = None,
) -> MemoryEstimate:
    """Memory of an engine on a card of ``total`` bytes.

    Args:
        config: config.json.
        running: requests decoded together.
        graph_batch: largest batch of a CUDA graph; 0 without graphs, None for SGLang's default.
        context_length: longest sequence; the model's own if None.
        kv_tokens: size of the KV cache if the user set it.
        fraction: ``mem_fraction_static`` if the user set it.
    """
    weights, vocab = weight_bytes(config, dtype), positive_int(config, "vocab_size")
    graph = min(running, default_graph_batch(total, tp_size) if graph_batch is None else graph_batch)
    context = context_length or int(config.get("max_position_embeddings") or 0)
    return MemoryEstimate(
        total=total,
        weights=None if weights is None else weights // tp_size,
        graphs=graph * block_size * (GRAPH_INDEX_BYTES * context + GRAPH_LOGIT_BYTES * vocab),
        logits=running * logit_bytes(vocab, block_size),
        libraries=LIBRARIES,
        kv_per_token=kv_bytes_per_token(config, dtype, tp_size),
        running=running,
        block_size=block_size,
        kv_tokens_needed=kv_tokens or running * KV_BLOCKS * block_size,
        fraction=fraction,
    )


def device_memory_bytes(device: str) -> int:
    """Total memory of the device; of the first GPU, read without creating a CUDA context.

    Raises:
        ConfigError: there is no GPU to ask.
    """
    if device == "cpu":
        import psutil

        return psutil.virtual_memory().total
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    except pynvml.NVMLError as error:
        raise ConfigError(f"device={device!r}, but no GPU answers ({error}); use device='cpu'") from error


def choose_max_running_requests(vocab_size: int, block_size: int, memory_bytes: int, limit: int) -> int:
    """Largest power of two of blocks whose logits fit into a tenth of the memory, at most ``limit``."""
    fitting = max(2, memory_bytes // 10 // logit_bytes(vocab_size, block_size))
    return min(limit, 1 << (int(fitting).bit_length() - 1))
