"""Which experts each token's routers chose when it was revealed: recorded on request, to compare with the trainer.

SGLang's own capture (``--enable-return-routed-experts``) does not serve block diffusion: it keeps the experts of a
token by its slot of the KV cache, which every denoise step overwrites, so that only the commit pass would survive;
LLaDA2's ``TopK`` modules are made without the layer index it files them under; results of block-diffusion batches never
read it; and it wants pinned host memory, which a CPU host does not have. The hook that feeds it is what we use: with
the flag set, ours takes its place and the decoder reads the experts of the pass that just ran. Without the flag nothing
is installed and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm.routing import expert_set_hash


class RoutingCapturer:
    """Stands where SGLang's ``RoutedExpertsCapturer`` would; holds the experts of the last forward pass.

    The buffer has one address for good, so that writing to it can be part of a CUDA graph.

    Args:
        tokens: largest forward pass.
        layers: indices of the layers with a router, in order.
        experts: chosen per token.
    """

    def __init__(self, tokens: int, layers: list[int], experts: int, device: torch.device | str) -> None:
        self.column = {layer: index for index, layer in enumerate(layers)}
        self.experts = experts
        self.buffer = torch.zeros(tokens, len(layers), experts, dtype=torch.int32, device=device)

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """Called by every router during a forward pass; ``topk_indices`` is [tokens, experts and more]."""
        count = topk_indices.shape[0]
        if count > len(self.buffer):
            raise RuntimeError(
                f"a forward pass of {count} tokens does not fit the routing buffer of {len(self.buffer)}"
            )
        self.buffer[:count, self.column[layer_id]] = topk_indices[:, : self.experts].to(torch.int32)

    def on_forward_end(self, *args: Any, **kwargs: Any) -> None:
        """SGLang would copy to the host here; the decoder reads the buffer instead."""

    def get_topk(self, *args: Any, **kwargs: Any) -> None:
        """SGLang would answer a request from its host copy."""


class RoutingLog:
    """Hashes of the experts of every position at its reveal, one table row per slot of SGLang's request pool."""

    def __init__(self, capturer: RoutingCapturer, slots: int, block_size: int) -> None:
        self.capturer = capturer
        routers = capturer.buffer.shape[1]
        self.table = torch.zeros(slots, block_size, routers, dtype=torch.int64, device=capturer.buffer.device)

    def add(self, slot: Tensor, revealed: Tensor) -> None:
        """Log the pass that just ran; ``slot`` is int64 [n], ``revealed`` bool [n, B]."""
        count, size = revealed.shape
        hashes = expert_set_hash(self.capturer.buffer[: count * size]).view(count, size, -1)
        self.table[slot] = torch.where(revealed[..., None], hashes, self.table[slot])

    def collect(self, slot: Tensor) -> np.ndarray:
        """int64 [k, B, routers] of the slots (int64 [k])."""
        return self.table[slot].cpu().numpy()


_capturer: RoutingCapturer | None = None


def current() -> RoutingCapturer | None:
    """The capturer of this process's engine, if it was asked for."""
    return _capturer


def install_capturer(model: torch.nn.Module, experts: int, tokens: int, device: torch.device | str) -> RoutingCapturer:
    """Give every router of ``model`` its layer index and put a capturer in the place of SGLang's."""
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer

    layers = []
    for module in model.modules():
        for child in module.children():
            if isinstance(child, TopK):
                child.layer_id = module.layer_id if child.layer_id is None else child.layer_id
                layers.append(child.layer_id)
    global _capturer
    _capturer = RoutingCapturer(tokens, layers, experts, device)
    set_global_experts_capturer(_capturer)
    return _capturer


def _init_capturer(original: Callable, runner: Any) -> None:
    """Ours for block diffusion on a model with routers, SGLang's for anything else."""
    args = runner.server_args
    config = runner.model_config.hf_text_config
    experts = getattr(config, "num_experts_per_tok", None)
    if not args.enable_return_routed_experts or args.dllm_algorithm is None:
        return original(runner)
    if not experts:
        return None
    from sglang.srt.dllm.config import DllmConfig

    block_size = DllmConfig.from_server_args(args).block_size
    # A pass holds whole blocks of running requests; graphs are captured up to the same number, rounded up.
    tokens = 2 * max(args.chunked_prefill_size or 0, runner.max_running_requests * block_size)
    install_capturer(runner.model, experts, tokens, runner.device)
    return None


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer",
        _init_capturer,
        HookType.AROUND,
    )
