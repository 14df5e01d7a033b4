"""An engine starts with the whole plugin or not at all.

SGLang logs a plugin that fails to load, or a hook that finds no target, and goes on with its stock behaviour: it would
decode without a log, with weights that cannot be refreshed.
"""

from __future__ import annotations

from typing import Any

from dllm.config import ConfigError
from rollout.versions import PLUGIN, check_plugin

REMEDY = "install the pinned versions (uv sync) into this environment; the log has the traceback"

_state = "was not loaded"


def loaded() -> None:
    """Note that everything is registered in this process."""
    global _state
    _state = ""


def failed(error: Exception) -> None:
    """Note why the plugin cannot work, and make every engine of this process refuse to start with block diffusion."""
    global _state
    _state = f"failed to load: {type(error).__name__}: {error}"
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in (
        "sglang.srt.server_args.ServerArgs.__post_init__",  # before anything is started
        "sglang.srt.dllm.config.DllmConfig.from_server_args",  # in the scheduler, which gets its arguments ready-made
    ):
        HookRegistry.register(target, _refuse, HookType.BEFORE)


def _refuse(server_args: Any) -> None:
    if getattr(server_args, "dllm_algorithm", None) is not None:
        check_loaded()


def check_loaded() -> None:
    """Refuse an engine without the whole plugin; called when SGLang has applied its hooks.

    Raises:
        ConfigError: it failed to load, or a hook of it found no target.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if _state:
        raise ConfigError(f"SGLang's plugin {PLUGIN} {_state}; {REMEDY}")
    for target, hooks in HookRegistry._hooks.items():
        ours = any(source is not None and source.plugin_name == PLUGIN for _, _, source in hooks)
        if ours and target not in HookRegistry._patched:
            raise ConfigError(f"SGLang's plugin {PLUGIN} could not change {target}; {REMEDY}")


def require() -> None:
    """Load SGLang's plugins in this process.

    Raises:
        ConfigError: ours is not among them, or does not work.
    """
    check_plugin()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    check_loaded()
