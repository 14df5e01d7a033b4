"""A decoder's options from its YAML file: empty, misspelt and ill-typed ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dllm.config import ConfigError
from dllm.decoding import check_options, decoder_class

STOCK_OPTIONS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "sglang.srt.dllm.algorithm.low_confidence:LowConfidence": {"threshold": (int, float)},
    "sglang.srt.dllm.algorithm.joint_threshold:JointThreshold": {
        "threshold": (int, float),
        "edit_threshold": (int, float),
        "max_post_edit_steps": int,
        "penalty_lambda": (int, float),
        "vectorized_decoding": bool,
    },
}
"""Options that SGLang 0.5.17's own decoders read; it ignores every other key, and a wrong type fails in a pass."""


def read_algorithm_config(algorithm: str, path: str | Path | None) -> dict[str, Any]:
    """Options of an algorithm from its YAML file, checked; ``block_size`` is allowed beside them.

    Returns:
        Options with defaults filled in for our decoders, as written for SGLang's own.

    Raises:
        ConfigError: the file is missing, empty or not a mapping, or a key is misspelt or has a wrong type.
    """
    options: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            what = "is a directory" if file.is_dir() else "does not exist"
            raise ConfigError(f"dllm_algorithm_config {str(path)!r} {what}; pass a YAML file or leave it out")
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"dllm_algorithm_config {str(path)!r} is not valid YAML: {reason}; write 'key: value' lines"
            ) from error
        if not isinstance(loaded, dict) or not loaded:
            raise ConfigError(
                f"dllm_algorithm_config {str(path)!r} is empty or not a mapping; write 'key: value' lines "
                "(e.g. 'threshold: 0.95') or leave the flag out to use the defaults"
            )
        options = dict(loaded)
    block_size = options.pop("block_size", None)
    if block_size is not None and (isinstance(block_size, bool) or not isinstance(block_size, int)):
        raise ConfigError(
            f"{algorithm} option block_size={block_size!r} has the wrong type; expected int, or leave it out"
        )
    if is_ours(algorithm):
        options = check_options(algorithm, options)
    elif algorithm in STOCK_OPTIONS:
        check_stock_options(algorithm, options)
    if block_size is not None:
        options["block_size"] = block_size
    return options


def check_stock_options(algorithm: str, options: Mapping[str, Any]) -> None:
    """Check the options of one of SGLang's own decoders.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    known = STOCK_OPTIONS[algorithm]
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{key!r} is not an option of {algorithm}; valid keys are {sorted(known)}")
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
            raise ConfigError(f"{algorithm} option {key}={value!r} has the wrong type; see SGLang's documentation")


def is_ours(algorithm: str) -> bool:
    """Whether the name is one of our decoders or of a third party's, and not SGLang's (whose modules this one never
    imports).

    Raises:
        ConfigError: there is no such algorithm.
    """
    if algorithm.startswith("sglang."):
        return False
    return hasattr(decoder_class(algorithm), "options")
