"""Where answers come from: an engine in this process, or a server by its address. Both yield cumulative answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import httpx

from dllm.config import ConfigError
from rollout.engine import Engine, GenerateParams
from rollout.records import RolloutError


class Source(Protocol):
    """Streams one answer at a time."""

    def stream(self, prompt_ids: Sequence[int], params: GenerateParams, seed: int | None) -> Iterator[dict[str, Any]]:
        """SGLang's answers to a prompt as they grow; the last one has a finish reason."""
        ...

    def close(self) -> None: ...


class LocalSource:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def stream(self, prompt_ids: Sequence[int], params: GenerateParams, seed: int | None) -> Iterator[dict[str, Any]]:
        loop, given = self.engine.sglang.loop, params.to_sglang(seed)
        answers = loop.run_until_complete(
            self.engine.sglang.async_generate(input_ids=list(prompt_ids), sampling_params=given, stream=True)
        )
        while (answer := loop.run_until_complete(anext(answers, None))) is not None:
            yield answer

    def close(self) -> None:
        self.engine.close()


class ServerSource:
    """A server with this package's plugin, ``rollout.server`` or SGLang's own."""

    def __init__(self, url: str, timeout: float = 600) -> None:
        self.client = httpx.Client(base_url=url, timeout=timeout)

    def model_path(self) -> str:
        """Where the server's tokenizer lies, by its own word.

        Raises:
            ConfigError: nothing answers at the address.
        """
        try:
            answer = self.client.get("/model_info").raise_for_status().json()
        except httpx.HTTPError as error:
            raise ConfigError(f"url={str(self.client.base_url)!r} does not answer ({error}); start a server") from error
        return str(answer.get("tokenizer_path") or answer["model_path"])

    def stream(self, prompt_ids: Sequence[int], params: GenerateParams, seed: int | None) -> Iterator[dict[str, Any]]:
        body = {"input_ids": list(prompt_ids), "sampling_params": params.to_sglang(seed), "stream": True}
        with self.client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                raise RolloutError(f"the server answers {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    made = json.loads(line.removeprefix("data: "))
                    if "error" in made:
                        raise RolloutError(str(made["error"].get("message", made["error"])))
                    yield made

    def close(self) -> None:
        self.client.close()
