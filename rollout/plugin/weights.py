"""Weight sessions (``weight_sync.routes``) on SGLang's HTTP server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dllm.config import ConfigError, load_hf_config
from weight_sync.control import EngineControl
from weight_sync.gate import Gate
from weight_sync.layout import CheckpointLayout
from weight_sync.metrics import RefreshMetrics
from weight_sync.routes import weight_routes
from weight_sync.service import WeightService

HARMLESS = ("/rollout/abort", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/parse_function_call")
"""Requests without the administrator's rights that decode nothing."""


def install(app: Any, server_args: Any, dtype: str | None = None) -> WeightService:
    """Add the routes and the gate to SGLang's application, before it is started.

    Args:
        app: ``sglang.srt.entrypoints.http_server.app``.
        server_args: SGLang's ``ServerArgs``.
        dtype: of the engine's weights, where ``server_args.dtype`` leaves it to the checkpoint.

    Raises:
        ConfigError: the engine cannot be updated this way.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if server_args.tokenizer_worker_num != 1:
        raise ConfigError(
            f"tokenizer_worker_num={server_args.tokenizer_worker_num} does not work with weight sessions; use 1"
        )
    config = load_hf_config(server_args.model_path)
    chosen = dtype or server_args.dtype
    layout = CheckpointLayout.from_config(config, getattr(torch, chosen))
    metrics = RefreshMetrics(bool(server_args.enable_metrics))
    service = WeightService(own_control(server_args), layout, str(server_args.weight_version), metrics=metrics)
    router = weight_routes(service)
    for route in router.routes:
        auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)  # type: ignore[attr-defined]
    # Not include_router: SGLang's check of keys looks at the application's own routes, and would find none in a router.
    app.router.routes.extend(router.routes)
    app.add_middleware(Gate, service=service, generates=generates(app))
    return service


def own_control(server_args: Any) -> EngineControl:
    """The server's own endpoints, as it reaches them itself."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server_args.host, server_args.host)
    scheme = "https" if server_args.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server_args.port}"
    key = server_args.admin_api_key or server_args.api_key
    return EngineControl(url, server_args.tp_size, key)


def generates(app: Any) -> Callable[[dict[str, Any]], bool]:
    """Which requests make the engine decode: whatever posts something, unless it is known to be something else."""
    others: list[Any] = []

    def check(scope: dict[str, Any]) -> bool:
        if scope["method"] not in ("POST", "PUT") or scope["path"] in HARMLESS:
            return False
        if not others:
            marked = [route for route in app.routes if hasattr(getattr(route, "endpoint", None), "_auth_level")]
            others.extend(route.path_regex for route in marked)
        return not any(pattern.match(scope["path"]) for pattern in others)

    return check
