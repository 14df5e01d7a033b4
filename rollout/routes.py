"""HTTP routes of the rollout service: ``POST /rollout/generate``, ``POST /rollout/abort``, ``GET /rollout/info``."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from rollout import wire
from rollout.protocol import AbortRequest, RequestError, RolloutRequest, parse
from rollout.requests import Answer, Model, event_line, jobs_of
from rollout.service import Service

KEPT_ANSWERS = 256
"""Answers of aborted groups that a repeated abort still gets."""


class Routes:
    """The handlers.

    Args:
        connect: service and model of the engine, asked for at the first request, when the engine runs.
    """

    def __init__(self, connect: Callable[[], tuple[Service, Model]]) -> None:
        self._connect, self._connected = connect, None
        self.running: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.aborted: OrderedDict[str, dict[str, Any]] = OrderedDict()

    @property
    def engine(self) -> tuple[Service, Model]:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    async def generate(self, http: Request) -> Response:
        media = answer_type(http)
        try:
            request = parse(RolloutRequest, await body_of(http))
            service, model = self.engine
            jobs, params = jobs_of(request, model)
            rid = request.rid or uuid.uuid4().hex
            if rid in self.running:
                raise RequestError("rid", f"{rid!r} is running; wait for its end or use another", 409)
        except RequestError as error:
            return failure(error)
        answer = Answer(rid, len(request.prompts), request.n)
        self.aborted.pop(rid, None)  # of an earlier request of this name
        done = self.running[rid] = asyncio.get_running_loop().create_future()
        events = service.events(jobs, params, rid=rid, deadline=request.deadline_s, blocks=request.stream)

        async def lines() -> AsyncIterator[dict[str, Any]]:
            try:
                async with aclosing(events):  # type: ignore[type-var]
                    async for event in events:
                        answer.add(event)
                        yield event_line(event) if request.stream else {}
            finally:
                self.running.pop(rid, None)
                if not done.done():
                    done.set_result(answer.body())

        if request.stream:
            kind = wire.MSGPACK if media == wire.MSGPACK else wire.EVENTS
            # Quoted: a name may hold what a header cannot, line ends among it.
            return StreamingResponse(encoded(lines(), kind), media_type=kind, headers={"X-Rollout-Id": quote(rid)})
        try:
            await drain(lines(), http)
        except ValueError as error:
            return failure(RequestError("", str(error)))
        return Response(wire.encode(answer.body(), media), media_type=media)

    async def abort(self, http: Request) -> Response:
        try:
            rid = parse(AbortRequest, await body_of(http)).rid
        except RequestError as error:
            return failure(error)
        running = self.running.get(rid)
        if running is not None:
            await self.engine[0].abort(rid)
            self.aborted[rid] = await asyncio.shield(running)
            while len(self.aborted) > KEPT_ANSWERS:
                self.aborted.popitem(last=False)
        body = self.aborted.get(rid, {"rid": rid, "groups": []})
        media = answer_type(http)
        return Response(wire.encode({"found": rid in self.aborted, **body}, media), media_type=media)

    async def info(self) -> dict[str, Any]:
        service, model = self.engine
        return {
            "mask_id": model.mask_id,
            "block_size": model.block_size,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "weight_version": service.backend.version(),
            "running": len(self.running),
        }


async def drain(lines: AsyncIterator[dict[str, Any]], http: Request) -> None:
    """Run to the end; a client that hangs up ends what is left."""

    async def run() -> None:
        async with aclosing(lines):  # type: ignore[type-var]
            async for _ in lines:
                pass

    async def gone() -> None:
        while not await http.is_disconnected():
            await asyncio.sleep(0.5)

    work, watch = asyncio.ensure_future(run()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, watch):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(work, watch, return_exceptions=True)


async def encoded(lines: AsyncIterator[dict[str, Any]], kind: str) -> AsyncIterator[bytes]:
    """Server-sent events, or msgpack messages one behind the other; an error is the last of them."""
    pack = wire.encode_msgpack if kind == wire.MSGPACK else lambda line: b"data: " + wire.encode_json(line) + b"\n\n"
    try:
        async with aclosing(lines):  # type: ignore[type-var]
            async for line in lines:
                yield pack(line)
    except ValueError as error:
        yield pack(RequestError("", str(error)).body())
    if kind == wire.EVENTS:
        yield b"data: [DONE]\n\n"


def answer_type(http: Request) -> str:
    return wire.MSGPACK if wire.MSGPACK in http.headers.get("accept", "") else wire.JSON


async def body_of(http: Request) -> Any:
    """The decoded body.

    Raises:
        RequestError: it is neither JSON nor, with that content type, msgpack.
    """
    kind = http.headers.get("content-type", wire.JSON).partition(";")[0].strip().lower()
    try:
        return wire.decode(await http.body(), kind)
    except (ValueError, RecursionError) as error:
        raise RequestError("body", f"is not {'msgpack' if kind == wire.MSGPACK else 'JSON'}: {error}") from error


def failure(error: RequestError) -> Response:
    return Response(wire.encode_json(error.body()), status_code=error.status, media_type=wire.JSON)


def rollout_routes(connect: Callable[[], tuple[Service, Model]]) -> APIRouter:
    """A router with everything under ``/rollout``."""
    router, routes = APIRouter(prefix="/rollout", tags=["rollout"]), Routes(connect)
    wrong = {400: {"description": "a field is wrong; the answer names it"}}
    for path, handler, model, more in (
        ("/generate", routes.generate, RolloutRequest, wrong | {409: {"description": "rid is running"}}),
        ("/abort", routes.abort, AbortRequest, wrong),
    ):
        schema = model.model_json_schema(ref_template=f"#/components/schemas/{model.__name__}/$defs/{{model}}")
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            responses=more,  # type: ignore[arg-type]
            response_class=Response,
            openapi_extra={"requestBody": {"required": True, "content": {wire.JSON: {"schema": inline(schema)}}}},
        )
    router.add_api_route("/info", routes.info, methods=["GET"])
    return router


def inline(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema with its definitions put where they are referred to."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return walk(definitions[node["$ref"].rpartition("/")[2]])
            return {key: walk(value) for key, value in node.items()}
        return [walk(item) for item in node] if isinstance(node, list) else node

    return walk(schema)
