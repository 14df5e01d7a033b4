"""Push a checkpoint into a running server.

    python -m weight_sync.push --engine http://127.0.0.1:30000 --model-path DIR --version 17

Reads ``config.json`` and the headers of the weights first, and refuses what the engine cannot take before a byte of
them moves. The server goes on with its old weights until everything has arrived and was verified. A push that was
interrupted goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from dllm.config import ConfigError, load_hf_config
from dllm.models import meta_model
from weight_sync.buckets import fill_buckets
from weight_sync.checksum import host_checksum
from weight_sync.client import ServiceControl
from weight_sync.layout import CheckpointLayout, LayoutError
from weight_sync.messages import VERSION_DIGITS, BucketSpec, Manifest, ResendError, WeightSyncError
from weight_sync.transports.directory import headers, tensors, verify, weight_files

ATTEMPTS = 3
"""How often what arrives damaged is sent."""


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    Attributes:
        sent: bytes that travelled; fewer than ``nbytes`` if an earlier push had sent some.
    """

    version: str
    checksum: str
    nbytes: int
    sent: int
    seconds: float


def push(
    server: ServiceControl,
    model_path: str | Path,
    version: int,
    bucket_bytes: int = 256 << 20,
    shared: bool = False,
) -> Pushed:
    """Exchange a server's weights for those of a checkpoint; on return it serves them as ``version``.

    Args:
        bucket_bytes: size of a request at most.
        shared: the server reads the directory itself.

    Raises:
        ConfigError: ``model_path`` is not a checkpoint of a known model.
        LayoutError: its tensors are not those that its config.json promises.
        WeightSyncError: the server refused, cannot be reached, or holds other weights than were sent.
    """
    began = time.perf_counter()
    path = Path(model_path)
    # What a file can be refused for by itself, before the server is asked.
    model = meta_model(load_hf_config(path), path / "config.json")
    verify(path)
    weight_files(path)
    state = server.state()
    layout = CheckpointLayout(model, getattr(torch, state["dtype"]))
    # An engine that loads a checkpoint with a 16-bit router has it rounded as well.
    layout.check(headers(path), rounded_router=True)
    manifest = Manifest(run_id(path, bucket_bytes), str(version), layout.tensors(), layout.nbytes)
    sent = 0
    try:
        for attempt in range(1, ATTEMPTS + 1):
            missing = server.open(manifest)
            if missing is None:
                break
            try:
                if shared:
                    checksum = server.send_directory(manifest.run_id, manifest.version, path)
                else:
                    sent += send(server, path, layout, manifest, missing, bucket_bytes)
                    checksum = server.prepare(manifest.run_id, manifest.version)
                server.commit(manifest.run_id, manifest.version, checksum)
                break
            except ResendError:
                # The server has forgotten what was damaged, and asks for it.
                if attempt == ATTEMPTS:
                    raise
    except (LayoutError, WeightSyncError):
        with suppress(WeightSyncError):
            server.abort(manifest.run_id, manifest.version)
        raise
    state = server.state()
    if (state["state"], state["version"]) != ("serving", manifest.version):
        raise WeightSyncError(f"server {server.url} is {state['state']} with version {state['version']}")
    return Pushed(manifest.version, str(state["checksum"]), layout.nbytes, sent, time.perf_counter() - began)


def send(
    server: ServiceControl,
    path: Path,
    layout: CheckpointLayout,
    manifest: Manifest,
    missing: list[int],
    bucket_bytes: int,
) -> int:
    """Send the buckets that the server lacks; their bytes."""
    total = 0
    beyond = max(missing, default=sys.maxsize)
    named = layout.normalise(tensors(path), rounded_router=True)
    for bucket in fill_buckets(named, bucket_bytes, capacity=layout.largest_bucket(bucket_bytes)):
        if not missing or (bucket.index < beyond and bucket.index not in missing):
            continue
        spec = BucketSpec(manifest.run_id, manifest.version, bucket.index, bucket.last, bucket.placements)
        spec.checksum, spec.nbytes = host_checksum(bucket.data), bucket.data.numel()
        server.put_bucket(spec, bucket.data)
        total += spec.nbytes
    return total


def run_id(path: Path, bucket_bytes: int) -> str:
    """The same for the same files and buckets, so that an interrupted push goes on."""
    listed: list[Any] = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in weight_files(path)]
    return "push-" + xxhash.xxh3_64_hexdigest(repr((str(path.absolute()), bucket_bytes, listed)).encode())


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m weight_sync.push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--engine", required=True, metavar="URL", help="address of a `python -m rollout.server`")
    p.add_argument("--model-path", required=True, metavar="DIR", help="Hugging Face checkpoint directory")
    p.add_argument("--version", required=True, type=int, help="number of these weights; larger than the served one")
    p.add_argument("--admin-api-key", metavar="K", help="the server's --admin-api-key")
    p.add_argument("--shared", action="store_true", help="the server reads DIR itself, from a shared file system")
    p.add_argument("--bucket-mib", type=int, default=256, help="size of a request (default 256)")
    p.add_argument("--drain-seconds", type=float, default=60.0, help="time for running requests to end (default 60)")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds until a call is given up (default 300)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if not 0 <= args.version < 10**VERSION_DIGITS:
            raise ConfigError(f"--version={args.version}: use a number from 0, of {VERSION_DIGITS} digits at most")
        if args.bucket_mib < 1:
            raise ConfigError(f"--bucket-mib={args.bucket_mib}: use 1 at least")
        server = ServiceControl(args.engine, args.admin_api_key, args.timeout, args.drain_seconds)
        made = push(server, args.model_path, args.version, args.bucket_mib << 20, args.shared)
    except (ConfigError, LayoutError, WeightSyncError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rate = made.nbytes / made.seconds / 1e9
    print(
        f"version {made.version}: {made.nbytes:,} bytes in {made.seconds:.2f} s ({rate:.2f} GB/s), {made.sent:,} sent"
    )
    print(f"checksum {made.checksum}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
