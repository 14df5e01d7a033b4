"""Weight refresh, SGLang's own and ours side by side: bytes, seconds by stage, GB/s.

    python -m recipes.bench_weight_sync --device cpu --names-only          # the loaders alone, on all names of a config
    python -m recipes.bench_weight_sync --device cuda --json refresh.json  # a running engine of the config's full size
    python -m recipes.bench_weight_sync --device cpu --tiny                # the same steps with a tiny engine

The engine starts with dummy weights; the trainer is this process, with random weights on the same device. Every stage
that ends is written to the file at once; a stage that fails is reported, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dllm.config import ConfigError
from weight_sync.layout import CheckpointLayout

DEFAULT_CONFIG = Path(__file__).parents[1] / "tests" / "data" / "llada2_mini_config.json"

NARROW: dict[str, Any] = dict(
    hidden_size=32,
    moe_intermediate_size=8,
    intermediate_size=16,
    vocab_size=64,
    head_dim=8,
    rotary_dim=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=1,
    mask_token_id=63,
)
"""All layers and experts of a config, and next to no bytes."""


def read_config(path: Path) -> dict[str, Any]:
    """A config.json that an engine can start from alone.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"--config {str(path)!r} does not exist; name the config.json of a LLaDA2 or SDAR checkpoint")
    config = json.loads(path.read_text())
    config.pop("auto_map", None)
    known = {"block_size": 32, "mask_token_id": config["vocab_size"] - 1, "eos_token_id": 1}
    return known | config


def random_weights(layout: CheckpointLayout, device: str, seed: int) -> dict[str, Tensor]:
    """Trainer's tensors, experts fused per layer: normal with a standard deviation of 0.02, norms 1."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, spec in layout.wire.items():
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        weights[name] = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02, generator=generator)
    return weights


class Results:
    """What has been measured so far; in a file, if one was named, after every stage."""

    def __init__(self, file: Path | None, **about: Any) -> None:
        self.file, self.values, self.started = file, dict(about), time.monotonic()

    def stage(self, name: str, measure: Callable[[], Any]) -> Any:
        """Run a stage; None and a record of the error if it fails."""
        began = time.monotonic()
        try:
            value = measure()
        except Exception as error:
            traceback.print_exc()
            value, self.values[name] = None, {"error": f"{type(error).__name__}: {error}"[:2000]}
        else:
            self.values[name] = value
        print(f"[{time.monotonic() - self.started:6.1f} s] {name} ({time.monotonic() - began:.1f} s)", file=sys.stderr)
        if self.file is not None:
            self.file.write_text(json.dumps(self.values, indent=1) + "\n")
        return value


def names_only(config: dict[str, Any], device: str, repeats: int = 5) -> dict[str, Any]:
    """Seconds that SGLang's loader and ours spend on one full set of tensors with next to no bytes.

    Both fill the same model of SGLang's. Ours includes the checksums of the buckets, reading everything back, and the
    comparison with the sender's checksum.
    """
    from dllm.models.checkpoint import split_experts
    from rollout.plugin.bare_model import build_model
    from weight_sync import loader
    from weight_sync.buckets import fill_buckets
    from weight_sync.checksum import TensorSums, wire_checksum
    from weight_sync.messages import BucketSpec, Commit, Manifest

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config | NARROW))
        model = build_model(directory, device)
    layout = CheckpointLayout.from_config(config | NARROW, next(model.parameters()).dtype)
    weights = random_weights(layout, device, 0)
    per_expert = list(split_experts(weights.items()))
    sums = TensorSums()
    for name, tensor in weights.items():
        sums.add(name, tensor)
    checksum = f"{sums.value():016x}"
    whole = layout.largest_bucket(1 << 40)
    [bucket] = fill_buckets(layout.normalise(weights.items()), whole)
    manifest = Manifest("bench", "1", layout.tensors(), layout.nbytes)
    wire = wire_checksum(bucket.data, bucket.placements)
    spec = BucketSpec("bench", "1", 0, True, bucket.placements, wire, nbytes=bucket.data.numel())
    empty = torch.empty(0, dtype=torch.uint8)

    def say(header: str, data: Tensor) -> None:
        loader.load(model, [(header, data)])
        good, message = loader.answer([loader.STATE.status])
        assert good, message

    def stock() -> None:
        model.load_weights(iter(per_expert))

    def ours() -> None:
        say(manifest.encode(), empty)
        say(spec.encode(), bucket.data)
        say(Commit("bench", "1", checksum).encode(), empty)

    def best(load: Callable[[], None]) -> float:
        seconds = []
        for _ in range(repeats):
            for parameter in model.parameters():
                parameter.data.fill_(-1)
            began = time.perf_counter()
            load()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    began = time.perf_counter()
    loader.target_of(model)
    planned = time.perf_counter() - began
    stock_seconds = best(stock)
    held = [parameter.detach().clone() for parameter in model.parameters()]
    our_seconds = best(ours)
    return {
        "names": len(per_expert),
        "tensors_on_the_wire": len(weights),
        "parameters": len(held),
        "stock_seconds": stock_seconds,
        "our_seconds": our_seconds,
        "speedup": stock_seconds / our_seconds,
        "planning_seconds_once": planned,
        "same_weights": all(torch.equal(a, b.detach()) for a, b in zip(held, model.parameters(), strict=True)),
    }


def show(results: dict[str, Any], console: Console) -> None:
    """One row per figure, stage by stage."""
    for name, values in results.items():
        if not isinstance(values, dict):
            continue
        table = Table(title=name, title_justify="left", show_header=False)
        for key, value in values.items():
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="config.json of the model")
    parser.add_argument("--names-only", action="store_true", help="the loaders alone, without an engine")
    parser.add_argument("--tiny", action="store_true", help="a tiny network instead of the config's sizes")
    parser.add_argument("--bucket-mb", type=int, help="size of our buckets (default: 5120, 1 with --tiny)")
    parser.add_argument("--refreshes", type=int, default=50, help="how many follow each other (default: 50)")
    parser.add_argument("--requests", type=int, default=64, help="how many run during a refresh (default: 64)")
    parser.add_argument("--sessions", action="store_true", help="a rollout server, by streamed weight sessions")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    results = Results(arguments.json, device=arguments.device, torch=torch.__version__)
    try:
        config = read_config(arguments.config)
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device=cuda: torch finds no GPU here; use --device cpu")
        if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
            raise ConfigError(f"--json={arguments.json}: its directory does not exist; make it first")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.names_only:
        results.stage("loader pass", lambda: names_only(config, arguments.device))
    else:
        from recipes.bench_weight_engine import measure_engine

        measure_engine(results, arguments, config)
    show(results.values, Console(width=110))
    return int(any(isinstance(value, dict) and "error" in value for value in results.values.values()))


if __name__ == "__main__":
    sys.exit(main())
