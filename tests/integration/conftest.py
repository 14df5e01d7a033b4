"""The real engine, started once per configuration and, in one process of the tests, never two at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from xdist.scheduler import LoadScopeScheduling

from dllm.decoding import SamplingParams
from recipes.server_process import ServerProcess
from rollout.engine import Engine
from rollout.records import RolloutSample, sample_from_response
from tests.integration.oracle import THRESHOLD, Case, TinyModel, make
from tests.support import child_environment, threads

# Modules that share an engine run in one process, one after the other: an engine starts once.
SHARED = {
    "server": ("decoding", "invariance", "refresh", "service", "stopping", "stress"),
    "synchronous": ("routing", "synchronous"),
}
GROUPS = {f"test_engine_{module}.py": group for group, modules in SHARED.items() for module in modules}
GROUPS |= {
    "test_refresh_faults.py": "server",
    "test_refresh_killed.py": "server",
    "test_refresh_by_receiver.py": "server",
}
# The longest work begins first.
FIRST = ("test_grpo.py", "server", "test_evaluate.py", "test_engine_refresh_sessions.py", "synchronous")


def group_of(path: str) -> str:
    """Name of the engine that a test module shares, else the module's name."""
    module = path.rpartition("/")[2]
    return GROUPS.get(module, module)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    class ByEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.split("::")[0])

    return ByEngine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {group: i for i, group in enumerate(FIRST)}
    items.sort(key=lambda item: (rank.get(group_of(item.path.name), len(rank)), "integration" not in item.path.parts))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The networks here are small: threads would spend their time waiting for each other."""
    with threads(1):
        yield


class OneAtATime:
    """Holds the heavy thing that runs at present; another one replaces it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.running: Any = None

    def use(self, name: str, start: Callable[[], Any]) -> Any:
        """What runs under ``name``; started by ``start()`` if it is not the present one. It has ``close()``."""
        if self.name != name:
            self.close()
            self.running, self.name = start(), name
        return self.running

    def close(self) -> None:
        if self.running is not None:
            self.running.close()
        self.name, self.running = None, None


