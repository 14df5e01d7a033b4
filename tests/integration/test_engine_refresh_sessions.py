"""Weight sessions and pushes on the real server: what it serves before, during and after, whoever dies in between.

The last test ends the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dllm.decoding import SamplingParams
from dllm.models.checkpoint import load_model
from rollout.records import sample_from_response
from tests.integration.conftest import Request, RolloutServer, Server
from tests.integration.oracle import TinyModel, assert_same
from tests.support import run_module, wait_for
from weight_sync.checksum import TensorSums
from weight_sync.client import ServiceControl, StreamControl
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.push import main, push
from weight_sync.staging import sweep
from weight_sync.transports.shm import SharedMemoryTransport

GREEDY = SamplingParams(0)
BUCKET = 256 << 10
KEY = "a-secret"


@dataclass
class Sessions:
    """The server, and the versions that were pushed into it."""

    server: Server
    last: int = 0

    def client(self, drain_seconds: float = 60.0) -> ServiceControl:
        return ServiceControl(self.server.url, KEY, 120, drain_seconds)

    def push(self, model: TinyModel, drain_seconds: float = 60.0, **options) -> str:
        """The version that the server has now."""
        self.last += 1
        push(self.client(drain_seconds), model.path, self.last, BUCKET, **options)
        return str(self.last)

    def state(self) -> tuple[str, str | None]:
        state = self.client().state()
        return state["state"], state["version"]

    def metrics(self) -> dict[str, float]:
        """What the server tells Prometheus of its weights; labels are part of the name."""
        lines = self.server.client.get("/metrics", follow_redirects=True).text.splitlines()
        prefix = "dllm_rollout:weight_sync_"
        pairs = (line.removeprefix(prefix).rsplit(" ", 1) for line in lines if line.startswith(prefix))
        return {name: float(value) for name, value in pairs}

    def serves(self, model: TinyModel, version: str, length: int = 33) -> None:
        """What is decoded is what the reference makes of ``model``, and says that it is ``version``."""
        case = model.case(length, GREEDY)
        trace = self.server.one(case.prompt, sampling=GREEDY).trace
        assert_same(trace, case.trace)
        assert set(trace.weight_versions) == {version}


@pytest.fixture(scope="module")
def pushes() -> dict[str, Sessions]:
    return {}


@pytest.fixture
def sessions(heavy, tiny, tmp_path_factory, pushes) -> Sessions:
    start = lambda: RolloutServer(
        tiny, tmp_path_factory.mktemp("sessions"), **{"admin-api-key": KEY, "enable-metrics": None}
    )
    server = heavy.use("sessions", start)
    return pushes.setdefault(server.url, Sessions(server))


def test_a_push_gives_the_tokens_of_the_other_checkpoint(sessions, tiny, mask_likely, capsys):
    """From the command line, without the right key, and with it; the weights are those that a fresh start loads."""
    sessions.serves(tiny, "default")
    arguments = ["--engine", sessions.server.url, "--model-path", mask_likely.path, "--version", "1"]
    assert main([str(argument) for argument in arguments]) == 2
    assert "it wants its admin key; give --admin-api-key" in capsys.readouterr().err
    sessions.serves(tiny, "default", 20)
    pushed = run_module("weight_sync.push", *arguments, "--admin-api-key", KEY)
    assert pushed.returncode == 0, pushed.stderr
    sessions.last = 1
    sessions.serves(mask_likely, "1")
    assert sessions.server.client.get("/model_info").json()["weight_version"] == "1"
    sums = TensorSums()
    for name, tensor in load_model(mask_likely.path).state_dict().items():
        sums.add(name, tensor)
    assert sessions.client().state()["checksum"] == f"{sums.value():016x}", "bit for bit what is in the checkpoint"
    assert f"checksum {sums.value():016x}" in pushed.stdout


OPEN = {
    "/", "/api/chat", "/api/generate", "/api/show", "/api/tags", "/classify", "/close_session", "/encode",
    "/generate", "/get_load", "/get_model_info", "/get_server_info", "/get_weight_version", "/health",
    "/health_generate", "/invocations", "/model_info", "/open_session", "/parse_function_call", "/ping",
    "/rollout/generate", "/rollout/info", "/separate_reasoning", "/server_info", "/v1/audio/transcriptions",
    "/v1/chat/completions", "/v1/classify", "/v1/completions", "/v1/detokenize", "/v1/embeddings", "/v1/loads",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/{model}", "/v1/rerank", "/v1/responses",
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/score", "/v1/tokenize",
    "/vertex_generate", "/weight_version",
}  # fmt: skip
"""What anyone may do who may decode. Everything else needs the administrator's key."""


