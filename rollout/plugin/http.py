"""Our routes on SGLang's HTTP server, and its start."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Any

from dllm.config import ConfigError
from rollout.jobs import chat_ids
from rollout.plugin.backend import service_of
from rollout.plugin.loading import require
from rollout.plugin.refusals import Refusals
from rollout.requests import Model
from rollout.routes import rollout_routes
from rollout.service import Service

OPEN = ("/generate", "/info")
"""Routes of ours that need no admin key."""

OTHER_SERVERS = ("smg_grpc_mode", "grpc_mode", "use_ray")
"""Flags by which ``sglang.launch_server`` starts something else than SGLang's HTTP server."""

UNMARKED = ("/set_trace_level", "/load_lora_adapter_from_tensors")
"""Routes of SGLang that need the administrator's rights and ask for none."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_reachable(host: str, admin_api_key: str | None) -> None:
    """Refuse a server that anyone on the network could abort, flush, profile or give other weights.

    Raises:
        ConfigError: it is bound to more than loopback and has no admin key.
    """
    if not is_loopback(host) and not admin_api_key:
        raise ConfigError(
            f"host={host!r} is reachable from other machines and has no key for weights, flush, profile, abort; "
            "pass --admin-api-key KEY or --host 127.0.0.1"
        )


def check_tokenizers(count: int) -> None:
    """Refuse several tokenizer processes: a request's samples would be spread over them.

    Raises:
        ConfigError: there are more than one.
    """
    if count != 1:
        raise ConfigError(f"tokenizer_worker_num={count} does not work with /rollout; use 1")


def check_port(args: Any) -> None:
    """Refuse an address that cannot be listened on; SGLang would find out when the model is loaded.

    Raises:
        ConfigError: the port is taken, or there is no such host or port here.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((args.host, args.port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"port={args.port} of host={args.host!r} cannot be listened on ({reason}); pass another --port or --host"
        ) from error


def longest(manager: Any) -> int:
    """Tokens of prompt and response together that the scheduler takes without shortening the response."""
    reserve = 4  # SGLang keeps 5 back from a prompt and 1 from a response
    return manager.context_len if manager.max_req_input_len is None else manager.max_req_input_len + reserve


def connect() -> tuple[Service, Model]:
    """Service and model of the engine of this process."""
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    if state is None:
        raise ConfigError("the engine is still starting; ask again when /health answers 200")
    manager = state.tokenizer_manager
    service, tokenizer = service_of(manager), manager.tokenizer

    model = Model(
        mask_id=service.block_diffusion.mask_id,
        vocab_size=manager.model_config.vocab_size,
        block_size=service.block_size,
        context_length=longest(manager),
        encode=lambda text: list(tokenizer.encode(text)),
        template=lambda messages: chat_ids(tokenizer, messages),
        decoder=service.decoder,
        routing=bool(manager.server_args.enable_return_routed_experts),
    )
    return service, model


def guard(app: Any) -> None:
    """Make all of SGLang's administrative routes ask for the key.

    Two are not marked. Those of included routers are, but its check of keys looks at the application's own routes only:
    they come first once more, where it sees them.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in app.routes:
        if getattr(route, "path", None) in UNMARKED:
            auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)
    included = [
        route for part in app.routes if hasattr(part, "original_router") for route in part.original_router.routes
    ]
    app.router.routes[:0] = [route for route in included if hasattr(route.endpoint, "_auth_level")]


def require_admin_key(key: str) -> None:
    """Make SGLang's application in this process ask for the key. Its own server does; verl's start of it does not."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import add_api_key_middleware

    guard(app)
    add_api_key_middleware(app, api_key=None, admin_api_key=key)


def install(app: Any, args: Any) -> None:
    """Add the rollout routes to SGLang's application, before it is started."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    router = rollout_routes(connect)
    for route in router.routes:
        if not route.path.endswith(OPEN):  # type: ignore[attr-defined]
            auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint.__func__)  # type: ignore[attr-defined]
    guard(app)
    # Not include_router: SGLang's check of keys looks at the application's own routes, and would find none in a router.
    app.router.routes.extend(router.routes)
    app.add_middleware(Refusals)


def serve(argv: Sequence[str]) -> None:
    """Start SGLang's server with the rollout routes; returns when it ends.

    Raises:
        ConfigError: the preflight refused, or the plugin does not work; no process was started.
    """
    require()
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    given = list(argv)
    if not any(part.partition("=")[0] == "--grammar-backend" for part in given):
        given += ["--grammar-backend", "none"]
    try:
        args = prepare_server_args(given)
    except (AssertionError, ValueError) as error:  # SGLang's own checks, and those of the preflight
        raise ConfigError(str(error) or f"SGLang refuses the flags: {error!r}") from error
    for name in OTHER_SERVERS:
        if getattr(args, name):
            raise ConfigError(f"{name}=True starts a server without HTTP routes or in Ray; leave it out")
    if args.dllm_algorithm is None:
        raise ConfigError("--dllm-algorithm is not set; pass one, e.g. --dllm-algorithm SelectThenSample")
    check_reachable(args.host, args.admin_api_key)
    check_tokenizers(args.tokenizer_worker_num)
    check_port(args)
    from sglang.srt.entrypoints import http_server

    from rollout.plugin import weights

    install(http_server.app, args)
    weights.install(http_server.app, args)
    try:
        http_server.launch_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
