"""Weight sessions (``weight_sync.routes``) on SGLang's HTTP server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dllm.config import ConfigError, load_hf_config
from weight_sync.control import EngineControl
from weight_sync.gate import Gate
from weight_sync.layout import CheckpointLayout
from weight_sync.routes import weight_routes
from weight_sync.service import WeightService

HARMLESS = ("/rollout/abort", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/parse_function_call")
"""Requests without the admin's rights that change or end nothing, or end what runs."""


def install(app: Any, server_args: Any, dtype: str | None = None) -> WeightService:
    """Add the routes and the gate to SGLang's application, before it is started.

    Args:
        app: ``sglang.srt.entrypoints.http_server.app``.
        server_args: SGLang's ``ServerArgs``, with ``--custom-weight-loader``.
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
    service = WeightService(own_control(server_args), layout, str(server_args.weight_version))
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
    """Which requests make the engine decode: those that post something and do not need the admin's rights."""
    known: dict[str, bool] = {}

    def look_up() -> None:
        for route in app.routes:
            posts = {"POST", "PUT"} & set(getattr(route, "methods", None) or ())
            if posts and not hasattr(route.endpoint, "_auth_level"):
                known[route.path] = route.path not in HARMLESS

    def check(scope: dict[str, Any]) -> bool:
        if not known:
            look_up()
        return scope["method"] in ("POST", "PUT") and known.get(scope["path"], False)

    return check
