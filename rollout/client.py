"""Attach to a running rollout server: ``rollout.connect(url)`` gives what ``rollout.Engine`` gives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from dllm.config import ConfigError
from rollout import wire
from rollout.jobs import OnSample, Prompt, collected
from rollout.params import GenerateParams
from rollout.protocol import RequestError
from rollout.records import RolloutError, RolloutSample
from rollout.service import Block, Event, Finished


def prompt_field(prompt: Prompt) -> dict[str, Any]:
    """How a prompt is written in a request."""
    if isinstance(prompt, str):
        return {"text": prompt}
    items = list(prompt)
    return {"messages": [dict(m) for m in items]} if items and isinstance(items[0], Mapping) else {"input_ids": items}


def sampling_fields(params: GenerateParams) -> dict[str, Any]:
    """``sampling_params`` of a request."""
    return params.to_sglang(None) | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class Client:
    """A rollout server.

    Args:
        url: its address, e.g. ``http://127.0.0.1:30000``.
        api_key: the server's ``--api-key``, if it has one.
        admin_key: the server's ``--admin-api-key``; needed for ``abort`` if it has one.
        timeout: seconds until a request is given up.

    Raises:
        ConfigError: nothing answers there, or it is no rollout server.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, admin_key: str | None = None, timeout: float = 3600.0
    ) -> None:
        headers = bearer(api_key)
        self.url, self._admin = url.rstrip("/"), bearer(admin_key or api_key)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(timeout, connect=10.0))
        try:
            answer = self._http.get("/rollout/info")
        except httpx.HTTPError as error:
            raise ConfigError(f"no rollout server answers at {self.url}: {error}") from error
        if answer.status_code != 200:
            raise ConfigError(
                f"{self.url} has no /rollout/info (HTTP {answer.status_code}); start it with `python -m rollout.server`"
            )
        self.info: dict[str, Any] = answer.json()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: GenerateParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        step: int | None = None,
        rid: str | None = None,
        deadline: float | None = None,
        on_sample: OnSample | None = None,
    ) -> list[list[RolloutSample]]:
        """Generate ``n`` responses to every prompt.

        Args:
            prompts: token ids, texts or chat messages.
            seed, step: with a step, seeds follow from (seed, step, prompt, sample) and never meet within a run; without
                one a prompt's responses depend on nothing but the prompt and ``seed``, as in ``rollout.Engine``.
            rid: name for ``abort``.
            deadline: seconds after which samples end at a block boundary with finish reason "abort".
            on_sample: called as ``on_sample(prompt index, sample index, sample)`` when a response is complete.

        Raises:
            RequestError: the server refused the request; the error names the field.
            RolloutError: the engine failed a sample.
        """
        if on_sample is not None:
            events = self.stream(prompts, params, n=n, seed=seed, step=step, rid=rid, deadline=deadline)
            return collected(events, len(prompts), n, on_sample)
        body = self._body([prompt_field(p) for p in prompts], params, n, seed, step, rid, deadline)
        return self._samples(self._post("/rollout/generate", body))

    def resume(
        self, groups: Sequence[Sequence[RolloutSample]], params: GenerateParams, *, deadline: float | None = None
    ) -> list[list[RolloutSample]]:
        """Go on with aborted samples, each with its own seed, prompt and log; finished ones come back as they are.

        Args:
            params: those of the first request.
        """
        fields = [{"resume": [sample.to_line() for sample in group]} for group in groups]
        return self._samples(
            self._post("/rollout/generate", self._body(fields, params, len(groups[0]), None, 0, None, deadline))
        )

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: GenerateParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        step: int | None = None,
        rid: str | None = None,
        deadline: float | None = None,
    ) -> Iterator[Event]:
        """The same samples as ``generate``, block by block: ``Block`` and at the end of each sample ``Finished``.

        Closing the iterator ends what is left.
        """
        body = self._body([prompt_field(p) for p in prompts], params, n, seed, step, rid, deadline) | {"stream": True}
        headers = {"Accept": wire.MSGPACK, "Content-Type": wire.MSGPACK}
        with self._http.stream("POST", "/rollout/generate", content=wire.encode_msgpack(body), headers=headers) as got:
            if got.status_code != 200:
                got.read()
                raise refusal(got)
            messages = wire.msgpack_stream()
            for chunk in got.iter_bytes():
                messages.feed(chunk)
                for message in messages:
                    yield event_of(message)

    def abort(self, rid: str) -> list[list[RolloutSample]]:
        """End a request at its next block boundaries; what it had decoded, empty if it is unknown or complete."""
        return self._samples(self._post("/rollout/abort", {"rid": rid}, self._admin))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @staticmethod
    def _body(
        prompts: list[dict[str, Any]],
        params: GenerateParams | None,
        n: int,
        seed: int | None,
        step: int | None,
        rid: str | None,
        deadline: float | None,
    ) -> dict[str, Any]:
        params = params or GenerateParams()
        body = {"prompts": prompts, "n": n, "sampling_params": sampling_fields(params), "seed": seed, "step": step}
        return body | {"rid": rid, "deadline_s": deadline, "routing": params.routing}

    def _post(self, path: str, body: dict[str, Any], more: Mapping[str, str] | None = None) -> dict[str, Any]:
        headers = {"Accept": wire.MSGPACK, "Content-Type": wire.MSGPACK} | dict(more or {})
        answer = self._http.post(path, content=wire.encode_msgpack(body), headers=headers)
        if answer.status_code != 200:
            raise refusal(answer)
        return wire.decode_msgpack(answer.content)

    @staticmethod
    def _samples(body: dict[str, Any]) -> list[list[RolloutSample]]:
        return [[sample_of(line) for line in group["samples"]] for group in body["groups"]]


def sample_of(line: Mapping[str, Any]) -> RolloutSample:
    """A sample of an answer.

    Raises:
        RolloutError: the engine failed it.
    """
    if "error" in line:
        raise RolloutError(line["error"]["message"])
    return RolloutSample.from_line(line)


def event_of(message: Mapping[str, Any]) -> Event:
    """A message of a stream.

    Raises:
        RequestError: the engine refused the request while it ran.
    """
    if "error" in message:
        raise RequestError(message["error"].get("field", ""), message["error"]["message"])
    if "finished" not in message:
        fields = {name: value for name, value in message.items() if name not in ("prompt", "sample")}
        return Block(message["prompt"], message["sample"], fields)
    try:
        result: RolloutSample | RolloutError = sample_of(message["finished"])
    except RolloutError as error:
        result = error
    return Finished(message["prompt"], message["sample"], result)


def refusal(answer: httpx.Response) -> RequestError:
    """The error of an answer that is not 200."""
    try:
        error = answer.json()["error"]
        field, message = error.get("field") or "", str(error["message"])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        field, message = "", answer.text[:500]
    return RequestError(field, message.removeprefix(f"{field}: "), answer.status_code)


def connect(url: str, **options: Any) -> Client:
    """Attach to a running rollout server (see ``Client``)."""
    return Client(url, **options)
