"""A request whose content breaks SGLang's handler is refused with 400 and the field's name, not answered with 500.

Stock SGLang 0.5.17 checks the types of a body and then assumes more: that a list is not empty, that a parser exists,
that a body is an object (``null`` breaks the validators of ``ChatCompletionRequest``). Python's exceptions about such
data become 500, and uvicorn drops the connection; the OpenAI endpoints catch them themselves and answer 500, too.
What SGLang refuses itself it often puts in words that no program can read; the field is added beside them.
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

from rollout.protocol import RequestError
from weight_sync.gate import answer

DATA_ERRORS = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError, TemplateError
)  # fmt: skip
"""What Python and chat templates raise about data. Others, RuntimeError and OSError for example, are the server's."""

NO_OBJECT = re.compile(rb"\s*(\[|\"|null|true|false|-?\d)")
"""How a JSON body begins that has no fields."""

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 20
"""Of a body, to see which fields it has."""

PROMPTS = ("text", "prompt", "messages", "input", "input_ids")
"""Fields that hold a prompt: SGLang checks the ``input_ids`` that it made of the others."""

ABOUT_THE_SERVER = re.compile(r"--[a-z]+-[a-z]")
"""A refusal that asks for another flag at the server's start is about no field."""

BY_WORDS = {
    "Token ID at index": "input",
    "Duplicate request IDs": "rid",
    "rids length": "rid",
    "open the session": "session_id",
}
"""Fields of refusals whose traceback speaks of none, by words in them."""


@dataclasses.dataclass
class Asked:
    """A request under way: ASGI's scope, which holds the route once it is found, and how its body begins."""

    scope: dict[str, Any]
    body: bytes = b""

    def hear(self, part: bytes) -> None:
        """Keep the first bytes only: a bucket of weights is a body, too."""
        if len(self.body) < KEPT_BYTES:
            self.body += part[: KEPT_BYTES - len(self.body)]

    def given(self) -> set[str]:
        """Names of the fields in a JSON body."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError):
            return set()
        return set(content) if isinstance(content, dict) else set()


_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)
"""The request whose exceptions a ``Refusals`` waits for."""


class Refusals:
    """ASGI middleware around SGLang's application; the log keeps the traceback of what it refuses.

    The head of an answer waits for the first bytes of its body: a stream that cannot begin still gets its status.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head: dict[str, Any] | None = None
        begun, ended, asked = False, False, Asked(scope)

        async def received() -> dict[str, Any]:
            message = await receive()
            asked.hear(message.get("body", b""))
            return message

        async def headed(message: dict[str, Any]) -> None:
            nonlocal head, begun, ended
            if message["type"] == "http.response.start":
                head = message
                return
            if not begun and head is not None:
                begun = True
                await send(head)
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

        _asked.set(asked)
        try:
            await self.app(scope, received, headed)
        except DATA_ERRORS as error:
            if ended:
                # A task behind the answer, SGLang's abort of a stream that never began for example. The connection,
                # which uvicorn would drop, may carry the next request already.
                logger.warning("%s %s was answered, and then", scope["method"], scope["path"], exc_info=True)
                return
            if begun:
                raise
            logger.warning("%s %s is refused", scope["method"], scope["path"], exc_info=True)
            field = broken_field(error, scope.get("route")) if not NO_OBJECT.match(asked.body) else "body"
            refusal = RequestError(field, f"{type(error).__name__}: {error}")
            await answer(send, refusal.status, refusal.body())


def broken_field(error: BaseException, route: Any) -> str:
    """Name of the field that an exception is about: the innermost line of its traceback that speaks of one.

    Args:
        route: FastAPI's route, which knows the fields of its body and its query; None if the request reached none.

    Returns:
        ``body`` if no line does.
    """
    names = set(fields_of(route))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        first = frame.lineno or 0
        lines = (linecache.getline(frame.filename, n) for n in range(first, (frame.end_lineno or first) + 1))
        for word in re.findall(r"\w+", " ".join(lines)):
            if word in names:
                return word
    return "body"


def fields_of(route: Any) -> Iterable[str]:
    """Names of the fields of a route's body, a pydantic model, dataclass or msgspec struct, and of its query."""
    if body := getattr(route, "body_field", None):
        model = body.field_info.annotation
        yield from getattr(model, "model_fields", ()) or getattr(model, "__struct_fields__", ())
        if dataclasses.is_dataclass(model):
            yield from (field.name for field in dataclasses.fields(model))
    if dependant := getattr(route, "dependant", None):
        yield from (parameter.name for parameter in dependant.query_params)


def unnamed_field(message: str, error: BaseException | None, asked: Asked) -> str | None:
    """Name of the field that a refusal of SGLang's is about; None if it is about none that can be told."""
    if ABOUT_THE_SERVER.search(message):
        return None
    if by_words := next((field for words, field in BY_WORDS.items() if words in message), None):
        return by_words
    if error is None:
        return None
    name, given = broken_field(error, asked.scope.get("route")), asked.given()
    if name in PROMPTS and name not in given:
        name = next((prompt for prompt in PROMPTS if prompt in given), name)
    return None if name == "body" else name


def _with_field(made: Any, error: BaseException | None) -> Any:
    """An answer of SGLang's with the field it is about: ``param`` in OpenAI's form of an error, else ``field``."""
    asked = _asked.get()
    if asked is None or not 400 <= made.status_code < 500:
        return made
    content = json.loads(made.body)
    if content.get("object") == "error" and content.get("param") is None:
        error_object, key = content, "param"
    elif isinstance(content.get("error"), dict):
        error_object, key = content["error"], "field"
    else:
        return made
    if (field := unnamed_field(str(error_object.get("message")), error, asked)) is None:
        return made
    error_object[key] = field
    return type(made)(content, status_code=made.status_code)


def _error_response(original: Callable, serving: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise on what SGLang's OpenAI endpoints caught to answer it with 500, so that one place decides; ``param`` of a
    refusal is filled in."""
    made = original(serving, *args, **kwargs)
    caught = sys.exc_info()[1]
    if _asked.get() is not None and made.status_code == 500 and isinstance(caught, DATA_ERRORS):
        raise caught
    return _with_field(made, caught)


def _native_response(original: Callable, error: Any) -> Any:
    """``field`` beside the message of a refusal by ``/generate`` and SGLang's other own endpoints."""
    return _with_field(original(error), error if isinstance(error, BaseException) else None)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for made_by in (
        "openai.serving_base.OpenAIServingBase.create_error_response",
        "openai.serving_responses.OpenAIServingResponses.create_error_response",
        "anthropic.serving.AnthropicServing._error_response",
    ):
        HookRegistry.register(f"sglang.srt.entrypoints.{made_by}", _error_response, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._create_error_response", _native_response, HookType.AROUND
    )
