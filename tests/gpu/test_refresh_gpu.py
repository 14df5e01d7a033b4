"""Weights refreshed on a GPU: two servers with CUDA graphs, a trainer on the same device.

``first`` starts with the weights A and is refreshed; ``second`` was loaded from a checkpoint of B and tells what a
fresh start makes of B. Both are started once, at the same time.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm.models.checkpoint import split_experts
from rollout.records import RolloutSample
from tests.gpu.engines import BUCKET, REQUESTS, WAYS, Aborted, GpuServer, layout_of, on_device
from tests.support import ROOT, write_tiny_model
from weight_sync.checksum import TensorSums
from weight_sync.client import ServiceControl, StreamControl
from weight_sync.control import EngineControl
from weight_sync.messages import EngineFailed, SyncReport, WeightSyncError
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.collective import Channel, CollectiveTransport
from weight_sync.transports.http import HttpTransport
from weight_sync.transports.ipc import CudaIpcTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE: dict[str, Any] = dict(layers=4, hidden=256, intermediate=512, experts=64, expert_intermediate=128)
PROMPTS = [[6 + (7 * i + 13 * length) % 50 for i in range(length)] for length in (5, 33, 70, 130)]


@dataclass
class Weights:
    """A checkpoint on disk and the same tensors in this process, on the device."""

    path: Path
    tensors: dict[str, Tensor]

    @classmethod
    def make(cls, path: Path, seed: int) -> Weights:
        write_tiny_model(path, seed, 0.3, **SHAPE)
        return cls(path, on_device(path))

    @cached_property
    def checksum(self) -> str:
        """Of these weights in the engine's dtype, without an engine."""
        sums = TensorSums()
        for name, tensor in layout_of(self.path).normalise(self.tensors.items()):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            tensor.write(whole, 0) if hasattr(tensor, "write") else whole.copy_(tensor)
            sums.add(name, whole)
        return f"{sums.value():016x}"


class Bench:
    """Both servers, both sets of weights, and what each makes of the prompts."""

    def __init__(self, directory: Path) -> None:
        self.a, self.b = Weights.make(directory / "a", 1), Weights.make(directory / "b", 2)
        self.first = GpuServer(self.a.path, directory / "first.log", enable_memory_saver=None)
        self.second = GpuServer(self.b.path, directory / "second.log")
        self.last = 0
        try:
            self.first.wait()
            self.second.wait()
            self.tokens_a, self.tokens_b = (server.greedy(PROMPTS) for server in (self.first, self.second))
        except BaseException:
            self.close()
            raise
        self.control = EngineControl(self.first.url, timeout=60)
        self.publisher = WeightPublisher(layout_of(self.a.path), CudaIpcTransport(), [self.control], BUCKET)

    def version(self) -> str:
        """A new one."""
        self.last += 1
        return str(self.last)

    def publish(self, weights: Weights) -> SyncReport:
        return self.publisher.publish(weights.tensors, self.version())

    def serves(self, weights: Weights, version: str | None = None) -> None:
        """``first`` has exactly these weights, and decodes as a fresh start with them does."""
        assert self.control.checksum() == weights.checksum
        assert self.first.greedy(PROMPTS) == (self.tokens_a if weights is self.a else self.tokens_b)
        if version is not None:
            assert self.first.versions(PROMPTS[0]) == {version}

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("servers"))
    yield bench
    bench.publisher.close()
    bench.close()


@pytest.fixture
def bench(servers) -> Bench:
    """``first`` holds A."""
    servers.publish(servers.a)
    return servers


def test_a_refreshed_engine_decodes_as_one_that_was_loaded(bench):
    """G1: bit for bit the weights of a load from disk, and its greedy tokens, with CUDA graphs; back again too."""
    information = bench.first.client.get("/server_info").json()
    assert not information["disable_cuda_graph"]
    assert bench.tokens_a != bench.tokens_b
    for weights in (bench.b, bench.a, bench.b):
        report = bench.publish(weights)
        assert report.buckets > 5 and report.checksum == weights.checksum
        bench.serves(weights, report.version)
    assert EngineControl(bench.second.url).checksum() == bench.b.checksum


