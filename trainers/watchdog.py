"""Stops a run whose engine or worker has died, with its name and the end of its log."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray

INTERVAL = 5.0
"""Seconds between two looks at every process."""

LOG_LINES = 20


class WorkerDied(RuntimeError):
    """A process the run depends on is gone."""


class Watchdog:
    """Looks after Ray actors and the engine processes below them from a thread of the driver.

    The error is raised in the main thread (through SIGUSR2), wherever it waits.
    """

    def __init__(self) -> None:
        self.actors: dict[str, tuple[str, int]] = {}
        self.processes: dict[str, tuple[psutil.Process, int]] = {}
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.message = ""

    def watch(self, replicas: Sequence[Any], workers: Sequence[Any]) -> None:
        """Start watching the engines of ``replicas`` and the trainer ``workers`` (Ray actor handles)."""
        pids = ray.get([worker.__ray_call__.remote(_process_id) for worker in workers])
        for index, (worker, pid) in enumerate(zip(workers, pids, strict=True)):
            self.actors[f"trainer worker {index}"] = (worker._actor_id.hex(), pid)
        for index, replica in enumerate(replicas):
            host = psutil.Process(ray.get(replica.servers[0].check_alive.remote()))
            self.processes[f"engine {index} host"] = (host, host.pid)
            for child in host.children(recursive=True):
                if "sglang" in " ".join(child.cmdline()) or "spawn_main" in " ".join(child.cmdline()):
                    # An engine's processes write to the log of their host.
                    self.processes[f"engine {index} process {child.pid}"] = (child, host.pid)
        self.thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)
        self.thread.start()

    def dead(self) -> tuple[str, int, int] | None:
        """Something watched that is gone: its name, its process id, and that of the process that has its log."""
        for name, (process, log_pid) in self.processes.items():
            if not alive(process):
                return name, process.pid, log_pid
        for name, (actor, pid) in self.actors.items():
            # Ray's public state API asks the dashboard, which does not run; this asks the head itself.
            if ray._private.state.actors(actor).get("State") == "DEAD":
                return name, pid, pid
        return None

    def _loop(self) -> None:
        while not self.stopped.wait(INTERVAL):
            if (found := self.dead()) is not None:
                self.message = describe_death(*found)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raise WorkerDied(self.message)

    def __enter__(self) -> Watchdog:
        self.previous = signal.signal(signal.SIGUSR2, self._on_signal)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """End watching. An error that a dead process has caused elsewhere is reported as that death.

        Raises:
            WorkerDied: something watched is gone.
        """
        self.stopped.set()
        if self.thread is not None:
            self.thread.join(2 * INTERVAL)
        signal.signal(signal.SIGUSR2, self.previous)
        if isinstance(error, Exception) and not isinstance(error, WorkerDied) and (found := self.dead()) is not None:
            raise WorkerDied(describe_death(*found)) from error


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe_death(name: str, pid: int, log_pid: int) -> str:
    """What a user is told about a process that is gone."""
    return f"{name} (process {pid}) died; the end of its log:\n{log_tail(log_pid)}"


def _process_id(_: Any) -> int:
    return os.getpid()


def worker_died(error: ray.exceptions.ActorDiedError) -> WorkerDied:
    """Ray's report of a dead actor as ours: its name and the end of its log."""
    text = str(error)
    details = dict(re.findall(r"^\s*(class_name|name|pid): (.+)$", text, re.MULTILINE))
    name = details.get("name") or details.get("class_name") or "a worker"
    if not details.get("pid", "").isdigit():
        return WorkerDied(f"{name} died: {text.splitlines()[0]}")
    pid = int(details["pid"])
    return WorkerDied(describe_death(name, pid, pid))


def log_tail(pid: int) -> str:
    """Last lines of the log of a Ray worker process in Ray's session directory."""
    directory = Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"
    files = sorted(directory.glob(f"worker-*-{pid}.err")) + sorted(directory.glob(f"worker-*-{pid}.out"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-LOG_LINES:]) or "(empty)"