def guarded(paths: dict[str, Any]) -> list[tuple[str, str]]:
    """(method, path) of the routes of an OpenAPI description that must not be open."""
    filled = {
        path: path.replace("{index}", "0").replace("{", "").replace("}", "") for path in paths if path not in OPEN
    }
    return [(method.upper(), filled[path]) for path in filled for method in paths[path]]


def test_every_administrative_route_needs_the_key(sessions):
    """SGLang's and ours: a route that is neither open by name nor closed fails this."""
    http = sessions.server.client
    routes = guarded(http.get("/openapi.json").json()["paths"])
    assert {("POST", "/update_weights_from_disk"), ("GET", "/start_profile"), ("POST", "/scale_elastic_ep")} <= set(
        routes
    )
    assert {("POST", "/abort_request"), ("GET", "/flush_cache"), ("GET", "/weights/v1/state")} <= set(routes)
    for headers in ({}, {"Authorization": "Bearer another"}):
        answers = {route: http.request(*route, headers=headers).status_code for route in routes}
        assert set(answers.values()) == {401}, {route for route, status in answers.items() if status != 401}
    allowed = {"Authorization": f"Bearer {KEY}"}
    for method, path, body in (
        ("GET", "/weights/v1/state", None),
        ("POST", "/rollout/abort", {"rid": "nobody"}),
        ("POST", "/abort_request", {"rid": "nobody"}),
    ):
        assert http.request(method, path, json=body, headers=allowed).status_code == 200, path
    for path in ("/server_info", "/get_server_info"):
        told = http.get(path).json()
        assert KEY not in json.dumps(told) and told["admin_api_key"] == "***"


def test_a_prompt_in_the_radix_cache_gives_the_new_tokens(sessions, tiny, mask_likely):
    """By a directory that the server reads itself."""
    version = sessions.push(tiny)
    old, new = tiny.case(70, GREEDY, also=[mask_likely]), mask_likely.case(70, GREEDY, also=[tiny])
    assert old.prompt == new.prompt and old.trace.replay_ids.tolist() != new.trace.replay_ids.tolist()
    for expected in (0, 64):
        answer = sessions.server.answers([Request(old.prompt, GREEDY)])[0]
        assert answer["meta_info"]["cached_tokens"] == expected
    assert answer["meta_info"]["weight_version"] == version
    version = sessions.push(mask_likely, shared=True)
    answer = sessions.server.answers([Request(old.prompt, GREEDY)])[0]
    assert answer["meta_info"]["cached_tokens"] == 0 and answer["meta_info"]["weight_version"] == version
    assert answer["output_ids"] == new.trace.replay_ids[: new.trace.visible].tolist()


