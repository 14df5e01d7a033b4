"""Variants of a decoder to compare: every combination of algorithms and option values, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import yaml

from dllm.config import ConfigError
from dllm.decoding import make_decoder


@dataclass(frozen=True)
class Variant:
    """One decoder with its options; those that are not named keep the decoder's defaults."""

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short and unique within a grid, e.g. ``SelectThenSample threshold=0.9``."""
        return " ".join([self.algorithm.rpartition(":")[2], *(f"{key}={value}" for key, value in self.options.items())])


def parse_option(text: str) -> tuple[str, list[Any]]:
    """``KEY=V1,V2`` as a key and its values, each read as YAML.

    Raises:
        ConfigError: it is not of this form.
    """
    key, separator, values = text.partition("=")
    if not key or not separator or not all(parts := values.split(",")):
        raise ConfigError(
            f"option {text!r} is not KEY=VALUE or KEY=VALUE,VALUE; write for instance tokens_per_step=1,2"
        )
    return key, [yaml.safe_load(part) for part in parts]


def variant_grid(algorithms: Sequence[str], options: Mapping[str, Sequence[Any]], mask_id: int) -> list[Variant]:
    """Every algorithm with every combination of option values.

    Raises:
        ConfigError: an algorithm does not exist, does not have an option or refuses a value, or is named twice.
    """
    grid = [
        Variant(algorithm, dict(zip(options, values, strict=True)))
        for algorithm in algorithms
        for values in product(*options.values())
    ]
    seen: set[str] = set()
    for variant in grid:
        make_decoder(variant.algorithm, mask_id, variant.options)
        if variant.label in seen:
            raise ConfigError(f"{variant.label!r} is asked for twice; name each algorithm and each value once")
        seen.add(variant.label)
    return grid
