"""Stops a run whose engine or worker has died, with its name and the end of its log."""

from __future__ import annotations

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
        self.actors: dict[str, Any] = {}
        self.processes: dict[str, psutil.Process] = {}
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.message = ""

    def watch(self, replicas: Sequence[Any], workers: Sequence[Any]) -> None:
        """Start watching the engines of ``replicas`` and the trainer ``workers`` (Ray actor handles)."""
        for index, worker in enumerate(workers):
            self.actors[f"trainer worker {index}"] = worker
        for index, replica in enumerate(replicas):
            pid = ray.get(replica.servers[0].check_alive.remote())
            name = f"engine {index}"
            self.processes[f"{name} host"] = psutil.Process(pid)
            for child in self.processes[f"{name} host"].children(recursive=True):
                if "sglang" in " ".join(child.cmdline()) or "spawn_main" in " ".join(child.cmdline()):
                    self.processes[f"{name} process {child.pid}"] = child
        self.thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while not self.stopped.wait(INTERVAL):
            for name, process in self.processes.items():
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    return self._raise(name, process.pid)
            for name, actor in self.actors.items():
                state = ray.util.state.get_actor(actor._actor_id.hex(), timeout=30)
                if state is not None and state.state == "DEAD":
                    return self._raise(name, state.pid)
        return None

    def _raise(self, name: str, pid: int) -> None:
        self.message = f"{name} (process {pid}) died; the end of its log:\n{log_tail(pid)}"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raise WorkerDied(self.message)

    def __enter__(self) -> Watchdog:
        self.previous = signal.signal(signal.SIGUSR2, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        signal.signal(signal.SIGUSR2, self.previous)


def worker_died(error: ray.exceptions.ActorDiedError) -> WorkerDied:
    """Ray's report of a dead actor as ours: its name and the end of its log."""
    text = str(error)
    details = dict(re.findall(r"^\s*(class_name|name|pid): (.+)$", text, re.MULTILINE))
    name = details.get("name") or details.get("class_name") or "a worker"
    if not details.get("pid", "").isdigit():
        return WorkerDied(f"{name} died: {text.splitlines()[0]}")
    pid = int(details["pid"])
    return WorkerDied(f"{name} (process {pid}) died; the end of its log:\n{log_tail(pid)}")


def log_tail(pid: int) -> str:
    """Last lines of a process's log in Ray's session directory; of its host's if it writes through one."""
    directory = Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"
    files = sorted(directory.glob(f"worker-*-{pid}.err")) + sorted(directory.glob(f"worker-*-{pid}.out"))
    if not files:
        files = sorted(directory.glob("worker-*.err"), key=lambda f: f.stat().st_mtime)[-1:]
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-LOG_LINES:]) or "(empty)"
