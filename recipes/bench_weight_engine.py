"""The stages of ``recipes.bench_weight_sync`` that need a running engine."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from dllm.decoding import SamplingParams
from dllm.models.checkpoint import split_experts
from recipes.bench_weight_sync import Results, random_weights
from recipes.server_process import ServerProcess
from recipes.tiny import TinyShape
from recipes.tiny import hf_config as tiny_config
from recipes.tokenizer import build_tokenizer, save_tokenizer
from rollout.records import RolloutSample, sample_from_response
from weight_sync.client import StreamControl
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import SyncReport
from weight_sync.publisher import WeightPublisher
from weight_sync.transports import Transport
from weight_sync.transports.ipc import CudaIpcTransport
from weight_sync.transports.shm import SharedMemoryTransport

START_SECONDS = 240


class BenchEngine:
    """An HTTP server with dummy weights.

    Args:
        directory: gets the model directory (config and tokenizer) and the log.
        module: ``sglang.launch_server``, or ``rollout.server`` with its weight sessions.
        more: further flags of the server.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        tokenizer: Any,
        device: str,
        requests: int,
        module: str,
        **more: Any,
    ) -> None:
        self.config = config
        (directory / "config.json").write_text(json.dumps(config))
        save_tokenizer(tokenizer, directory)
        flags = {
            "model-path": directory,
            "load-format": "dummy",
            "dllm-algorithm": "SelectThenSample",
            "grammar-backend": "none",
            "device": device,
            "dtype": config["dtype"],
            "max-running-requests": requests,
            "log-level": "warning",
            "skip-server-warmup": None,
        }
        if device == "cuda":
            flags |= {"mem-fraction-static": 0.6, "cuda-graph-max-bs": requests}
        flags |= {name.replace("_", "-"): value for name, value in more.items()}
        self.server = ServerProcess(module, flags, directory / "engine.log", START_SECONDS)
        self.url = self.server.url
        self.client = httpx.Client(
            base_url=self.url, timeout=300, limits=httpx.Limits(max_connections=4 * requests + 8)
        )

    def generate(self, prompt: list[int], tokens: int, seed: int = 0, temperature: float = 0.0) -> RolloutSample:
        sampling = SamplingParams(temperature)
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": prompt, "sampling_params": params}
        while (answer := self.client.post("/generate", json=body)).status_code == 503:
            # A rollout server turns requests away while its weights are exchanged.
            time.sleep(float(answer.headers["Retry-After"]))
        if answer.status_code != 200:
            raise RuntimeError(f"/generate answered {answer.status_code}: {answer.text[:500]}")
        return sample_from_response(answer.json(), prompt, self.config["block_size"], sampling, tokens, seed)

    def close(self) -> None:
        self.server.close()
        self.client.close()


def model_of(config: dict[str, Any], tiny: bool) -> tuple[dict[str, Any], Any]:
    """The config to start with, a tiny one on demand, and a tokenizer."""
    tokenizer = build_tokenizer(["State the final answer to the following arithmetic problem: 26 + 53 ="])
    if tiny:
        config = tiny_config(TinyShape(), tokenizer)
        config.pop("auto_map", None)
    return config, tokenizer


def measure_engine(results: Results, arguments: Namespace, config: dict[str, Any]) -> None:
    """All stages, on one engine."""
    config, tokenizer = model_of(config, arguments.tiny)
    device, tiny = arguments.device, arguments.tiny
    with tempfile.TemporaryDirectory() as directory:
        module = "rollout.server" if arguments.sessions else "sglang.launch_server"
        engine = BenchEngine(Path(directory), config, tokenizer, device, arguments.requests, module)
        try:
            began = time.monotonic()
            layout = CheckpointLayout.from_config(config, getattr(torch, config["dtype"]))
            weights = random_weights(layout, device, 0)
            results.stage("device", lambda: device_speeds(weights))

            def start() -> dict[str, Any]:
                engine.server.wait()
                return {"start_seconds": time.monotonic() - began, "config": "tiny" if tiny else arguments.config.name}

            if results.stage("engine", start) is None:
                print(engine.server.tail(), file=sys.stderr)
                return
            transport = transport_for(device)
            bucket = (arguments.bucket_mb or (1 if tiny else 5120)) << 20
            control = EngineControl(engine.url, timeout=60)
            by_session = [StreamControl(engine.url)] if arguments.sessions else None
            publisher = WeightPublisher(layout, transport, by_session or [control], bucket)
            stages: list[tuple[str, Callable[[], Any]]] = [
                ("ours", lambda: ours(publisher, weights, bucket)),
                ("bucket sizes", lambda: bucket_sizes(control, layout, weights, device, bucket)),
                ("stock", lambda: stock(control, weights, device)),
                ("tokens follow the weights", lambda: tokens_follow(engine, publisher, layout, weights, device)),
                ("under load", lambda: under_load(engine, publisher, weights, arguments.requests, tiny)),
                ("one after another", lambda: repeated(publisher, weights, arguments.refreshes, device)),
            ]
            for name, measure in stages:
                if results.stage(name, measure) is None:
                    print(engine.server.tail(), file=sys.stderr)
            publisher.close()
        finally:
            engine.close()


