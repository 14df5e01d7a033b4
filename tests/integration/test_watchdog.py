"""The watchdog over real Ray actors: whichever process dies, the driver learns which, with the end of its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import ray

from tests.support import ROOT, wait_for
from trainers import watchdog
from trainers.watchdog import Watchdog, WorkerDied


@ray.remote
class Host:
    """Hosts an engine the way the rollout server does: a process below it, and a word to its log."""

    def __init__(self) -> None:
        print("the host says hello", flush=True)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "sglang::scheduler"])

    def check_alive(self) -> int:
        return os.getpid()

    def engine(self) -> int:
        return self.child.pid


@ray.remote
class Worker:
    def __init__(self) -> None:
        print("the worker says hello", flush=True)

    def ready(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster(heavy) -> Iterator[None]:
    heavy.close()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def run(cluster, monkeypatch) -> Iterator[SimpleNamespace]:
    """A driver with one engine and one trainer worker."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.5)
    host, worker = Host.options(num_cpus=0).remote(), Worker.options(num_cpus=0).remote()
    pids = SimpleNamespace(host=ray.get(host.check_alive.remote()), engine=ray.get(host.engine.remote()))
    pids.worker = ray.get(worker.ready.remote())
    yield SimpleNamespace(replicas=[SimpleNamespace(servers=[host])], workers=[worker], pids=pids)
    for pid in vars(pids).values():
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("victim", "name", "log"),
    [
        ("engine", "engine 0 process", "the host says hello"),
        ("host", "engine 0 host", "the host says hello"),
        ("worker", "trainer worker 0", "the worker says hello"),
    ],
)
def test_a_death_interrupts_the_driver(run, victim, name, log):
    pid = getattr(run.pids, victim)
    with pytest.raises(WorkerDied) as died, Watchdog() as guard:
        guard.watch(run.replicas, run.workers)
        os.kill(pid, signal.SIGKILL)
        time.sleep(60)
    text = str(died.value)
    assert text.startswith(name) and "died; the end of its log:" in text.splitlines()[0]
    assert f"(process {pid})" in text and log in text


def test_an_error_that_a_death_has_caused_is_reported_as_the_death(run):
    with pytest.raises(WorkerDied, match="engine 0 host") as died, Watchdog() as guard:
        guard.watch(run.replicas, run.workers)
        guard.stopped.set()  # the error comes before the next look
        os.kill(run.pids.host, signal.SIGKILL)
        wait_for(lambda: guard.dead() is not None, 10, "the end of the host")
        raise ConnectionError("engine does not answer")
    assert isinstance(died.value.__cause__, ConnectionError)


def test_other_errors_pass_and_nothing_stays(run):
    handler = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(KeyError), Watchdog() as guard:
        guard.watch(run.replicas, run.workers)
        raise KeyError("something else")
    assert signal.getsignal(signal.SIGUSR2) is handler
    assert not guard.thread.is_alive()
