"""What a rollout server survives: malformed requests, a thousand at once, a long load.

    python -m recipes.stress --model-path recipes/checkpoints/tiny_llada2 [--device cpu] [--json FILE]
    python -m recipes.stress --url http://127.0.0.1:30000 --requests 1000 --concurrent 100 --soak-minutes 1

Ends with 1 if a request was answered with 5xx or not at all, a 4xx of the service names no field, an answer belongs to
another request, KV pages or memory leak, or the server is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from dllm.config import ConfigError
from recipes.malformed import Attempt, attempts

IN_FLIGHT = 32
"""Malformed requests at a time."""


@dataclass
class Phase:
    """What one phase found; ``problems`` is empty if the server passed."""

    name: str
    requests: int = 0
    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(text[:500])


@contextmanager
def server(model_path: str, device: str | None, log: Path) -> Iterator[tuple[str, int]]:
    """A rollout server of its own: address and process id.

    Raises:
        ConfigError: it did not come up; the message has the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rollout.server", "--model-path", model_path, "--port", str(port)]
    command += ["--dllm-algorithm", "SelectThenSample", "--log-level", "warning"]
    command += ["--device", device] if device else []
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            if process.poll() is not None:
                raise ConfigError(f"the server ended with {process.returncode}:\n{log.read_text()[-2000:]}")
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(1)
        yield url, process.pid
    finally:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in tree:
            member.terminate()
        for member in psutil.wait_procs(tree, 20)[1]:
            member.kill()


def memory_mib(pid: int | None) -> float:
    """Resident memory of a process and its descendants in MiB; nan without a process id."""
    if pid is None:
        return math.nan
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 2**20


async def leaked_tokens(http: httpx.AsyncClient, seconds: float = 60) -> int:
    """Tokens of the KV cache in use by an idle server whose prefix cache was dropped."""
    end = time.monotonic() + seconds
    used = -1
    while time.monotonic() < end:
        flushed = await http.post("/flush_cache")
        if flushed.status_code == 200:
            load = (await http.get("/get_load")).json()
            used = sum(int(part["num_tokens"]) for part in load)
            if used == 0:
                return 0
        await asyncio.sleep(0.5)
    return used


async def send(http: httpx.AsyncClient, attempt: Attempt, phase: Phase, counts: Counter[str]) -> None:
    """One attempt; what is wrong with the answer goes into ``phase``."""
    where = f"{attempt.kind} {attempt.path}"
    try:
        if attempt.hang_up:
            async with http.stream("POST", attempt.path, content=attempt.body, headers=attempt.headers) as answer:
                async for _ in answer.aiter_bytes():
                    break
            counts["hung up"] += 1
            return
        answer = await http.post(attempt.path, content=attempt.body, headers=attempt.headers)
    except httpx.HTTPError as error:
        phase.problem(f"{where}: no answer: {error!r}")
        counts["none"] += 1
        return
    counts[str(answer.status_code)] += 1
    if answer.status_code >= 500:
        phase.problem(f"{where}: {answer.status_code} {answer.text[:200]} for {attempt.body[:200]!r}")
    elif 400 <= answer.status_code < 500 and attempt.path.startswith("/rollout/"):
        error = answer.json().get("error", {})
        if not error.get("field"):
            phase.problem(f"{where}: {answer.status_code} without a field: {answer.text[:200]}")


async def malformed(http: httpx.AsyncClient, count: int, info: dict[str, Any], seed: int) -> Phase:
    """Wrong types, borders, garbage, hung-up clients; the server answers a good request afterwards."""
    phase, counts, start = Phase("malformed"), Counter[str](), time.monotonic()
    todo = attempts(random.Random(seed), count, info)

    async def worker() -> None:
        for attempt in todo:
            await send(http, attempt, phase, counts)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    phase.requests, phase.seconds, phase.statuses = count, time.monotonic() - start, dict(sorted(counts.items()))
    await check_alive(http, phase)
    return phase


async def check_alive(http: httpx.AsyncClient, phase: Phase) -> None:
    good = await http.post("/rollout/generate", json={"prompts": [{"input_ids": [8, 9]}], "seed": 0})
    if good.status_code != 200:
        phase.problem(f"a good request afterwards: {good.status_code} {good.text[:200]}")
    phase.figures["leaked_kv_tokens"] = leaked = await leaked_tokens(http)
    if leaked:
        phase.problem(f"{leaked} tokens of the KV cache are in use by nobody")


