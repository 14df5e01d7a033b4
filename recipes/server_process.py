"""A server as a process of its own: started on a free port, waited for, ended with everything it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx


class ServerProcess:
    """``python -m MODULE --FLAG VALUE …``; a context manager that waits for it and ends it.

    Args:
        module: what to run, ``rollout.server`` or ``sglang.launch_server``.
        flags: without ``--``; a value of None stands for a flag that takes none.
        log: file for its output.
        start_seconds: how long it may take to answer ``/health``.
        environment: of the process, instead of this one's; what the CPU engine needs is added.
    """

    def __init__(
        self,
        module: str,
        flags: Mapping[str, Any],
        log: Path,
        start_seconds: float = 300,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        given = {"host": "127.0.0.1", "port": port, **flags}
        command = [sys.executable, "-m", module]
        for name, value in given.items():
            command += [f"--{name}"] if value is None else [f"--{name}", str(value)]
        environment = dict(os.environ if environment is None else environment)
        if flags.get("device") == "cpu":
            from rollout.plugin.cpu import cpu_environment

            environment |= {**cpu_environment(), "OMP_NUM_THREADS": "1"}
        self.url, self.log, self.start_seconds = f"http://127.0.0.1:{given['port']}", log, start_seconds
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: it ended, or was too slow; the message has the end of its log.
        """
        end = time.monotonic() + self.start_seconds
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not start; its log {self.log} ends with\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)

    def __enter__(self) -> ServerProcess:
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
