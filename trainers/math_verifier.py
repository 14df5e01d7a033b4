"""``math_verify`` in a process of its own, so that a comparison can be bounded in time from any thread.

``math_verify`` bounds itself with ``signal.alarm``, which only works on a main thread, and SymPy cannot be
interrupted from outside. A child process has a main thread and can be killed. It reads requests and writes replies
as JSON lines and ends when its input is closed, hence also when its parent is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

START_SECONDS = 180.0


@dataclass(frozen=True)
class Comparison:
    """Whether an answer could be read from the text, and whether it equals the gold answer."""

    parsed: bool
    equal: bool


class MathVerifier:
    """One child process, started at first use and again after a time-out; calls from many threads take turns."""

    def __init__(self, seconds: float = 15.0) -> None:
        """``seconds`` bounds one comparison, all of its parsing included."""
        self.seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._buffer = b""

    def compare(self, gold: str, text: str) -> Comparison:
        """Compare the answer in ``text`` with ``gold`` (LaTeX or a number, without a surrounding box).

        An answer that takes too long or ends the child process counts as not parsed.

        Raises:
            RuntimeError: the child process does not start.
        """
        with self._lock:
            if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
                self._start()
            reply = self._ask({"gold": gold, "text": text})
            if reply is None:
                self._stop()
                return Comparison(parsed=False, equal=False)
            return Comparison(**reply)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        # -P keeps this file's folder off the child's import path.
        self._child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._owner, self._buffer = os.getpid(), b""
        atexit.register(self._stop)
        if self._read(START_SECONDS) is None:
            self._stop()
            raise RuntimeError(
                "the answer verifier did not start; run `python -c 'import math_verify'` in this environment to see why"
            )

    def _stop(self) -> None:
        child, self._child = self._child, None
        atexit.unregister(self._stop)
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()

    def _ask(self, request: dict[str, str]) -> dict[str, Any] | None:
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(self.seconds)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next JSON line of the child; None if it takes longer than ``seconds`` or the child ends."""
        assert self._child is not None and self._child.stdout is not None
        descriptor, deadline = self._child.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(descriptor, 65536) if ready else b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _serve() -> None:
    """The child: compare until the input ends. Replies go to the original stdout, prints of libraries do not."""
    from math_verify import parse, verify

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = parse(request["text"])
        equal = bool(answer) and verify(parse(f"\\boxed{{{request['gold']}}}"), answer)
        print(json.dumps({"parsed": bool(answer), "equal": bool(equal)}), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