def request_body(number: int, info: dict[str, Any]) -> dict[str, Any]:
    """A prompt that no other number has."""
    low, high = 6 + (info["mask_id"] >= 6), info["vocab_size"]
    usable = [t for t in range(low, min(high, 250)) if t != info["mask_id"]]
    rng = random.Random(number)
    ids = [usable[number % len(usable)], usable[number // len(usable) % len(usable)]]
    ids += [rng.choice(usable) for _ in range(rng.randrange(1, 40))]
    params = {"max_new_tokens": rng.randrange(1, 70), "ignore_eos": rng.random() < 0.5}
    return {"prompts": [{"input_ids": ids, "index": number}], "seed": 1, "sampling_params": params}


async def concurrent(http: httpx.AsyncClient, count: int, info: dict[str, Any]) -> Phase:
    """All at once; every answer belongs to its request, and some are compared with the same request alone."""
    phase, start = Phase("concurrent"), time.monotonic()
    bodies = [request_body(i, info) for i in range(count)]
    answers = await asyncio.gather(*(http.post("/rollout/generate", json=b) for b in bodies), return_exceptions=True)
    phase.requests, phase.seconds = count, time.monotonic() - start
    phase.statuses = dict(Counter(str(a.status_code) if isinstance(a, httpx.Response) else repr(a) for a in answers))
    lines: list[Any] = []
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        if not isinstance(answer, httpx.Response) or answer.status_code != 200:
            phase.problem(f"request {number}: {answer!r}")
            lines.append(None)
            continue
        line = answer.json()["groups"][0]["samples"][0]
        lines.append(line)
        if line.get("input_ids") != body["prompts"][0]["input_ids"]:
            phase.problem(f"request {number} got the answer of another prompt")
    different = 0
    checked = range(0, count, max(1, count // 25))
    for number in checked:
        alone = (await http.post("/rollout/generate", json=bodies[number])).json()["groups"][0]["samples"][0]
        different += lines[number] is None or alone["output_ids"] != lines[number]["output_ids"]
    phase.figures |= {"requests_per_s": count / phase.seconds, "compared": len(checked), "different": different}
    await check_alive(http, phase)
    return phase


async def soak(http: httpx.AsyncClient, minutes: float, info: dict[str, Any], pid: int | None) -> Phase:
    """A steady mixed load; resident memory after the first third must not grow."""
    phase, start = Phase("soak"), time.monotonic()
    end, counts, samples = start + 60 * minutes, Counter[str](), []
    todo = attempts(random.Random(7), 1 << 30, info)

    async def worker(first: int) -> None:
        number = first
        while time.monotonic() < end:
            await send(http, next(todo), phase, counts) if number % 4 == 0 else await good(number)
            number += 16

    async def good(number: int) -> None:
        answer = await http.post("/rollout/generate", json=request_body(number % (1 << 20), info))
        counts[str(answer.status_code)] += 1
        if answer.status_code != 200:
            phase.problem(f"a good request: {answer.status_code} {answer.text[:200]}")

    async def watch() -> None:
        while time.monotonic() < end:
            samples.append((time.monotonic() - start, memory_mib(pid)))
            await asyncio.sleep(max(0.5, 60 * minutes / 200))

    await asyncio.gather(watch(), *(worker(i) for i in range(16)))
    phase.requests, phase.seconds, phase.statuses = sum(counts.values()), time.monotonic() - start, dict(counts)
    if pid is not None:
        later = np.array(samples[len(samples) // 3 :])
        slope = float(np.polyfit(later[:, 0] / 60, later[:, 1], 1)[0])
        phase.figures |= {"rss_mib_first": later[0, 1], "rss_mib_last": later[-1, 1], "rss_mib_per_minute": slope}
        if later[-1, 1] > 1.05 * later[0, 1] and slope > 1:
            phase.problem(f"memory grew from {later[0, 1]:.0f} to {later[-1, 1]:.0f} MiB, {slope:.1f} MiB a minute")
    await check_alive(http, phase)
    return phase


async def run(url: str, pid: int | None, args: argparse.Namespace, console: Console) -> list[Phase]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(1200), limits=limits) as http:
        info = (await http.get("/rollout/info")).json()
        phases = []
        for start in (
            lambda: malformed(http, args.requests, info, args.seed),
            lambda: concurrent(http, args.concurrent, info),
            lambda: soak(http, args.soak_minutes, info, pid),
        ):
            phases.append(await start())
            console.print(f"{phases[-1].name}: {phases[-1].seconds:.0f} s, {len(phases[-1].problems)} problems")
            if args.json:
                args.json.write_text(json.dumps([asdict(p) for p in phases], indent=2) + "\n", encoding="utf-8")
    return phases


def table_of(phases: Sequence[Phase]) -> Table:
    table = Table(title="Stress", title_justify="left")
    for column in ("phase", "requests", "seconds", "answers", "figures", "problems"):
        table.add_column(column)
    for p in phases:
        answers = ", ".join(f"{status}: {n}" for status, n in p.statuses.items())
        figures = ", ".join(f"{name} {value:.4g}" for name, value in p.figures.items())
        table.add_row(p.name, str(p.requests), f"{p.seconds:.0f}", answers, figures, str(len(p.problems)))
    return table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m recipes.stress", description=(__doc__ or "").splitlines()[0])
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running rollout server on loopback")
    where.add_argument("--model-path", help="start a server with this checkpoint")
    p.add_argument("--device", choices=("cpu", "cuda"), help="of the server to start")
    p.add_argument("--requests", type=int, default=10_000, help="malformed requests")
    p.add_argument("--concurrent", type=int, default=1_000, help="requests at once")
    p.add_argument("--soak-minutes", type=float, default=20.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--log", type=Path, default=Path("stress_server.log"), help="output of the server to start")
    p.add_argument("--json", type=Path, help="write the figures to this file after every phase")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(argv), Console()
    try:
        if args.url:
            phases = asyncio.run(run(args.url, None, args, console))
        else:
            with server(args.model_path, args.device, args.log) as (url, pid):
                phases = asyncio.run(run(url, pid, args, console))
    except (ConfigError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(table_of(phases))
    for phase in phases:
        for problem in phase.problems:
            console.print(f"[red]{phase.name}[/red]: {problem}", markup=True, highlight=False)
    return 1 if any(phase.problems for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