def test_every_parameter_is_written(bench):
    """G2, by SGLang's own checker: whatever it overwrote with noise is as before."""
    check = lambda action: bench.control.post("/weights_checker", {"action": action})
    check("snapshot")
    check("compare")
    check("reset_tensors")
    with pytest.raises(WeightSyncError, match="check tensor equality failed"):
        check("compare")
    bench.publish(bench.a)
    check("compare")
    bench.serves(bench.a)


@pytest.mark.parametrize("drain", [60.0, 0.0], ids=["drained", "aborted"])
def test_a_refresh_while_64_requests_run(bench, drain, record_property):
    """G3: none is lost, none has two versions; drained ones are complete. Aborted ones end at a block boundary, or with
    an error if they had not come to their first block."""
    length, before = 256, str(bench.last)

    def ask(number: int) -> RolloutSample | None:
        try:
            return bench.first.generate(PROMPTS[number % 4] + [6 + number % 50], length, 1.0, number)[0]
        except Aborted:
            return None

    bench.control.drain_seconds, pause = drain, bench.control.pause
    try:
        with ThreadPoolExecutor(2 * REQUESTS) as pool:
            running = [pool.submit(ask, n) for n in range(REQUESTS)]
            time.sleep(0.6)
            assert not any(future.done() for future in running)
            waiting: list[Any] = []

            def pause_and_ask() -> None:
                pause()
                waiting.extend(pool.submit(ask, n) for n in range(REQUESTS))

            bench.control.pause = pause_and_ask  # type: ignore[method-assign]
            report = bench.publish(bench.b)
            answers = [future.result() for future in [*running, *waiting]]
    finally:
        bench.control.drain_seconds, bench.control.pause = 60.0, pause  # type: ignore[method-assign]
    samples = [sample for sample in answers if sample is not None]
    assert len(answers) == 2 * REQUESTS and (not drain or len(samples) == len(answers))
    assert {v for s in samples for v in s.trace.weight_versions} == {before, report.version}
    block = bench.first.config["block_size"]
    for sample in samples:
        count = len(sample.trace.replay_ids)
        assert len(set(sample.trace.weight_versions)) <= 1
        assert count >= length or (not drain and (not count or (len(sample.trace.prompt_ids) + count) % block == 0))
    cut = sum(len(sample.trace.replay_ids) < length for sample in samples)
    assert (cut > 0) == (drain == 0)
    record_property("cut_short", cut)
    record_property("told_that_they_were_aborted", len(answers) - len(samples))
    record_property("pause_seconds", round(report.seconds["pause"], 3))
    record_property("rest_seconds", round(report.seconds["total"] - report.seconds["pause"], 3))
    bench.serves(bench.b, report.version)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pauses_that_corrupt_block_diffusion_are_refused(bench, mode):
    with pytest.raises(WeightSyncError, match=f"{mode}|400"):
        bench.control.post("/pause_generation", {"mode": mode})
    bench.serves(bench.a)


@pytest.mark.parametrize("fields", [{}, {"extra_key": "a tenant"}], ids=["plain", "extra_key"])
def test_a_prompt_in_the_radix_cache_gives_the_new_tokens(bench, fields):
    """G4; a request with SGLang's extra_key has a cache of its own."""
    prompt = PROMPTS[-1]
    bench.publish(bench.a)
    bench.first.generate(prompt, **fields)
    assert bench.first.generate(prompt, **fields)[1] == 128
    bench.publish(bench.b)
    sample, cached = bench.first.generate(prompt, **fields)
    assert cached == 0 and sample.trace.replay_ids.tolist() == bench.tokens_b[-1]


