"""Calls that may never return, as a collective with a process that is gone, on threads that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T], name: str = "weight_sync") -> Future[T]:
    """Start ``call``; a process that ends does not wait for it, as it would for an executor's thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of ``call``.

    Raises:
        TimeoutError: it has not returned; it goes on, and what it comes to is lost.
    """
    return begin(call).result(seconds)
