"""Rollout servers on a GPU, and a trainer of another process that can be killed.

python -m tests.gpu.engines URL MODEL_PATH VERSION WAY BUCKET   publish, and die before a bucket
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from dllm.config import load_hf_config
from dllm.decoding import SamplingParams
from dllm.models.checkpoint import load_model
from recipes.server_process import ServerProcess
from rollout.records import RolloutSample, sample_from_response
from weight_sync.client import ServiceControl, StreamControl
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.http import HttpTransport
from weight_sync.transports.ipc import CudaIpcTransport

BUCKET = 4 << 20
DTYPE = torch.bfloat16
REQUESTS = 64

FLAGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "mem-fraction-static": 0.2,
    "max-total-tokens": 1 << 16,
    "cuda-graph-max-bs-decode": REQUESTS,
    "disable-prefill-cuda-graph": None,
}
"""Two servers fit on one device and start at the same time: their caches are bounded by tokens."""

WAYS = {
    "engine": (EngineControl, CudaIpcTransport),
    "stream": (StreamControl, CudaIpcTransport),
    "staged": (ServiceControl, HttpTransport),
}
"""How a trainer reaches a server: straight into the engine, a streamed session, a staged one."""


class Aborted(Exception):
    """A request ended before its first block, and its client was told so."""


class GpuServer(ServerProcess):
    """``python -m rollout.server`` of a checkpoint; ``wait`` returns when it answers."""

    def __init__(self, model_path: Path, log: Path, **flags: Any) -> None:
        self.config = load_hf_config(model_path)
        given = {
            "model-path": model_path,
            "dllm-algorithm": "SelectThenSample",
            "grammar-backend": "none",
            "max-running-requests": REQUESTS,
            "log-level": "warning",
            "skip-server-warmup": None,
            **FLAGS,
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        super().__init__("rollout.server", given, log)
        self.client = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=2 * REQUESTS))

    def post(self, prompt: Sequence[int], tokens: int, temperature: float, seed: int, **fields: Any) -> httpx.Response:
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed}
        return self.client.post("/generate", json={"input_ids": list(prompt), "sampling_params": params} | fields)

    def generate(
        self, prompt: Sequence[int], tokens: int = 64, temperature: float = 0.0, seed: int = 0, **fields: Any
    ) -> tuple:
        """The sample, and how many tokens of the prompt were in the cache; ``fields`` are further ones of the request.

        Raises:
            Aborted: nothing was decoded.
        """
        answer = self.post(prompt, tokens, temperature, seed, **fields)
        if answer.status_code != 200 and "was aborted" in answer.text:
            raise Aborted(answer.text)
        assert answer.status_code == 200, answer.text[:500]
        said = answer.json()
        sampling = SamplingParams(temperature)
        sample = sample_from_response(said, prompt, self.config["block_size"], sampling, tokens, seed)
        return sample, said["meta_info"].get("cached_tokens", 0)

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of each prompt, alone and without anything in the cache."""
        self.client.post("/flush_cache?timeout=10").raise_for_status()
        return [self.generate(prompt)[0].trace.replay_ids.tolist() for prompt in prompts]

    def versions(self, prompt: Sequence[int]) -> set[str]:
        """Versions of the weights that a request is decoded with."""
        sample: RolloutSample = self.generate(prompt)[0]
        return set(sample.trace.weight_versions)

    def closed(self, prompt: Sequence[int]) -> bool:
        """Whether a request does not end within a second."""
        try:
            self.client.post("/generate", json={"input_ids": list(prompt)}, timeout=1)
        except httpx.TimeoutException:
            return True
        return False

    def kill(self) -> None:
        """SIGKILL to the server and to all processes of its engine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def close(self) -> None:
        super().close()
        self.client.close()


def on_device(model_path: Path) -> dict[str, Tensor]:
    """A trainer's parameters and buffers: fp32, as it keeps them."""
    return {name: tensor.cuda() for name, tensor in load_model(str(model_path)).state_dict().items()}


def layout_of(model_path: Path) -> CheckpointLayout:
    return CheckpointLayout.from_config(load_hf_config(model_path), DTYPE)


def main(url: str, model_path: str, version: str, way: str, bucket: str) -> None:
    control, transport = WAYS[way]

    class Mortal(control):  # type: ignore[misc, valid-type]
        def send_bucket(self, spec: Any, data: Tensor | None = None) -> str:
            if spec.index == int(bucket):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().send_bucket(spec, data)

    path = Path(model_path)
    WeightPublisher(layout_of(path), transport(), [Mortal(url)], BUCKET).publish(on_device(path), version)


if __name__ == "__main__":
    main(*sys.argv[1:])