@pytest.mark.parametrize("drain", [60.0, 0.0], ids=["drained", "aborted"])
def test_a_push_under_load(sessions, tiny, mask_likely, drain):
    """Every request that was accepted has one version; one that was refused was told when to come again."""
    before = sessions.push(tiny)
    limit = 160
    answers: list[tuple[list[int], httpx.Response]] = []
    over = threading.Event()
    asked = {"sampling_params": {"temperature": 1.0, "max_new_tokens": limit, "ignore_eos": True}}

    def keep_asking(prompt: list[int]) -> None:
        with httpx.Client(base_url=sessions.server.url, timeout=120) as client:
            while not over.is_set():
                answers.append((prompt, client.post("/generate", json={"input_ids": prompt, **asked})))
                if answers[-1][1].status_code == 503:
                    time.sleep(0.05)

    threads = [threading.Thread(target=keep_asking, args=[tiny.prompt(20, number)]) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) >= 1, 60, "a first answer")
    after = sessions.push(mask_likely, drain)
    count = len(answers)
    wait_for(lambda: len(answers) > count + 3, 60, "answers of the new weights")
    over.set()
    for thread in threads:
        thread.join()
    refused = [answer for _, answer in answers if answer.status_code != 200]
    assert all(answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1 for answer in refused)
    samples = [
        sample_from_response(answer.json(), prompt, sessions.server.block_size, SamplingParams(), limit)
        for prompt, answer in answers
        if answer.status_code == 200
    ]
    seen = [set(sample.trace.weight_versions) for sample in samples if sample.trace.weight_versions]
    assert all(len(found) == 1 for found in seen), "decoded by one version from beginning to end"
    assert set.union(*seen) == {before, after}
    whole = [sample for sample in samples if sample.finish_reason != "abort"]
    assert all(sample.trace.visible == limit for sample in whole)
    if drain:
        assert len(whole) == len(samples), "what was running has ended on its own"
    sessions.serves(mask_likely, after)


def dies_at(stage: int, url: str, path: Path, version: int, during: str = "") -> int:
    """Push in a child that kills itself: after ``stage`` calls to the server, 10 ms into one to ``during``, or
    as the commit is answered."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        client = ServiceControl(url, KEY, 120, 60)
        original, calls = client.call, []
        die = lambda: os.kill(os.getpid(), signal.SIGKILL)

        def call(method: str, where: str, **arguments):
            calls.append(where)
            if len(calls) > stage:
                die()
            if during and where.endswith(during):
                threading.Timer(0.01, die).start()
            answer = original(method, where, **arguments)
            if where.endswith("/commit"):
                die()
            return answer

        client.call = call  # type: ignore[method-assign]
        try:
            push(client, path, version, BUCKET)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_sender_is_killed_at_every_stage(sessions, tiny, mask_likely):
    """Until the commit the old weights are served, and the same push goes on where the last one died."""
    before = sessions.push(tiny)
    version = sessions.last = sessions.last + 1
    stages = 0
    for stage in range(1, 20):
        assert dies_at(stage, sessions.server.url, mask_likely.path, version) == -signal.SIGKILL
        state = sessions.state()
        if state == ("serving", str(version)):
            break
        assert state in (("serving", before), ("preparing", before))
        stages += 1
        if stage % 2:
            sessions.serves(tiny, before, 20)
    assert stages > 3, "it died before the commit more than once"
    sessions.serves(mask_likely, str(version))
    push(sessions.client(), mask_likely.path, version, BUCKET)


def test_the_sender_is_killed_while_its_update_is_applied(sessions, tiny, mask_likely):
    """The server goes on to the end by itself."""
    sessions.push(tiny)
    version = sessions.last = sessions.last + 1
    assert dies_at(99, sessions.server.url, mask_likely.path, version, "/commit") == -signal.SIGKILL
    wait_for(lambda: sessions.state() == ("serving", str(version)), 30, "the end of the update")
    sessions.serves(mask_likely, str(version))


def test_a_connection_that_is_lost_in_the_middle_of_a_bucket(sessions, tiny, mask_likely):
    before = sessions.push(tiny)
    version = sessions.last = sessions.last + 1
    dies_at(2, sessions.server.url, mask_likely.path, version)
    session = sessions.client().state()["session"]
    host, port = sessions.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        path = f"/weights/v1/sessions/{session['run_id']}/{version}/buckets/0"
        connection.sendall(
            f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100000\r\n\r\n".encode()
            + (20).to_bytes(8, "little")
            + b"{}"
        )
    assert sessions.state() == ("preparing", before) and sessions.client().state()["session"]["received"] == 0
    push(sessions.client(), mask_likely.path, version, BUCKET)
    sessions.serves(mask_likely, str(version))


def staged(sessions: Sessions, spoil: Callable[[], None]) -> ServiceControl:
    """A client whose commit comes after ``spoil()``."""
    client = sessions.client()
    original = client.commit

    def commit(run_id: str, version: str, checksum: str = "") -> None:
        spoil()
        original(run_id, version, checksum)

    client.commit = commit  # type: ignore[method-assign]
    return client


def test_a_streamed_update(sessions, tiny, mask_likely):
    """Buckets in shared memory straight into the closed engine, as a trainer on the server's host sends them."""
    sessions.push(tiny)
    hf_config = json.loads((mask_likely.path / "config.json").read_text())
    control = StreamControl(sessions.server.url, KEY, 120, 60)
    layout = CheckpointLayout.from_config(hf_config, torch.float32)
    publisher = WeightPublisher(layout, SharedMemoryTransport(), [control], BUCKET)
    sessions.last += 1
    report = publisher.publish(mask_likely.model.state_dict(), sessions.last)
    publisher.close()
    assert report.buckets > 3 and report.checksum == sessions.client().state()["checksum"]
    sessions.serves(mask_likely, str(sessions.last))


