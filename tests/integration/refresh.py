"""A trainer's side for tests: publishes the weights of a tiny model to a server."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from dllm.decoding import SamplingParams
from tests.integration.conftest import Request, Server
from tests.integration.oracle import TinyModel, assert_same
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.shm import SharedMemoryTransport

BUCKET = 128 << 10
GREEDY = SamplingParams(0)


class Sync:
    """A publisher to the server, and the weights that it should hold."""

    def __init__(self, server: Server, tiny: TinyModel) -> None:
        self.server, self.original = server, tiny
        hf_config = json.loads((tiny.path / "config.json").read_text())
        self.layout = CheckpointLayout.from_config(hf_config, torch.float32)
        self.control = EngineControl(server.url)
        self.publisher = WeightPublisher(self.layout, SharedMemoryTransport(), [self.control], BUCKET)

    def publish(self, model: TinyModel, version: str):
        return self.publisher.publish(model.model.state_dict(), version)

    def closed(self) -> bool:
        """Whether the engine lets nobody in: a request does not end within half a second."""
        try:
            body = {"input_ids": self.original.prompt(3), "sampling_params": {"max_new_tokens": 1}}
            self.server.client.post("/generate", json=body, timeout=0.6)
        except Exception as error:
            return "Timeout" in type(error).__name__
        return False


def holds(server: Server, model: TinyModel, version: str) -> None:
    """What is decoded is what the reference makes of ``model``, and says that it is ``version``."""
    case = model.case(33, GREEDY)
    trace = greedy(server, [case.prompt])[0]
    assert_same(trace, case.trace)
    assert set(trace.weight_versions) == {version}


def greedy(server: Server, prompts: list[list[int]]):
    return [s.trace for s in server.generate([Request(p, GREEDY) for p in prompts])]


def killed_trainer(sync: Sync, model: TinyModel, version: str, stage: str, index: int = 0) -> None:
    """A trainer process that publishes and is killed (SIGKILL) before a call of ``EngineControl``.

    Args:
        stage: name of the call.
        index: which bucket, if the call is ``send_bucket``.
    """

    class Mortal(EngineControl):
        calls = 0

        def __getattribute__(self, name: str) -> Any:
            if name == stage:
                kind = type(self)
                if kind.calls >= index:
                    os.kill(os.getpid(), signal.SIGKILL)
                kind.calls += 1
            return super().__getattribute__(name)

    def trainer() -> None:
        transport = SharedMemoryTransport()
        WeightPublisher(sync.layout, transport, [Mortal(sync.server.url)], BUCKET).publish(
            model.model.state_dict(), version
        )

    process = multiprocessing.get_context("fork").Process(target=trainer)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


class Faulty(SharedMemoryTransport):
    """Does something to one bucket on its way."""

    def __init__(self, fault: Callable[..., list[str]], index: int) -> None:
        super().__init__()
        self.fault, self.index = fault, index

    def send(self, bucket, spec, engines):
        if bucket.index != self.index:
            return super().send(bucket, spec, engines)
        return self.fault(super().send, bucket, spec, engines)