@pytest.fixture(scope="session")
def heavy() -> Iterator[OneAtATime]:
    holder = OneAtATime()
    yield holder
    holder.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyModel:
    return make(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def mask_likely(tmp_path_factory) -> TinyModel:
    """The same shape with other weights: the first seed whose head makes the mask token likely.

    The mask token's row is drawn like the others; at a standard deviation of 0.3 some rows are far from average.
    """
    for seed in range(2, 50):
        made = make(tmp_path_factory.mktemp("mask_likely"), seed, head_std=0.3)
        if made.mask_share() > 0.03:
            return made
    raise AssertionError("no seed makes the mask token likely")


@dataclass
class Request:
    """One request and what the engine was asked for."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_new_tokens: int = 50
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, **changes: Any) -> Request:
        """The request of a case of the oracle."""
        return cls(case.prompt, case.sampling, case.seed, **changes)

    def sglang(self) -> dict[str, Any]:
        s = self.sampling
        given = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
        if self.seed is not None:
            given["sampling_seed"] = self.seed
        return given | {"max_new_tokens": self.max_new_tokens} | self.more


class Server(ServerProcess):
    """Stock SGLang's HTTP server with this package's plugin, as a user starts it."""

    module = "sglang.launch_server"

    def __init__(self, tiny: TinyModel, directory: Path, **flags: Any) -> None:
        self.block_size = tiny.config.block_size
        options = directory / "algorithm.yaml"
        if "dllm-algorithm" not in flags:
            options.write_text(yaml.safe_dump({"threshold": THRESHOLD}))
        given = {
            "model-path": tiny.path,
            "dllm-algorithm": "SelectThenSample",
            "dllm-algorithm-config": options,
            "device": "cpu",
            "custom-weight-loader": "somebody.elses.loader",
            "grammar-backend": "none",
            "log-level": "warning",
            "skip-server-warmup": None,
        } | flags
        if not options.exists():
            del given["dllm-algorithm-config"]
        super().__init__(self.module, given, directory / "server.log", environment=child_environment())
        self.client = httpx.Client(base_url=self.url, timeout=300)
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def scheduler(self) -> psutil.Process:
        """Its scheduler, a process of SGLang."""
        [scheduler] = self.schedulers()
        return scheduler

    def schedulers(self) -> list[psutil.Process]:
        """The schedulers of its tensor-parallel ranks.

        Not by their titles, which depend on where the system has room for them: ranks are started in their order.
        """
        children = sorted(psutil.Process(self.pid).children(), key=lambda child: child.pid)
        others = ("resource_tracker", "detokenizer")
        return [child for child in children if not any(other in " ".join(child.cmdline()) for other in others)]

    def answers(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """SGLang's raw answers; the requests arrive together."""
        body = {
            "input_ids": [list(r.prompt) for r in requests],
            "sampling_params": [r.sglang() for r in requests],
        }
        answer = self.client.post("/generate", json=body)
        assert answer.status_code == 200, f"{answer.text[:2000]}\n{self.tail()}"
        return answer.json()

    def generate(self, requests: Sequence[Request]) -> list[RolloutSample]:
        return [
            sample_from_response(answer, r.prompt, self.block_size, r.sampling, r.max_new_tokens, r.seed)
            for answer, r in zip(self.answers(requests), requests, strict=True)
        ]

    def one(self, prompt: Sequence[int], **arguments: Any) -> RolloutSample:
        return self.generate([Request(prompt, **arguments)])[0]

    def close(self) -> None:
        super().close()
        self.client.close()


class RolloutServer(Server):
    """``python -m rollout.server``."""

    module = "rollout.server"


def default_server(heavy: OneAtATime, tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return heavy.use(
        "server", lambda: RolloutServer(tiny, tmp_path_factory.mktemp("server"), **{"enable-metrics": None})
    )


@pytest.fixture
def server(heavy, tiny, tmp_path_factory) -> Server:
    """First-done-first-out scheduling and radix cache, the defaults."""
    return default_server(heavy, tiny, tmp_path_factory)


@pytest.fixture(scope="session")
def alone(heavy, tiny, tmp_path_factory):
    """Random requests and their answers when each runs alone on ``server``."""
    from tests.integration.invariance import Alone, random_requests

    running = default_server(heavy, tiny, tmp_path_factory)
    made = Alone(random_requests())
    made.answers = [running.generate([request])[0] for request in made.requests]
    return made


@pytest.fixture(scope="session")
def syncs() -> Iterator[dict[str, Any]]:
    opened: dict[str, Any] = {}
    yield opened
    for sync in opened.values():
        sync.publisher.close()


@pytest.fixture
def sync(server, tiny, syncs) -> Iterator[Any]:
    """A publisher; whatever a test sends, the server holds the checkpoint's weights afterwards."""
    from tests.integration.refresh import Sync

    if server.url not in syncs:
        syncs[server.url] = Sync(server, tiny)
    yield syncs[server.url]
    syncs[server.url].publish(tiny, "default")


@pytest.fixture
def by_seed(heavy, tiny, tmp_path_factory) -> Server:
    """Requests choose their decoder by seed (``tests.integration.decoders``); no file of options."""
    flags = {"dllm-algorithm": "tests.integration.decoders:BySeed"}
    return heavy.use("by_seed", lambda: Server(tiny, tmp_path_factory.mktemp("by_seed"), **flags))


class LocalEngine:
    """``rollout.engine.Engine`` in this process, which gets its environment back at the end."""

    def __init__(self, tiny: TinyModel, options: dict[str, Any] | None = None, **arguments: Any) -> None:
        self.environment, self.path = dict(os.environ), list(sys.path)
        os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        self.engine = Engine(tiny.path, device="cpu", options=options or {"threshold": THRESHOLD}, **arguments)

    def close(self) -> None:
        self.engine.close()
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path


@pytest.fixture
def synchronous(heavy, tiny) -> Engine:
    """A whole batch of blocks until all are done, and no radix cache: the opposite of the server's settings.

    It records experts for the requests that ask for them.
    """
    start = lambda: LocalEngine(tiny, dllm_fdfo=False, disable_radix_cache=True, enable_return_routed_experts=True)
    return heavy.use("synchronous", start).engine


STOCK = "sglang.srt.dllm.algorithm.low_confidence:LowConfidence"


@pytest.fixture
def stock(heavy, tiny) -> Engine:
    """SGLang's own LowConfidence, unchanged."""
    return heavy.use("stock", lambda: LocalEngine(tiny, dllm_algorithm=STOCK)).engine


STOCK_JOINT = "sglang.srt.dllm.algorithm.joint_threshold:JointThreshold"
JOINT_OPTIONS = {"threshold": THRESHOLD, "edit_threshold": 0.034, "max_post_edit_steps": 3}


@pytest.fixture
def stock_joint(heavy, tiny) -> Engine:
    """SGLang's own JointThreshold, unchanged."""
    start = lambda: LocalEngine(tiny, JOINT_OPTIONS, dllm_algorithm=STOCK_JOINT)
    return heavy.use("stock_joint", start).engine
