"""Servers with weight sessions in processes of their own: the real service and loader, no engine behind them.

A server kills itself (SIGKILL) at a point that a test chooses.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI
from torch import Tensor

from tests.support import free_port, small_model
from tests.unit.receiver import LocalEngine, Receiver
from weight_sync import loader
from weight_sync.gate import Gate
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec
from weight_sync.routes import weight_routes
from weight_sync.service import WeightService
from weight_sync.target import Target

LAYOUT = CheckpointLayout(small_model(), torch.float32)
# A model on torch's meta device imports a lot: once here, not in every process.
Target(Receiver({name: spec.shape for name, spec in LAYOUT.wire.items()}))
SHAPES = {name: spec.shape for name, spec in LAYOUT.wire.items()}
FORK = multiprocessing.get_context("fork")


class Mortal(LocalEngine):
    """Dies before the call ``death`` of the service: "pause", "begin", "bucket 2", "commit", "resume"."""

    tp_size = 1

    def __init__(self, death: str) -> None:
        super().__init__(Receiver(SHAPES))
        self.death, self.client, self.drain_seconds = death, httpx.Client(), 0.0

    def say(self, header: Any, tensors: Any = ()) -> str:
        name = f"bucket {header.index}" if isinstance(header, BucketSpec) else header.kind
        die_if(name == self.death)
        return super().say(header, tensors)

    def pause(self) -> None:
        die_if(self.death == "pause")

    def resume(self) -> None:
        die_if(self.death == "resume")

    def deliver(self, spec: Any, data: Tensor | None = None, timeout: float | None = None) -> str:
        """A bucket, or what ``weight_sync.control.serialise`` made of a message for each rank."""
        if isinstance(spec, BucketSpec):
            return super().deliver(spec, data)
        [(header, tensor), *_] = pickle.loads(base64.b64decode(spec[0]))
        return self.say(BucketSpec.decode(header), [tensor])


def die_if(condition: bool) -> None:
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)


class Door:
    """ASGI middleware that kills the server when a request arrives ("PUT .*/buckets/2"), in the middle of its body
    ("body of PUT .*/buckets/2"), or before it is answered ("answer to POST .*/commit")."""

    def __init__(self, app: Any, death: str) -> None:
        self.app, self.death = app, death

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = f"{scope['method']} {scope['path']}"
        said = lambda kind: re.fullmatch(self.death, f"{kind}{asked}") is not None
        die_if(said(""))

        async def hear() -> Any:
            message = await receive()
            die_if(said("body of "))
            return message

        async def answer(message: Any) -> None:
            die_if(said("answer to "))
            await send(message)

        await self.app(scope, hear, answer)


def serve(port: int, death: str) -> None:
    """A server whose weights are ``-7`` everywhere and have the version 0."""
    torch.set_num_threads(1)
    loader.STATE = loader.LoaderState()
    engine = Mortal(death)
    with tempfile.TemporaryDirectory() as root:
        service = WeightService(engine, LAYOUT, "0", [Path(root)])  # type: ignore[arg-type]
        app = FastAPI()
        app.include_router(weight_routes(service))
        app.add_middleware(Gate, service=service, generates=lambda scope: scope["path"] == "/generate")
        app.add_middleware(Door, death=death)

        @app.post("/generate")
        async def generate(seed: int) -> dict[str, Any]:
            """Version by the loader, and whether the weights are those of ``small_model(seed)``."""
            return {
                "version": loader.STATE.label,
                "holds": engine.receiver.holds(small_model(seed).state_dict()),
                "untouched": all(bool((p == -7).all()) for p in engine.receiver.held.values()),
            }

        uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical")


class Process:
    """A running server."""

    def __init__(self, death: str = "", port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = FORK.Process(target=serve, args=(self.port, death), daemon=True)
        self.process.start()
        for _ in range(600):
            with suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/docs")
                return
            time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def state(self) -> Mapping[str, Any]:
        return httpx.get(f"{self.url}/weights/v1/state").json()

    def generate(self, seed: int) -> httpx.Response:
        return httpx.post(f"{self.url}/generate?seed={seed}")

    def killed(self) -> bool:
        self.process.join(10)
        return self.process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self.process.kill()
        self.process.join()
