"""Weight refresh from one device to an engine on another: our broadcast and point to point, and SGLang's own update.

    python -m recipes.bench_weight_remote --json two_gpus.json                   # trainer on GPU 0, engine on GPU 1
    python -m recipes.bench_weight_remote --tp-size 2 --json two_gpus_tp2.json   # engine on GPUs 1 and 2
    python -m recipes.bench_weight_remote --device cpu --tiny                    # the same steps over gloo

The engine starts with dummy weights; the trainer is this process, with random weights. A receiver beside the engine
takes ours while the engine serves, and closes it to hand over what has arrived: ``stream`` is the first, ``finish`` the
second. SGLang's own update closes it from the first byte to the last. Every stage that ends is written to the file at
once.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dllm.config import ConfigError
from dllm.models.checkpoint import split_experts
from recipes.bench_weight_engine import BenchEngine, model_of
from recipes.bench_weight_sync import DEFAULT_CONFIG, Results, random_weights, read_config, show
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout
from weight_sync.publisher import WeightPublisher
from weight_sync.transports.collective import Channel, CollectiveTransport

SECONDS = 300.0
"""After which an exchange is given up."""


@contextmanager
def receiver(engine: BenchEngine, channel: Channel, gpu: int | None, tp_size: int) -> Iterator[None]:
    """A receiver beside the engine, on its first GPU."""
    command = [sys.executable, "-m", "weight_sync.receiver", "--engine", engine.url, "--tp-size", str(tp_size)]
    command += ["--meet", f"127.0.0.1:{channel.port}", "--rank", "1", "--size", "2"]
    command += ["--backend", channel.backend, "--timeout", str(SECONDS)]
    # The engine's first GPU is the receiver's own.
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpu, gpu + tp_size)))}
    process = subprocess.Popen(command, env=os.environ | visible)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def ours(
    engine: BenchEngine,
    arguments: argparse.Namespace,
    layout: CheckpointLayout,
    weights: dict[str, Tensor],
    apart: bool,
) -> dict[str, Any]:
    """Our refresh through a receiver, verification on; medians after a first one that makes the group."""
    channel = Channel("127.0.0.1", 0, 0, 2, arguments.backend, SECONDS)
    bucket = arguments.bucket_mb << 20
    with receiver(engine, channel, arguments.gpu, arguments.tp_size):
        transport = CollectiveTransport(channel, point_to_point=apart)
        publisher = WeightPublisher(layout, transport, transport.engines(), bucket)
        first, *reports = [publisher.publish(weights, f"{'p' if apart else 'b'}{i}") for i in range(5)]
        publisher.close()
        seconds = {name: statistics.median(report.seconds[name] for report in reports) for name in first.seconds}
    return {
        "buckets": first.buckets,
        "bucket_bytes": bucket,
        "gigabytes": first.nbytes / 1e9,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "first_total_seconds": first.seconds["total"],
        "transfer_gb_per_s": first.nbytes / 1e9 / seconds["transfer"],
        "closed_seconds": seconds["finish"] + seconds["resume"],
        "checksum": first.checksum,
    }


def stock(control: EngineControl, weights: dict[str, Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """SGLang's update from a process group, one request a layer, per-expert names; the second of two passes."""
    from rollout.plugin.bare_model import join_update_group

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group, world = "bench", 1 + arguments.tp_size
    meet = {"group_name": group, "backend": arguments.backend, "rank_offset": 1, "world_size": world}
    layers: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in weights.items():
        layers.setdefault(".".join(name.split(".")[:3]) if "layers" in name else "rest", []).append((name, tensor))
    parts = [list(split_experts(named)) for named in layers.values()]
    with ThreadPoolExecutor(1) as pool:
        address = {"master_address": "127.0.0.1", "master_port": port}
        meeting = pool.submit(control.post, "/init_weights_update_group", meet | address)
        there = f"tcp://127.0.0.1:{port}"
        here = join_update_group(there, group, world, arguments.backend)
        meeting.result()
        total = 0.0
        for _ in range(2):
            began = time.perf_counter()
            for tensors in parts:
                request = {
                    "names": [name for name, _ in tensors],
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                    "shapes": [list(tensor.shape) for _, tensor in tensors],
                    "group_name": group,
                    "flush_cache": False,
                }
                update = pool.submit(control.post, "/update_weights_from_distributed", request)
                for _, tensor in tensors:
                    torch.distributed.broadcast(tensor.contiguous(), 0, group=here)
                update.result()
            total = time.perf_counter() - began
    control.post("/destroy_weights_update_group", {"group_name": group})
    torch.distributed.destroy_process_group(here)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    tensors_sent = sum(len(tensors) for tensors in parts)
    return {"tensors": tensors_sent, "total_seconds": total, "gb_per_s": nbytes / 1e9 / total, "closed_seconds": total}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: there are not as many GPUs as are named.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="config.json of the model")
    parser.add_argument("--tiny", action="store_true", help="a tiny network instead of the config's sizes")
    parser.add_argument("--tp-size", type=int, default=1, help="tensor-parallel ranks of the engine, on GPUs 1, 2, …")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl on GPUs")
    parser.add_argument("--bucket-mb", type=int, help="size of our buckets (default: 1024, 1 with --tiny)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(argv)
    cuda = arguments.device == "cuda"
    arguments.backend = arguments.backend or ("nccl" if cuda else "gloo")
    arguments.bucket_mb = arguments.bucket_mb or (1 if arguments.tiny else 1024)
    arguments.gpu = 1 if cuda else None
    if arguments.tp_size < 1 or arguments.bucket_mb < 1:
        raise ConfigError(f"--tp-size={arguments.tp_size} --bucket-mb={arguments.bucket_mb}: use 1 at least")
    if not cuda and arguments.backend == "nccl":
        raise ConfigError("--backend=nccl needs GPUs; use gloo with --device cpu")
    if cuda and (found := torch.cuda.device_count()) < 1 + arguments.tp_size:
        raise ConfigError(
            f"--tp-size={arguments.tp_size} takes {1 + arguments.tp_size} GPUs with the trainer's, this host has "
            f"{found}; for trainer and engine on one GPU there is recipes.bench_weight_sync"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = parse(argv)
        config, tokenizer = model_of(read_config(arguments.config), arguments.tiny)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    results = Results(arguments.json, device=name, backend=arguments.backend, tp_size=arguments.tp_size)
    more = {"tp_size": arguments.tp_size} | ({"base_gpu_id": arguments.gpu} if arguments.gpu is not None else {})
    with tempfile.TemporaryDirectory() as directory:
        engine = BenchEngine(Path(directory), config, tokenizer, arguments.device, 8, "sglang.launch_server", **more)
        try:
            layout = CheckpointLayout.from_config(config, getattr(torch, config["dtype"]))
            weights = random_weights(layout, arguments.device, 0)
            began = time.monotonic()

            def start() -> dict[str, Any]:
                engine.server.wait()
                return {"start_seconds": time.monotonic() - began}

            if results.stage("engine", start) is not None:
                control = EngineControl(engine.url, arguments.tp_size, timeout=SECONDS)
                results.stage("broadcast", lambda: ours(engine, arguments, layout, weights, apart=False))
                results.stage("point to point", lambda: ours(engine, arguments, layout, weights, apart=True))
                results.stage("stock", lambda: stock(control, weights, arguments))
            if any(isinstance(value, dict) and "error" in value for value in results.values.values()):
                print(engine.server.tail(), file=sys.stderr)
        finally:
            engine.close()
    show(results.values, Console())
    return 1 if any(isinstance(value, dict) and "error" in value for value in results.values.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
