"""Features of SGLang that block diffusion does not have, and those that a weight refresh excludes.

Most of them SGLang switches off with no more than a line in its log; a user who asked for one should hear of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.config import ConfigError

SWITCHED_OFF = ("enable_mixed_chunk", "enable_hierarchical_cache", "enable_lmcache")
"""What SGLang switches off for block diffusion."""


def check_features(flags: Mapping[str, Any]) -> None:
    """Refuse flags of features that block diffusion does not have.

    Raises:
        ConfigError: some of them are set, a line each.
    """
    get, found = flags.get, []
    if (get("pp_size") or 1) > 1:
        found.append(f"pp_size={get('pp_size')} is not supported for block diffusion; use tp_size")
    for name in ("enable_lora", "lora_paths"):
        if get(name):
            found.append(f"{name}={get(name)} is not supported for block diffusion; merge the adapter into the weights")
    if get("disaggregation_mode") not in (None, "null"):
        found.append(
            f"disaggregation_mode={get('disaggregation_mode')!r} is not supported for block diffusion: prompt and "
            "response share their boundary block; leave it unset"
        )
    if get("speculative_algorithm") is not None:
        found.append(
            f"speculative_algorithm={get('speculative_algorithm')!r} drafts token by token, which block diffusion does "
            "not; leave it unset"
        )
    for name in SWITCHED_OFF:
        if get(name):
            found.append(f"{name}=True is switched off by SGLang for block diffusion; leave it out")
    if found:
        raise ConfigError("\n".join(found))


def check_refresh(flags: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse what a weight refresh excludes: refreshed weights are not quantised again.

    Raises:
        ConfigError: a flag or the checkpoint asks for quantised weights.
    """
    method = (config.get("quantization_config") or {}).get("quant_method")
    for name, value, remedy in (
        ("quantization", flags.get("quantization"), "leave it unset"),
        ("torchao_config", flags.get("torchao_config"), "leave it unset"),
        ("config.json quantization_config", method, "train from the checkpoint that is not quantised"),
    ):
        if value:
            raise ConfigError(
                f"{name}={value!r} cannot be combined with weight refresh: refreshed weights are not re-quantised; "
                f"{remedy}"
            )
