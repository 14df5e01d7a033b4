"""Control of a running SGLang engine over HTTP: the one place that knows its update endpoints."""

from __future__ import annotations

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx
from torch import Tensor

from weight_sync.messages import BucketSpec, WeightSyncError

LOADER = "weight_sync.loader.load"
"""Value of ``--custom-weight-loader`` and of ``load_format`` in update requests."""


def serialise(header: str, data: Tensor) -> str:
    """One (header, tensor) pair as SGLang expects it: base64 of a pickle.

    A CUDA tensor travels as an IPC handle; a CPU tensor (an empty one: its bytes lie in a shared file) by value.
    """
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer) if data.is_cuda else pickle.Pickler(buffer)
    pickler.dump([(header, data)])
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class EngineControl:
    """One engine's control endpoints.

    Args:
        url: base address, e.g. ``http://127.0.0.1:30000``.
        tp_size: tensor-parallel ranks of the engine; every rank gets its own copy of the payload.
        admin_key: value of the server's ``--admin-api-key``, if it has one.
        timeout: seconds until a call is given up.
    """

    def __init__(self, url: str, tp_size: int = 1, admin_key: str | None = None, timeout: float = 120.0) -> None:
        self.url, self.tp_size = url.rstrip("/"), tp_size
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def post(self, path: str, body: dict[str, Any] | None = None, **params: Any) -> Any:
        """POST and return the decoded answer.

        Raises:
            WeightSyncError: the engine cannot be reached, or it answered with a failure.
        """
        try:
            answer = self.client.post(path, json=body or {}, params=params)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"engine {self.url} did not answer {path}: {error!r}") from error
        try:
            decoded = answer.json()
        except ValueError:
            decoded = answer.text
        failed = isinstance(decoded, dict) and decoded.get("success") is False
        if answer.status_code != 200 or failed:
            message = decoded.get("message", decoded) if isinstance(decoded, dict) else decoded
            raise WeightSyncError(f"engine {self.url} refused {path} ({answer.status_code}): {message}")
        return decoded

    def send_bucket(self, spec: BucketSpec, data: Tensor) -> None:
        """Deliver one bucket; the last one flips the version and drops the KV cache of the old weights."""
        self.post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [serialise(spec.encode(), data) for _ in range(self.tp_size)],
                "load_format": LOADER,
                "flush_cache": spec.last,
                "weight_version": spec.version if spec.last else None,
            },
        )

    def resume_memory(self, tags: list[str]) -> None:
        """Map released memory back in: "weights" or "kv_cache"."""
        self.post("/resume_memory_occupation", {"tags": tags})

    def release_memory(self, tags: list[str]) -> None:
        self.post("/release_memory_occupation", {"tags": tags})

    def close(self) -> None:
        self.client.close()