def flip_a_staged_byte(server: Server) -> None:
    """Damage in memory between the last check and the engine."""
    [file] = Path("/dev/shm").glob(f"weight_staging_{server.process.pid}_*/2.bin")
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


def test_an_engine_with_half_an_update_is_broken_until_a_whole_one(sessions, tiny, mask_likely):
    """The third bucket is damaged behind everybody's back: the loader refuses it twice."""
    sessions.push(tiny)
    before = sessions.metrics()
    assert before['engine_weight_state{state="serving"}'] == 1
    version = sessions.last + 1
    client = staged(sessions, lambda: flip_a_staged_byte(sessions.server))
    with pytest.raises(WeightSyncError, match=r"\(502\): .*bucket 2 was damaged"):
        push(client, mask_likely.path, version, BUCKET)
    assert sessions.state() == ("broken", None)
    refused = sessions.server.client.post("/generate", json={"input_ids": tiny.prompt(9)})
    assert refused.status_code == 503 and refused.json()["weight_state"] == "broken"
    assert sessions.server.client.get("/health").status_code == 503
    broken = sessions.metrics()
    grown = {name: value - before.get(name, 0.0) for name, value in broken.items()}
    assert broken['engine_weight_state{state="broken"}'] == 1 and broken['engine_weight_state{state="serving"}'] == 0
    assert grown['failures_total{reason="Rejected",stage="commit"}'] >= 1 and grown["retries_total"] >= 1
    assert grown['refreshes_total{mode="staged"}'] == grown["closed_seconds_count"] == 0
    assert sessions.server.client.post("/v1/completions", json={}).status_code == 503
    flush = sessions.server.client.post("/flush_cache", headers={"Authorization": f"Bearer {KEY}"})
    assert flush.status_code != 503, "the administrator's requests pass"
    after = sessions.push(mask_likely)
    assert sessions.state() == ("serving", after)
    assert sessions.metrics()["closed_seconds_count"] == before["closed_seconds_count"] + 1
    sessions.serves(mask_likely, after)


def test_a_killed_scheduler_is_no_success(sessions, tiny):
    """The push fails, and the server ends instead of serving anything."""

    def kill() -> None:
        sessions.server.scheduler().kill()

    with pytest.raises(WeightSyncError):
        push(staged(sessions, kill), tiny.path, sessions.last + 1, BUCKET)

    def gone() -> bool:
        try:
            return sessions.state()[0] == "broken"
        except WeightSyncError:
            return True

    wait_for(gone, 60, "the end of the server")
    sessions.server.close()
    pid = sessions.server.process.pid
    sweep()
    assert not list(Path("/dev/shm").glob(f"weight_staging_{pid}_*")), "the next server removes what this one left"
