"""The HTTP routes of ``weight_sync.service``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from weight_sync.gate import Rejected
from weight_sync.messages import MAX_DRAIN_SECONDS, RESEND, VERSION_DIGITS, Manifest, ResendError, WeightSyncError
from weight_sync.service import WeightService
from weight_sync.session import Refused
from weight_sync.staging import StagingError
from weight_sync.stream import Streams


class ManifestBody(BaseModel):
    """JSON of ``weight_sync.messages.Manifest``."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    version: str = Field(max_length=VERSION_DIGITS, pattern=r"^(0|[1-9][0-9]*)$")
    tensors: list[tuple[str, tuple[int, ...], str]]
    nbytes: int = Field(ge=0)
    base_version: str | None = None
    kind: Literal["begin"] = "begin"
    mode: Literal["staged", "stream"] = "staged"
    drain_seconds: float = Field(default=0.0, ge=0, le=MAX_DRAIN_SECONDS)

    def message(self) -> Manifest:
        return Manifest(self.run_id, self.version, tuple(self.tensors), self.nbytes, self.base_version)


class DirectoryBody(BaseModel):
    """A checkpoint on the server's host."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1)


class MessageBody(BaseModel):
    """A message for the loader: its header, and its serialised form for every tensor-parallel rank."""

    model_config = ConfigDict(extra="forbid")

    header: dict[str, Any]
    payload: list[str]


class CommitBody(BaseModel):
    """How to commit: seconds for running requests to end on their own, and the sender's checksum of all tensors."""

    model_config = ConfigDict(extra="forbid")

    drain_seconds: float = Field(default=0.0, ge=0, le=MAX_DRAIN_SECONDS)
    checksum: str = ""


def weight_routes(service: WeightService) -> APIRouter:
    """A router with everything under ``/weights/v1``."""
    router = APIRouter(prefix="/weights/v1")
    session = "/sessions/{run_id}/{version}"
    streams = Streams(service)

    async def step(stage: str, call: Callable[[], Any]) -> JSONResponse:
        try:
            made = call()
            return JSONResponse(await made if isinstance(made, Awaitable) else made)
        except ClientDisconnect as error:
            service.metrics.failed(stage, type(error).__name__)
            return JSONResponse({"error": "the connection was lost"}, 499)
        except (Rejected, Refused, StagingError, WeightSyncError) as error:
            service.metrics.failed(stage, type(error).__name__)
            damaged = isinstance(error, StagingError) and not error.full
            if damaged or isinstance(error, ResendError):
                service.metrics.retried()
            said = f"{RESEND if damaged else ''}{error}"
            return JSONResponse({**service.state(), "error": said}, status_of(error))

    @router.get("/state")
    async def state() -> JSONResponse:
        service.tidy()
        return JSONResponse(service.state())

    @router.post("/sessions")
    async def open_session(body: ManifestBody) -> JSONResponse:
        if body.mode == "stream":
            return await step("sessions", lambda: streams.open(body.message(), body.drain_seconds))
        return await step("sessions", lambda: service.open(body.message()))

    @router.put(session + "/buckets/{index}")
    async def bucket(run_id: str, version: str, index: int, request: Request) -> JSONResponse:
        return await step("buckets", lambda: service.receive((run_id, version), index, request.stream()))

    @router.post(session + "/directory")
    async def directory(run_id: str, version: str, body: DirectoryBody) -> JSONResponse:
        return await step("directory", lambda: service.read((run_id, version), Path(body.path)))

    @router.post(session + "/messages")
    async def message(run_id: str, version: str, body: MessageBody) -> JSONResponse:
        return await step("messages", lambda: streams.relay((run_id, version), body.header, body.payload))

    @router.post(session + "/prepare")
    async def prepare(run_id: str, version: str) -> JSONResponse:
        return await step("prepare", lambda: service.prepare((run_id, version)))

    @router.post(session + "/commit")
    async def commit(run_id: str, version: str, body: CommitBody | None = None) -> JSONResponse:
        given = body or CommitBody()
        if (opened := service.machine.session) is not None and opened.mode == "stream":
            return await step("commit", lambda: streams.commit((run_id, version), given.checksum))
        return await step("commit", lambda: service.commit((run_id, version), given.drain_seconds, given.checksum))

    @router.post(session + "/abort")
    async def abort(run_id: str, version: str) -> JSONResponse:
        return await step("abort", lambda: service.abort((run_id, version)))

    return router


def status_of(error: Exception) -> int:
    """HTTP status of a step that failed."""
    if isinstance(error, Rejected):
        return error.status
    if isinstance(error, WeightSyncError):
        return 422 if isinstance(error, ResendError) else 502
    if isinstance(error, Refused):
        return 404 if error.unknown else 409
    if isinstance(error, StagingError):
        return 507 if error.full else 422
    raise error