def test_the_buffer_is_free_as_soon_as_the_engine_has_answered(bench):
    """G5: a producer that overwrites it at once spoils nothing."""

    class Overwriting(CudaIpcTransport):
        def send(self, bucket, spec, engines):
            answers = super().send(bucket, spec, engines)
            bucket.data.fill_(0xA5)
            torch.cuda.synchronize()
            return answers

    publisher = WeightPublisher(bench.publisher.layout, Overwriting(), [bench.control], BUCKET)
    for weights in (bench.b, bench.a, bench.b):
        report = publisher.publish(weights.tensors, bench.version())
        assert report.checksum == weights.checksum
        bench.serves(weights, report.version)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_sglangs_own_update_over_gloo(bench, record_property):
    """G6: the engine's process and this one in one group on one device, through the stock loader."""
    from sglang.srt.utils.common import init_custom_process_group

    port, group = free_port(), "gloo-on-one-gpu"
    named = [(name, tensor.to(bench.publisher.layout.wire[name].dtype)) for name, tensor in bench.b.tensors.items()]
    tensors = list(split_experts(named))
    body = {"group_name": group, "backend": "gloo", "rank_offset": 1, "world_size": 2}
    body |= {"master_address": "127.0.0.1", "master_port": port}
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(bench.control.post, "/init_weights_update_group", body)
        ours = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=group)
        meeting.result()
        version, began = bench.version(), time.perf_counter()
        request = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": group,
            "weight_version": version,
        }
        update = pool.submit(bench.control.post, "/update_weights_from_distributed", request)
        for _, tensor in tensors:
            torch.distributed.broadcast(tensor.contiguous(), 0, group=ours)
        update.result()
    record_property("seconds", round(time.perf_counter() - began, 3))
    record_property("tensors", len(tensors))
    bench.control.post("/destroy_weights_update_group", {"group_name": group})
    bench.serves(bench.b, version)


@pytest.fixture
def receiver(bench) -> Iterator[Any]:
    """Starts a receiver beside ``first``; a publisher to it."""
    started = []

    def start(backend: str, seconds: float) -> WeightPublisher:
        port = free_port()
        command = [sys.executable, "-m", "weight_sync.receiver", "--engine", bench.first.url, "--rank", "1"]
        command += ["--size", "2", "--meet", f"127.0.0.1:{port}", "--backend", backend, "--timeout", str(seconds)]
        started.append(subprocess.Popen(command, cwd=ROOT))
        transport = CollectiveTransport(Channel("127.0.0.1", port, 0, 2, backend, seconds))
        return WeightPublisher(bench.publisher.layout, transport, transport.engines(), BUCKET)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_receiver_over_gloo(bench, receiver):
    publisher = receiver("gloo", 60.0)
    report = publisher.publish(bench.b.tensors, bench.version())
    bench.serves(bench.b, report.version)


def test_two_ranks_of_nccl_on_one_device_are_an_error(bench, receiver, record_property):
    """NCCL refuses two ranks on one GPU: the publisher says so, and the engine serves on."""
    version, began = str(bench.last), time.perf_counter()
    with pytest.raises(WeightSyncError) as failed:
        receiver("nccl", 20.0).publish(bench.b.tensors, bench.version())
    record_property("seconds", round(time.perf_counter() - began, 1))
    record_property("error", str(failed.value)[:300])
    bench.serves(bench.a, version)


def test_a_world_of_one_over_nccl():
    """The exchange itself, with nobody at the other end."""
    channel = Channel("127.0.0.1", 0, 0, 1, "nccl", 30.0)
    data = torch.arange(1 << 20, device="cuda").view(torch.uint8)
    before = data.clone()
    channel.broadcast(data)
    assert torch.equal(data, before)


def test_weights_that_were_released_come_back_by_a_refresh(bench, record_property):
    """G7: the pages come back with garbage, and the next refresh fills all of them; graphs stay valid."""
    free = lambda: torch.cuda.mem_get_info()[0]
    before = free()
    bench.control.release_memory(["kv_cache", "weights"])
    record_property("released_megabytes", (free() - before) >> 20)
    assert free() - before > 100 << 20
    bench.control.resume_memory(["weights"])
    report = bench.publish(bench.b)
    bench.control.resume_memory(["kv_cache"])
    bench.serves(bench.b, report.version)


@pytest.mark.parametrize("way", ["stream", "staged"])
def test_sessions(bench, way, record_property):
    """A streamed session by CUDA IPC and a staged one over HTTP; then the server serves the new version."""
    control, transport = WAYS[way]
    publisher = WeightPublisher(bench.publisher.layout, transport(), [control(bench.first.url)], BUCKET)
    for weights in (bench.b, bench.a, bench.b):
        report = publisher.publish(weights.tensors, bench.version())
        assert report.checksum == weights.checksum
        bench.serves(weights, report.version)
        state = publisher.engines[0].state()
        assert (state["state"], state["version"]) == ("serving", report.version)
    record_property("seconds", {name: round(value, 4) for name, value in report.seconds.items()})


