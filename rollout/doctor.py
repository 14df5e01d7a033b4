"""``python -m rollout.doctor``: versions, the machine, and which published models an engine can serve on it.

Starts nothing and loads no model. Ends with 0 if an engine can run here, else with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.backends import GRAPH_ATTENTION, default_device
from rollout.memory import device_memory_bytes, estimate
from rollout.published import PUBLISHED
from rollout.versions import Version, python_fits, versions

RUNNING = 64
"""Requests decoded together that a model must have room for."""

TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Gpu:
    """A visible GPU; memory in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True)
class Machine:
    """What an engine finds here.

    Attributes:
        device: what an engine would run on.
        memory: of the host, in bytes.
    """

    python: str
    system: str
    cores: int
    memory: int
    device: str
    gpus: list[Gpu]


def visible_gpus() -> list[Gpu]:
    """GPUs of this host, read without a CUDA context; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total), driver) for h in handles
        ]
    except pynvml.NVMLError:
        return []


def machine() -> Machine:
    """This host."""
    return Machine(
        platform.python_version(),
        platform.platform(terse=True),
        len(os.sched_getaffinity(0)),
        device_memory_bytes("cpu"),
        default_device(),
        visible_gpus(),
    )


def least_gpus(name: str, total: int, count: int, running: int = RUNNING) -> int | None:
    """GPUs of ``total`` bytes that a published model needs in tensor parallelism; None if ``count`` are too few."""
    model = PUBLISHED[name]
    heads = int(model.config["num_attention_heads"])
    for tp_size in (n for n in TENSOR_PARALLEL if n <= count and heads % n == 0):
        made = estimate(model.config, total, running=running, block_size=model.block_size, tp_size=tp_size)
        if made.kv_tokens >= made.kv_tokens_needed:
            return tp_size
    return None


def verdicts(host: Machine) -> dict[str, str]:
    """What can run here, by name of the model."""
    if not host.gpus or host.device == "cpu":
        return {"tiny models": "on the CPU, in fp32"} | dict.fromkeys(PUBLISHED, "needs a GPU")
    total = min(gpu.memory for gpu in host.gpus)
    needed = {name: least_gpus(name, total, len(host.gpus)) for name in PUBLISHED}
    return {"tiny models": "on one GPU"} | {
        name: f"tp_size={n} with {RUNNING} running requests, {GRAPH_ATTENTION} and CUDA graphs"
        if n
        else f"does not fit {len(host.gpus)} x {total / 1e9:.0f} GB"
        for name, n in needed.items()
    }


def as_dict(host: Machine, found: Sequence[Version]) -> dict[str, Any]:
    """Everything for machines."""
    return {
        "ok": is_fit(found),
        "machine": asdict(host),
        "versions": [version.as_dict() for version in found],
        "models": verdicts(host),
    }


def is_fit(found: Sequence[Version]) -> bool:
    """Whether an engine can run with these versions."""
    return python_fits() and all(version.fits or not version.needed for version in found)


def show(host: Machine, found: Sequence[Version], console: Console) -> None:
    """Print versions, the machine and the verdicts."""
    gpus = ", ".join(f"{gpu.name} {gpu.memory / 1e9:.0f} GB (driver {gpu.driver})" for gpu in host.gpus) or "no GPU"
    console.print(
        f"Python {host.python}{'' if python_fits() else ' (needs 3.11 or 3.12)'}, {host.system}, {host.cores} cores, "
        f"{host.memory / 1e9:.0f} GB; {gpus}; an engine would run on {host.device}",
        highlight=False,
    )
    table = Table("package", "needs", "installed", "")
    for version in found:
        table.add_row(version.name, version.required, version.installed or "-", version.verdict)
    models = Table("model", "here")
    for name, verdict in verdicts(host).items():
        models.add_row(name, verdict)
    console.print(table, models)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(argv)
    host = machine()
    found = versions(host.device, training=True)
    if args.json:
        print(json.dumps(as_dict(host, found)))
    else:
        show(host, found, Console())
    return 0 if is_fit(found) else 1


if __name__ == "__main__":
    sys.exit(main())
