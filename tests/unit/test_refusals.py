"""400 and the field's name where the content of a request breaks a handler."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator
from starlette.background import BackgroundTask

from dllm.config import ConfigError
from rollout.plugin.http import check_port
from rollout.plugin.refusals import KEPT_BYTES, Asked, Refusals, _error_response, _native_response


class Body(BaseModel):
    tokens: list[int] = []
    parser: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None

    @model_validator(mode="before")
    @classmethod
    def _careless(cls, values):
        values.get("tokens")
        return values


def first_of(items):
    return items[0]


def refuse(value, how):
    raise ValueError("Please pass `--enable-lora` now" if how == "lora" else "longer than allowed")


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/first")
    async def first(body: Body):
        return first_of(body.tokens)

    @app.post("/stream")
    async def stream(body: Body):
        async def chunks():
            yield str(first_of(body.tokens))
            if body.parser:
                raise ValueError(f"no parser {body.parser}")

        return StreamingResponse(chunks())

    @app.post("/broken")
    async def broken(body: Body):
        raise RuntimeError("the engine is gone")

    @app.get("/query")
    async def query(include: str):
        return {"all": 1}[include]

    @app.post("/caught")
    async def caught(body: Body):
        """As SGLang's OpenAI endpoints do it."""
        try:
            return first_of(body.tokens)
        except Exception:
            original = lambda serving, status_code: JSONResponse({}, status_code)
            return _error_response(original, SimpleNamespace(), status_code=500)

    @app.post("/native")
    async def native(body: Body):
        """As ``/generate`` refuses by itself: it checks the ``input_ids`` that it made of the prompt."""
        try:
            refuse(body.input_ids, body.parser)
        except ValueError as error:
            respond = lambda error: JSONResponse({"error": {"message": str(error)}}, 400)
            return _native_response(respond, error)

    @app.post("/openai")
    async def openai(body: Body):
        try:
            refuse(body.tokens, body.parser)
        except ValueError as error:
            content = {"object": "error", "message": str(error), "param": None}
            return _error_response(lambda serving: JSONResponse(content, 400), SimpleNamespace())

    @app.post("/unbegun")
    async def unbegun(body: Body):
        """As a stream of ``/generate`` that could not begin: its abort fails behind the answer."""
        return JSONResponse({}, 400, background=BackgroundTask(first_of, []))

    @app.post("/session")
    async def session(body: Body):
        return _native_response(
            lambda error: JSONResponse({"error": {"message": error}}, 400), "Failed to open the session"
        )

    return app


@pytest.fixture
def client() -> TestClient:
    app = application()
    app.add_middleware(Refusals)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        ("/first", b'{"tokens": []}', "tokens"),
        ("/first", b"null", "body"),
        ("/first", b" [1]", "body"),
        ("/stream", b'{"tokens": []}', "tokens"),
        ("/caught", b'{"tokens": []}', "tokens"),
    ],
)
def test_the_broken_field_is_named(client, path, content, field):
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["field"] == field


def test_a_query_too(client):
    assert client.get("/query", params={"include": "all"}).json() == 1
    assert client.get("/query", params={"include": "x"}).json()["error"]["field"] == "include"


def test_good_requests_pass(client):
    assert client.post("/first", json={"tokens": [3]}).json() == 3
    assert client.post("/stream", json={"tokens": [3]}).text == "3"
    assert client.post("/first", json={"tokens": "x"}).status_code == 422, "what FastAPI refuses itself"


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/native", {"input_ids": [1]}, {"error": {"message": "longer than allowed", "field": "input_ids"}}),
        ("/native", {"text": "a"}, {"error": {"message": "longer than allowed", "field": "text"}}),
        ("/openai", {"tokens": [1]}, {"object": "error", "message": "longer than allowed", "param": "tokens"}),
        ("/native", {"text": "a", "parser": "lora"}, {"error": {"message": "Please pass `--enable-lora` now"}}),
    ],
)
def test_a_refusal_of_sglangs_own_names_its_field(client, path, body, error):
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json() == error


def test_a_refusal_whose_words_tell_its_field(client):
    assert client.post("/session", json={}).json()["error"]["field"] == "session_id"


def test_what_fails_behind_an_answer_leaves_the_connection(client):
    assert TestClient(client.app).post("/unbegun", json={}).status_code == 400, "nothing was raised"


def test_only_the_beginning_of_a_body_is_kept():
    asked = Asked({})
    for _ in range(3):
        asked.hear(b"[" * KEPT_BYTES)
    assert len(asked.body) == KEPT_BYTES and asked.given() == set()


def test_the_servers_own_failures_stay(client):
    assert client.post("/broken", json={}).status_code == 500
    with pytest.raises(ValueError, match="no parser p"):
        TestClient(client.app).post("/stream", json={"tokens": [3], "parser": "p"})


def test_without_the_middleware_nothing_changes():
    client = TestClient(application(), raise_server_exceptions=False)
    assert client.post("/caught", json={"tokens": []}).status_code == 500
    assert sys.exc_info() == (None, None, None)


def test_a_port_that_is_taken():
    """Known before the model is loaded."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port} of host='127.0.0.1' cannot be listened on \(.*\); pass"):
            check_port(SimpleNamespace(host="127.0.0.1", port=port))
    check_port(SimpleNamespace(host="127.0.0.1", port=port))
    with pytest.raises(ConfigError, match="port=99999 of host"):
        check_port(SimpleNamespace(host="127.0.0.1", port=99999))