def transport_for(device: str) -> Transport:
    return CudaIpcTransport() if device == "cuda" else SharedMemoryTransport()


def bucket_sizes(
    control: EngineControl, layout: CheckpointLayout, weights: dict[str, Tensor], device: str, largest: int
) -> dict[str, Any]:
    """Seconds from pause to resume, and of them the transfer, with smaller buckets."""
    seconds = {}
    for size in (largest // 5, 2 * largest // 5, 3 * largest // 5, largest):
        transport = transport_for(device)
        publisher = WeightPublisher(layout, transport, [control], size)
        reports = [publisher.publish(weights, str(20 + i)) for i in range(4)][1:]
        transport.close()
        if device == "cuda":
            torch.cuda.empty_cache()
        stream, total = (min(report.seconds[name] for report in reports) for name in ("stream", "total"))
        seconds[f"{size >> 20} MiB, {reports[0].buckets} buckets"] = f"{total:.3f} s, of it stream {stream:.3f} s"
    return seconds


def device_speeds(weights: dict[str, Tensor]) -> dict[str, float]:
    """Copy and checksum of one large tensor in this process, in 1e9 bytes per second (read once, written once)."""
    from weight_sync.checksum import box_sum

    tensor = max(weights.values(), key=lambda t: t.nbytes)
    other = torch.empty_like(tensor)
    speeds = {}
    for name, call in (("copy", lambda: other.copy_(tensor)), ("checksum", lambda: box_sum(tensor))):
        call()
        synchronize(tensor)
        began = time.perf_counter()
        for _ in range(5):
            call()
        synchronize(tensor)
        speeds[f"{name}_gb_per_s"] = 5 * tensor.nbytes / 1e9 / (time.perf_counter() - began)
    return speeds


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def stock(control: EngineControl, weights: dict[str, Tensor], device: str) -> dict[str, Any]:
    """SGLang's own flattened buckets, one per layer, per-expert names; the second of two passes.

    Not checked by anyone: a name that the engine does not know is skipped, and success is reported.
    """
    from rollout.plugin.bare_model import flattened_bucket

    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        groups.setdefault(".".join(parts[:3]) if "layers" in parts else "rest", []).append((name, tensor))
    seconds: dict[str, float] = {}
    for _ in range(2):
        seconds = {"build": 0.0, "update": 0.0}
        for named in groups.values():
            began = time.perf_counter()
            payload = flattened_bucket(list(split_experts(named)))
            if device == "cuda":
                torch.cuda.synchronize()
            built = time.perf_counter()
            body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": False}
            control.post("/update_weights_from_tensor", body)
            seconds["build"] += built - began
            seconds["update"] += time.perf_counter() - built
    if device == "cuda":
        flattened_bucket.alive = None  # type: ignore[attr-defined]
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    total = sum(seconds.values())
    return {
        "buckets": len(groups),
        "gigabytes": nbytes / 1e9,
        "build_seconds": seconds["build"],
        "update_seconds": seconds["update"],
        "total_seconds": total,
        "gb_per_s": nbytes / 1e9 / total,
    }


def ours(publisher: WeightPublisher, weights: dict[str, Tensor], bucket: int, repeats: int = 5) -> dict[str, Any]:
    """Our refresh of the same weights, verification on; the median of several after one that compiles."""
    first = publisher.publish(weights, "1")
    reports = [publisher.publish(weights, str(2 + i)) for i in range(repeats)]
    result: dict[str, Any] = {"buckets": first.buckets, "bucket_bytes": bucket, "gigabytes": first.nbytes / 1e9}
    for stage in first.seconds:
        result[f"{stage}_seconds"] = statistics.median(report.seconds[stage] for report in reports)
    result["best_stream_seconds"] = min(report.seconds["stream"] for report in reports)
    result["best_total_seconds"] = min(report.seconds["total"] for report in reports)
    result["first_total_seconds"] = first.seconds["total"]
    result["stream_gb_per_s"] = first.nbytes / 1e9 / result["stream_seconds"]
    result["gb_per_s"] = first.nbytes / 1e9 / result["total_seconds"]
    result["checksum"] = first.checksum
    assert len({report.checksum for report in reports}) == 1
    return result


def tokens_follow(
    engine: BenchEngine, publisher: WeightPublisher, layout: CheckpointLayout, weights: dict[str, Tensor], device: str
) -> dict[str, Any]:
    """Greedy tokens of a prompt that sits in the radix cache, under weights A, B and A again."""
    prompt = [6 + 7 * i % 50 for i in range(3 * engine.config["block_size"])]
    # A router and a norm suffice to make another model, and cost no second copy of the rest.
    changed = dict(weights)
    for name in weights:
        if name.endswith(("mlp.gate.weight", "norm.weight")):
            changed[name] = weights[name] * (1 + 0.5 * torch.randn_like(weights[name].float())).to(weights[name].dtype)
    tokens, versions = [], []
    for version, named in (("100", weights), ("101", changed), ("102", weights)):
        publisher.publish(named, version)
        samples = [engine.generate(prompt, 2 * engine.config["block_size"]) for _ in range(2)]
        tokens.append(samples[-1].trace.replay_ids.tolist())
        versions.append(sorted({v for sample in samples for v in sample.trace.weight_versions}))
    return {
        "same_again": tokens[0] == tokens[2],
        "others_with_other_weights": tokens[0] != tokens[1],
        "versions": str(versions),
    }


def under_load(
    engine: BenchEngine, publisher: WeightPublisher, weights: dict[str, Tensor], requests: int, tiny: bool
) -> dict[str, Any]:
    """A refresh while ``requests`` clients keep the engine busy, two requests each."""
    length = (1 if tiny else 3) * engine.config["block_size"]

    def client(number: int) -> list[RolloutSample]:
        prompt = [6 + (7 * i + number) % 50 for i in range(20 + number % 30)]
        return [engine.generate(prompt, length, seed=number, temperature=1.0) for _ in range(2)]

    with ThreadPoolExecutor(requests) as pool:
        began = time.perf_counter()
        running = [pool.submit(client, number) for number in range(requests)]
        time.sleep(0.5)
        report: SyncReport = publisher.publish(weights, "200")
        samples = [sample for future in running for sample in future.result()]
        seconds = time.perf_counter() - began
    whole = [s for s in samples if len(s.trace.replay_ids) >= length]
    mixed = [s for s in samples if len(set(s.trace.weight_versions)) > 1]
    return {
        "requests": len(samples),
        "complete": len(whole),
        "of_two_versions": len(mixed),
        "after_the_refresh": sum(set(s.trace.weight_versions) == {"200"} for s in samples),
        "pause_seconds": report.seconds["pause"],
        "total_without_pause_seconds": report.seconds["total"] - report.seconds["pause"],
        "all_seconds": seconds,
    }


def repeated(publisher: WeightPublisher, weights: dict[str, Tensor], count: int, device: str) -> dict[str, Any]:
    """Many refreshes: seconds, and the device memory in use by all processes after the first and the last."""
    used, seconds = [], []
    for i in range(count):
        seconds.append(publisher.publish(weights, str(1000 + i)).seconds["total"])
        if device == "cuda" and i in (0, count - 1):
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used.append((total - free) / 1e6)
    result: dict[str, Any] = {"refreshes": count, "median_seconds": statistics.median(seconds), "max": max(seconds)}
    if used:
        result |= {"megabytes_after_first": used[0], "megabytes_after_last": used[-1], "growth": used[-1] - used[0]}
    return result
