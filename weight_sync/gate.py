"""ASGI middleware that keeps requests away from an engine whose weights are being exchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from weight_sync.session import State

RETRY_SECONDS = {State.FENCED: 1, State.BROKEN: 10}
"""``Retry-After`` of a refused request."""

TOKEN_HEADER = "x-weight-update"
"""Header with the secret of the server itself, on its own calls to the engine's update endpoints."""

UPDATES = ("/update_weight",)
DOORS = ("/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation")
"""SGLang's endpoints that exchange weights, and those that let requests in or take the weights away."""

HEALTH = ("/health", "/health_generate")


class Rejected(Exception):
    """A step that failed, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Requests:
    """Requests behind the gate."""

    def __init__(self) -> None:
        self.running: set[asyncio.Future[Any]] = set()
        self._away: set[asyncio.Future[Any]] = set()

    def turn_away(self) -> None:
        """End those that run, because they would wait for ever."""
        self._away = set(self.running)
        for task in self._away:
            task.cancel()

    def turned_away(self, task: asyncio.Future[Any]) -> bool:
        """Whether a cancelled request was cancelled here."""
        return task in self._away


class Gate:
    """Refuses requests while nothing may be admitted, and foreign updates while one is open.

    Args:
        app: the application behind it.
        service: ``weight_sync.service.WeightService``.
        generates: whether a request (an ASGI scope) makes the engine decode.
    """

    def __init__(self, app: Any, service: Any, generates: Callable[[dict[str, Any]], bool]) -> None:
        self.app, self.service, self.generates = app, service, generates

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(UPDATES + DOORS):
            await self._control(scope, receive, send)
        elif scope["path"].rstrip("/") == "/metrics":
            self.service.metrics.shown(self.service.machine.state)
            await self.app(scope, receive, send)
        elif scope["path"] in HEALTH or self.generates(scope):
            await self._request(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _request(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        machine = self.service.machine
        # A liveness probe must not end a server that is closed for a second.
        alive = scope["path"] == "/health" and machine.state is State.FENCED
        if not machine.admits and not alive:
            await self.refuse(send)
            return
        started = False

        async def watched(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        task = asyncio.ensure_future(self.app(scope, receive, watched))
        self.service.requests.running.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not self.service.requests.turned_away(task):
                task.cancel()
                raise
            if not started:
                await self.refuse(send)
        finally:
            self.service.requests.running.discard(task)

    async def refuse(self, send: Any) -> None:
        machine = self.service.machine
        state = machine.state
        why = machine.broken or "weights are being exchanged"
        await answer(
            send,
            503,
            {"error": f"the engine takes no requests: {why}", "weight_state": state.value},
            [(b"retry-after", str(RETRY_SECONDS.get(state, 1)).encode())],
        )

    async def _control(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """SGLang's own control: the service's calls pass; those of others not while they would disturb an update."""
        token = dict(scope["headers"]).get(TOKEN_HEADER.encode(), b"").decode()
        updates, machine = scope["path"].startswith(UPDATES), self.service.machine
        free = machine.state is State.SERVING if updates else machine.admits
        if token != self.service.token and not free:
            message = f"a weight session is {machine.state.value}; end it, or send a complete update to /weights/v1"
            await answer(send, 409, {"success": False, "message": message})
            return
        try:
            await self.app(scope, receive, send)
        finally:
            if updates and token != self.service.token:
                await self.service.observe()


async def answer(
    send: Any, status: int, content: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """A complete JSON response."""
    body = json.dumps(content).encode()
    base = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": base + (headers or [])})
    await send({"type": "http.response.body", "body": body})