def killed(bench: Bench, way: str, bucket: int) -> None:
    """A trainer that dies by SIGKILL before it sends a bucket of B."""
    arguments = [bench.first.url, bench.b.path, bench.version(), way, bucket]
    command = [sys.executable, "-m", "tests.gpu.engines", *map(str, arguments)]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == -signal.SIGKILL


def given_up(bench: Bench) -> ServiceControl:
    """Ends the session that a dead trainer has left open, which nobody else may write to for a minute."""
    control = ServiceControl(bench.first.url)
    session = control.state()["session"]
    control.abort(session["run_id"], session["version"])
    return control


def test_a_trainer_killed_in_a_staged_update(bench):
    """G9: the engine answers with the old version, whole."""
    version = str(bench.last)
    killed(bench, "staged", 3)
    assert bench.first.versions(PROMPTS[0]) == {version}
    control = given_up(bench)
    bench.serves(bench.a, version)
    publisher = WeightPublisher(bench.publisher.layout, HttpTransport(), [control], BUCKET)
    report = publisher.publish(bench.b.tensors, bench.version())
    bench.serves(bench.b, report.version)


@pytest.mark.parametrize("bucket", [0, 3])
def test_a_trainer_killed_in_an_update_by_ipc(bench, bucket):
    """G9, without a staging area: before its first byte the weights are whole, later a mixture; nobody is served
    until another trainer has sent everything."""
    killed(bench, "engine", bucket)
    assert (bench.control.checksum() == bench.a.checksum) == (bucket == 0)
    assert bench.first.closed(PROMPTS[0])
    report = bench.publish(bench.b)
    bench.serves(bench.b, report.version)


def test_two_engines_by_one_publisher_and_one_killed_before_its_commit(bench, record_property):
    """N3 on one device. ``second`` is gone afterwards."""
    other = EngineControl(bench.second.url, timeout=30)
    publisher = WeightPublisher(bench.publisher.layout, CudaIpcTransport(), [bench.control, other], BUCKET)
    seconds = []
    for weights, tokens in ((bench.b, bench.tokens_b), (bench.a, bench.tokens_a), (bench.b, bench.tokens_b)):
        report = publisher.publish(weights.tensors, bench.version())
        seconds.append(round(report.seconds["total"], 4))
        assert report.checksum == weights.checksum == bench.control.checksum() == other.checksum()
        for server in (bench.first, bench.second):
            assert server.greedy(PROMPTS) == tokens and server.versions(PROMPTS[0]) == {report.version}
    record_property("seconds", seconds)

    class Doomed(EngineControl):
        def commit(self, *arguments: Any) -> None:
            bench.second.kill()
            super().commit(*arguments)

    doomed = Doomed(bench.second.url, timeout=30)
    publisher.engines[1] = doomed
    version, began = bench.version(), time.perf_counter()
    with pytest.raises(EngineFailed) as failed:
        publisher.publish(bench.a.tensors, version)
    record_property("seconds_until_the_error", round(time.perf_counter() - began, 2))
    assert failed.value.stage == "commit"
    assert failed.value.lost == (doomed.url,) and failed.value.committed == (bench.first.url,)
    bench.serves(bench.a, version)
    report = publisher.publish(bench.b.tensors, bench.version())
    bench.serves(bench.b, report.version)


def test_a_trainer_killed_in_a_streamed_session(bench):
    """The server says what it is; without the dead writer's session the next one mends it."""
    killed(bench, "stream", 3)
    control = StreamControl(bench.first.url)
    state = control.state()
    assert state["state"] == "fenced" and not state["admits"]
    refused = bench.first.post(PROMPTS[0], 4, 0.0, 0)
    assert refused.status_code == 503 and "Retry-After" in refused.headers
    given_up(bench)
    assert control.state()["state"] == "broken"
    publisher = WeightPublisher(bench.publisher.layout, CudaIpcTransport(), [control], BUCKET)
    report = publisher.publish(bench.b.tensors, bench.version())
    bench.serves(bench.b, report.version)
    assert control.state()["state"] == "serving"
