"""What the server tells about its settings leaves its keys out.

Stock SGLang 0.5.17 answers ``/server_info`` with all of its arguments to anyone, twice, those keys included that guard
weights, flush, profile and abort.
"""

from __future__ import annotations

from typing import Any

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
HIDDEN = "***"


def without_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with a mark in the place of every secret that is set."""
    return settings | {name: HIDDEN for name in SECRETS if settings.get(name) is not None}


def _after_settings(result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return without_keys(result)


def _after_state(result: Any, *args: Any, **kwargs: Any) -> None:
    result.internal_state = without_keys(result.internal_state)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sglang.srt.managers.tokenizer_manager.TokenizerManager.resolved_config_dict", _after_settings),
        ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _after_state),
    ):
        HookRegistry.register(target, hook, HookType.AFTER)
