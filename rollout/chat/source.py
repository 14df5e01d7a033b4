"""Where answers come from: an engine in this process, a rollout server, or SGLang's own server with the plugin.

All three stream the events of ``rollout.service``; the third runs the service here, over ``POST /generate``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import httpx

from dllm.config import BlockDiffusionConfig, ConfigError
from rollout.client import bearer, connect
from rollout.jobs import events_in, jobs_by_content
from rollout.params import GenerateParams
from rollout.records import RolloutError
from rollout.service import Event, Service


class Source(Protocol):
    """Streams responses; ``rollout.Engine`` and ``rollout.connect`` are sources."""

    def stream(
        self, prompts: Sequence[Sequence[int]], params: GenerateParams, *, seed: int | None
    ) -> Iterator[Event]: ...

    def close(self) -> None: ...


class HttpBackend:
    """A server of SGLang as the engine of ``rollout.service``.

    Args:
        tokenizer: the model's.
        label: of its weights.
    """

    def __init__(self, http: httpx.AsyncClient, tokenizer: Any, label: str) -> None:
        self.http, self.tokenizer, self.label = http, tokenizer, label

    async def generate(
        self, rid: str, input_ids: list[int], params: dict[str, Any], routing: bool
    ) -> AsyncIterator[Mapping[str, Any]]:
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": params, "stream": True}
        async with self.http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                raise RolloutError(f"the server answers {answer.status_code}: {(await answer.aread()).decode()[:500]}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    made = json.loads(line.removeprefix("data: "))
                    if "error" in made:
                        raise RolloutError(str(made["error"].get("message", made["error"])))
                    yield made

    def abort(self, rid: str) -> None:
        """Nothing: the service closes the connection of a request that it gives up, and SGLang ends it then."""

    def version(self) -> str:
        return self.label

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


class StockServer:
    """SGLang's own server, with this package's plugin."""

    def __init__(self, backend: HttpBackend, block_diffusion: BlockDiffusionConfig) -> None:
        self.loop, self.service = asyncio.new_event_loop(), Service(backend, block_diffusion, None)

    def stream(self, prompts: Sequence[Sequence[int]], params: GenerateParams, *, seed: int | None) -> Iterator[Event]:
        """As ``rollout.Engine.stream``."""
        return events_in(self.loop, self.service.events(jobs_by_content(prompts, 1, seed), params, blocks=True))

    def close(self) -> None:
        self.loop.run_until_complete(self.service.backend.http.aclose())  # type: ignore[attr-defined]
        self.loop.close()


class Address:
    """A server's address, before it is known what serves there.

    Args:
        key: the server's ``--api-key``, if it has one.

    Raises:
        ConfigError: nothing answers there.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600) -> None:
        self.url, self.key = url.rstrip("/"), key
        self.options: dict[str, Any] = {
            "base_url": self.url,
            "timeout": timeout,
            "headers": bearer(key),
        }
        try:
            with httpx.Client(**self.options) as http:
                self.model = http.get("/model_info").raise_for_status().json()
                self.ours = http.get("/rollout/info").status_code == 200
        except httpx.HTTPError as error:
            raise ConfigError(f"url={self.url!r} does not answer ({error}); start a server there") from error

    @property
    def tokenizer_path(self) -> str:
        """Directory of the server's tokenizer, by its own word."""
        return str(self.model.get("tokenizer_path") or self.model["model_path"])

    def source(self, tokenizer: Any, block_diffusion: BlockDiffusionConfig) -> Source:
        """What serves there."""
        if self.ours:
            return connect(self.url, api_key=self.key)
        backend = HttpBackend(httpx.AsyncClient(**self.options), tokenizer, str(self.model.get("weight_version")))
        return StockServer(backend, block_diffusion)
