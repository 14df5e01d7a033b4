"""A request whose content breaks SGLang's handler is refused with 400 and the field's name, not answered with 500.

Stock SGLang 0.5.17 checks the types of a body and then assumes more: that a list is not empty, that a parser exists,
that a body is an object (``null`` breaks the validators of ``ChatCompletionRequest``). Python's exceptions about such
data become 500, and uvicorn drops the connection; the OpenAI endpoints catch them themselves and answer 500, too.
"""

from __future__ import annotations

import dataclasses
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

_guarded: ContextVar[bool] = ContextVar("guarded", default=False)
"""Whether a ``Refusals`` waits for the exceptions of this request."""


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
        begun, first = False, b""

        async def received() -> dict[str, Any]:
            nonlocal first
            message = await receive()
            first = first or message.get("body", b"")[:64]
            return message

        async def headed(message: dict[str, Any]) -> None:
            nonlocal head, begun
            if message["type"] == "http.response.start":
                head = message
                return
            if not begun and head is not None:
                begun = True
                await send(head)
            await send(message)

        _guarded.set(True)
        try:
            await self.app(scope, received, headed)
        except DATA_ERRORS as error:
            if begun:
                raise
            logger.warning("%s %s is refused", scope["method"], scope["path"], exc_info=True)
            field = broken_field(error, scope.get("route")) if not NO_OBJECT.match(first) else "body"
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


def _error_response(original: Callable, serving: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise on what SGLang's OpenAI endpoints caught to answer it with 500, so that one place decides."""
    made = original(serving, *args, **kwargs)
    caught = sys.exc_info()[1]
    if _guarded.get() and made.status_code == 500 and isinstance(caught, DATA_ERRORS):
        raise caught
    return made


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for made_by in (
        "openai.serving_base.OpenAIServingBase.create_error_response",
        "openai.serving_responses.OpenAIServingResponses.create_error_response",
        "anthropic.serving.AnthropicServing._error_response",
    ):
        HookRegistry.register(f"sglang.srt.entrypoints.{made_by}", _error_response, HookType.AROUND)
