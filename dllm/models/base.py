"""What every model is to the trainer: a packed forward pass with a head callable, and the gaps of its routers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dllm.attention import Attention
from dllm.config import positive_int, wrong_value

T = TypeVar("T")


class Shape(Protocol):
    """The sizes of a network, read from its config.json; what the common forward pass needs of them."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_experts(self) -> int: ...


def shape_values(cls: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the fields of a dataclass of sizes; a key that is missing or null is left out.

    Newer files keep what concerns the rotary embedding in ``rope_parameters``, which wins. Metadata ``least`` of a
    field is the smallest value of an integer, 1 without it.

    Raises:
        ConfigError: a value is not of the field's type, or is out of range.
    """
    rope = {} if config.get("rope_parameters") is None else config["rope_parameters"]
    if not isinstance(rope, Mapping):
        raise wrong_value(config, "rope_parameters", "an object")
    merged = {**config, **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}}
    values = {f.name: merged[f.name] for f in fields(cls) if merged.get(f.name) is not None}
    for f in (f for f in fields(cls) if f.name in values):
        value = values[f.name]
        if f.type == "int":
            positive_int(merged, f.name, f.metadata.get("least", 1))
        elif f.type == "bool" and not isinstance(value, bool):
            raise wrong_value(merged, f.name, "true or false")
        elif f.type == "float" and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise wrong_value(merged, f.name, "a number")
        elif f.type == "float" and not 0 < value <= sys.float_info.max:
            raise wrong_value(merged, f.name, "a positive number")
    return values


class Router(nn.Module):
    """Chooses the experts of a token; a subclass has ``forward(x [n, H]) -> (ids [n, k], weights [n, k])``.

    Attributes:
        fp32: the engine computes it in fp32 whatever the dtype of the rest.
        gap: float [n] of the last forward pass with ``record_gap`` on (see ``BlockDiffusionLM.router_gap``).
    """

    fp32: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.record_gap = False
        self.gap: Tensor | None = None


class BlockDiffusionLM(nn.Module):
    """A network whose ``state_dict`` has Hugging Face names with fused experts.

    A subclass sets ``shape``, ``model`` (with ``layers`` and ``norm``), ``lm_head`` and says what its embedding is
    called. It also says how its config.json is read (``from_hf``) and which tensors the engine keeps in fp32 whatever
    the dtype of the rest: the trainer must do the same, or the routers choose other experts.
    """

    fp32_suffixes: ClassVar[tuple[str, ...]] = ()
    embedding: ClassVar[str]
    layer_class: ClassVar[type[nn.Module]]
    shape: Shape
    model: Any
    lm_head: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint_layers = False
        self._tokens = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BlockDiffusionLM:
        """Network of a published config.json, with weights that are not initialised.

        Raises:
            ConfigError: a needed key is missing, or a feature is asked for that this model does not have.
        """
        raise NotImplementedError

    def forward(
        self, input_ids: Tensor, position: Tensor, attention: Attention, head: Callable[[Tensor, nn.Linear], T]
    ) -> T:
        """Run the network over packed states.

        Args:
            input_ids, position: int64 [rows, L].
            attention: who sees whom (see ``dllm.attention``).
            head: called as ``head(hidden [rows, L, H], lm_head)`` inside the forward pass, because under FSDP
                the head's weights exist only there; its result is returned.
        """
        self._tokens = input_ids.numel()
        x = getattr(self.model, self.embedding)(input_ids)
        for layer in self.model.layers:
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(layer, x, position, attention, use_reentrant=False)
            else:
                x = layer(x, position, attention)
        return head(self.model.norm(x), self.lm_head)

    def routers(self) -> Iterator[Router]:
        """Routers of the mixtures of experts; none in a dense model."""
        return (module for module in self.modules() if isinstance(module, Router))

    def fp32_modules(self) -> list[nn.Module]:
        """Modules that compute in fp32 whatever the dtype of the rest."""
        return [module for module in self.routers() if module.fp32]

    def record_router_gaps(self, record: bool) -> None:
        """Keep the selection gaps of the next forward pass (see ``router_gap``)."""
        for router in self.routers():
            router.record_gap, router.gap = record, None

    def router_gap(self) -> Tensor:
        """Smallest gap over all layers of the last forward pass: float [rows * L], +inf in a dense model.

        A gap is the distance between the last expert (or group) chosen and the first one not chosen, as scores or
        logits. Below about 1e-5 two correct fp32 implementations may choose differently.
        """
        gaps = [router.gap for router in self.routers() if router.gap is not None]
        if not gaps:
            return torch.full((self._tokens,), torch.inf, device=self.lm_head.weight.device)
        return torch.stack(gaps).amin(0)


@torch.no_grad()
def init_weights(model: BlockDiffusionLM, seed: int, head_std: float | None = None) -> None:
    """Draw fresh weights: 1 / sqrt(fan in) for matrices, 1 for norms and for the embedding."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        std = parameter.shape[-1] ** -0.5
        if name == "lm_head.weight" and head_std is not None:
            std = head_std
        if name == f"model.{model.embedding}.weight":
            std = 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
