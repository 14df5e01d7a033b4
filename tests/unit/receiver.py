"""An engine's model without an engine: parameters named and sharded as SGLang has them, and the loader in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dllm.trace import TORN
from tests.support import small_config
from weight_sync import loader
from weight_sync.messages import (
    CHECKSUM,
    HOLDS,
    Abort,
    BucketSpec,
    Commit,
    LoaderStatus,
    Manifest,
    Message,
    ResendError,
    Slots,
    Torn,
    WeightSyncError,
)

Shape = tuple[int, ...]


def engine_shapes(wire: Mapping[str, Shape], config: Mapping[str, Any], size: int = 1) -> dict[str, Shape]:
    """Shapes of one rank's parameters, from the fused shapes of a checkpoint."""
    shapes: dict[str, Shape] = {}
    for name, shape in wire.items():
        if name.endswith("experts.gate_up_proj"):
            shapes[name.replace("gate_up_proj", "w13_weight")] = (shape[0], shape[1] // size, shape[2])
        elif name.endswith("experts.down_proj"):
            shapes[name.replace("down_proj", "w2_weight")] = (shape[0], shape[1], shape[2] // size)
        elif name.endswith(("embeddings.weight", "embed_tokens.weight", "lm_head.weight")):
            shapes[name] = (-(-shape[0] // 64) * 64 // size, shape[1])
        elif name.endswith(("query_key_value.weight", ".q_proj.weight")):
            kv = max(1, config["num_key_value_heads"] // size)
            rows = (config["num_attention_heads"] // size + 2 * kv) * config["head_dim"]
            shapes[name.replace("q_proj", "qkv_proj")] = (rows, shape[1])
        elif name.endswith(("dense.weight", ".o_proj.weight", ".down_proj.weight")):
            shapes[name] = (shape[0], shape[1] // size)
        elif name.endswith(".gate_proj.weight"):
            shapes[name.replace("gate_proj", "gate_up_proj")] = (2 * shape[0] // size, shape[1])
        elif not name.endswith((".up_proj.weight", ".k_proj.weight", ".v_proj.weight")):
            shapes[name] = shape
    return shapes


class Receiver(nn.Module):
    """What the loader gets as the model: a small LLaDA2 as an engine holds it, filled with -7."""

    def __init__(self, wire: Mapping[str, Shape]) -> None:
        super().__init__()
        shapes = engine_shapes(wire, asdict(small_config()))
        self.held = {name: nn.Parameter(torch.full(shape, -7.0)) for name, shape in shapes.items()}

    @property
    def config(self) -> Receiver:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"architectures": ["LLaDA2MoeModelLM"], **asdict(small_config())}

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.held.items()

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Whether the parameters are exactly ``state``, and what stands for no token is zero."""
        for name, tensor in state.items():
            fused = {"experts.gate_up_proj": "experts.w13_weight", "experts.down_proj": "experts.w2_weight"}
            for old, new in fused.items():
                name = name.removesuffix(old) + new if name.endswith(old) else name
            if name.endswith((".gate_proj.weight", ".up_proj.weight")):
                half = self.held[name.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")]
                held = half.chunk(2)[name.endswith(".up_proj.weight")]
            else:
                held = self.held[name]
            rest = held[len(tensor) :] if tensor.dim() else held[:0]
            if not torch.equal(held[: len(tensor)] if tensor.dim() else held, tensor) or bool(rest.any()):
                return False
        return True


class LocalEngine:
    """An engine whose loader runs in this process; what a test does to messages goes into ``tamper``."""

    staged, held = False, ""

    def __init__(self, receiver: Receiver, url: str = "local") -> None:
        self.receiver, self.url = receiver, url
        self.calls: list[str] = []
        self.tamper: Any = None
        self.specs: list[BucketSpec] = []

    def say(self, header: Message, tensors: Sequence[Tensor] = ()) -> str:
        return say(self.receiver, header, tensors)

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        if (loader.STATE.label or "").startswith(TORN):
            raise Torn(loader.STATE.label)
        self.calls.append("resume")

    def begin(self, manifest: Manifest) -> None:
        self.calls.append("begin")
        self.held = self.say(manifest).partition(HOLDS)[2]

    def send_slots(self, run_id: str, version: str, buffers: Sequence[Tensor]) -> None:
        self.say(Slots(run_id, version), buffers)

    def send_bucket(self, spec: BucketSpec, data: Tensor | None = None) -> str:
        self.calls.append(f"bucket {spec.index}")
        self.specs.append(spec)
        if self.tamper is not None:
            return self.tamper(self, spec, data)
        return self.deliver(spec, data)

    def deliver(self, spec: BucketSpec, data: Tensor | None = None) -> str:
        return self.say(spec, [] if data is None else [data]).partition(CHECKSUM)[2]

    def commit(self, run_id: str, version: str, checksum: str = "") -> None:
        self.calls.append("commit")
        self.say(Commit(run_id, version, checksum))

    def abort(self, run_id: str, version: str) -> None:
        self.calls.append("abort")
        self.say(Abort(run_id, version))

    def close(self) -> None: ...


def status_of(receiver: Any, header: Message, tensors: Sequence[Tensor] = ()) -> LoaderStatus:
    """What the loader makes of a message; the plugin's part is done as well."""
    given = list(tensors) or [torch.empty(0, dtype=torch.uint8)]
    loader.load(receiver, [(header.encode() if i == 0 else "", tensor) for i, tensor in enumerate(given)])
    assert loader.STATE.status is not None
    loader.answer([loader.STATE.status])
    return loader.STATE.status


def say(receiver: Any, header: Message, tensors: Sequence[Tensor] = ()) -> str:
    """Deliver a message; the engine's answer.

    Raises:
        ResendError, WeightSyncError: as ``EngineControl``.
    """
    status = status_of(receiver, header, tensors)
    good, message = loader.answer([status])
    if not good:
        raise (ResendError if status.resend else WeightSyncError)(message)
    return message
