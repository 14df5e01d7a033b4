"""Decoders by name. A name is one of ``DECODERS`` or ``package.module:Class`` of a third party."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from dllm.config import ConfigError
from dllm.decoding.base import BlockBatch, Decoder, Reveal, draw_at
from dllm.decoding.confidence import failed_rows, masked_confidence
from dllm.decoding.entropy_bound import EntropyBound
from dllm.decoding.fast_dllm_v2 import FastDLLMv2
from dllm.decoding.joint_threshold import JointThreshold
from dllm.decoding.margin import Margin
from dllm.decoding.sample_then_select import SampleThenSelect, SelectionRule
from dllm.decoding.sampling import NO_TOP_K, SamplingBatch, SamplingParams
from dllm.decoding.select_then_sample import LowConfidence, SelectThenSample, reveal
from dllm.decoding.static_steps import StaticSteps

DECODERS: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        SelectThenSample,
        LowConfidence,
        SampleThenSelect,
        JointThreshold,
        StaticSteps,
        EntropyBound,
        Margin,
        FastDLLMv2,
    )
}

__all__ = [
    "DECODERS",
    "NO_TOP_K",
    "BlockBatch",
    "Decoder",
    "Reveal",
    "SamplingBatch",
    "SamplingParams",
    "SelectionRule",
    "decoder_class",
    "draw_at",
    "failed_rows",
    "make_decoder",
    "masked_confidence",
    "reveal",
]


def decoder_class(name: str) -> type:
    """The decoder called ``name``.

    Raises:
        ConfigError: no such decoder, or the named class is not one.
    """
    if name in DECODERS:
        return DECODERS[name]
    module_name, separator, class_name = name.partition(":")
    if not separator:
        raise ConfigError(
            f"dllm algorithm {name!r} does not exist; use one of {sorted(DECODERS)} or 'package.module:Class'"
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"dllm algorithm {name!r} cannot be imported ({error}); check the module path") from error
    if not isinstance(cls, type) or not hasattr(cls, "step"):
        raise ConfigError(f"dllm algorithm {name!r} is not a decoder class; it needs step(blocks, logits)")
    return cls


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of decoder ``name`` with defaults filled in.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    known = dict(getattr(decoder_class(name), "options", {}))
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{key!r} is not an option of {name}; valid keys are {sorted(known)}")
        default = known[key]
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        right = isinstance(value, (int, float)) and not isinstance(value, bool) if number else True
        if isinstance(default, int) and not isinstance(default, bool) and isinstance(value, float):
            right = False
        if isinstance(default, (bool, str)):
            right = isinstance(value, type(default))
        if not right:
            raise ConfigError(f"{name} option {key}={value!r} has the wrong type; expected {type(default).__name__}")
        known[key] = value
    return known


def make_decoder(name: str, mask_id: int, options: Mapping[str, Any] | None = None) -> Decoder:
    """Build decoder ``name``; ``options`` are its YAML keys.

    Raises:
        ConfigError: unknown name or key, or a value the decoder refuses.
    """
    checked = check_options(name, options or {})
    try:
        return decoder_class(name)(mask_id=mask_id, **checked)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dllm algorithm {name!r} with {checked} cannot be built: {error}") from error
