"""What a rollout server survives: malformed requests, a thousand at once, a long load.

    python -m recipes.stress --model-path recipes/checkpoints/tiny_llada2 [--device cpu] [--json FILE]
    python -m recipes.stress --url http://127.0.0.1:30000 --requests 1000 --concurrent 100 --soak-minutes 1

Ends with 1 if a request was answered with 5xx or not at all, a 4xx names no field, an answer is that of another
request, KV pages or memory leak, or the server is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape

from dllm.config import ConfigError
from recipes.host import host_report, package_versions
from recipes.server_process import ServerProcess
from recipes.stress.concurrent import concurrent
from recipes.stress.described import DECODING, described
from recipes.stress.malformed import attempts
from recipes.stress.report import Phase, table_of
from recipes.stress.send import malformed
from recipes.stress.soak import soak
from recipes.stress.target import Target

PHASES = ("malformed", "concurrent", "soak")

KV_TOKENS = 1 << 16
"""KV cache of the server that is started here: small enough to run full, and to be touched as a whole soon."""


async def run(args: argparse.Namespace, url: str, pid: int | None, key: str | None, console: Console) -> list[Phase]:
    """The phases that were asked for, one after the other."""
    target = await Target.at(url, pid, key)
    before, phases = await target.at_rest(), []
    for name in args.phases:
        if name == "malformed":
            fuzz = []
            if args.described:
                start = time.monotonic()
                description = (await target.http.get("/openapi.json")).json()
                paths = DECODING if key is None else ("/",)
                fuzz = await asyncio.to_thread(described, description, args.described, args.seed, paths)
                console.print(f"{len(fuzz)} requests from the server's description: {time.monotonic() - start:.0f} s")
            by_hand = attempts(random.Random(args.seed), args.requests - len(fuzz), target.info)
            phases.append(await malformed(target, chain(fuzz, by_hand)))
        elif name == "concurrent":
            phases.append(await concurrent(target, args.concurrent, args.may_differ))
        else:
            phases.append(await soak(target, args.soak_minutes, args.seed))
        after = await target.at_rest()
        if after != before:
            phases[-1].problem(f"at rest the server said {before} at the beginning and says {after} now")
        console.print(f"{name}: {phases[-1].seconds:.0f} s, {phases[-1].problem_count} problems")
        if args.json:
            args.json.write_text(json.dumps(report(args, phases), indent=2) + "\n", encoding="utf-8")
    return phases


def report(args: argparse.Namespace, phases: Sequence[Phase]) -> dict[str, object]:
    """What the file of ``--json`` holds."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "model_path": args.model_path,
        "device": args.device,
        "seed": args.seed,
        "commit": commit.stdout.strip(),
        "host": host_report(),
        "versions": package_versions(),
        "phases": [asdict(phase) for phase in phases],
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m recipes.stress", description=(__doc__ or "").splitlines()[0])
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running rollout server on loopback")
    where.add_argument("--model-path", help="start a server with this checkpoint")
    p.add_argument("--device", choices=("cpu", "cuda"), help="of the server to start")
    p.add_argument("--admin-api-key", help="of the server at --url; the one started here gets a key of its own")
    p.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE", help=" ".join(PHASES))
    p.add_argument("--requests", type=int, default=10_000, help="malformed requests")
    p.add_argument("--described", type=int, default=5_000, help="of them from the server's OpenAPI description")
    p.add_argument("--concurrent", type=int, default=1_000, help="requests at once")
    p.add_argument(
        "--may-differ",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the answers at once that may have other tokens than alone; 0 is right for fp32 on a CPU",
    )
    p.add_argument("--soak-minutes", type=float, default=20.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--log", type=Path, default=Path("stress_server.log"), help="output of the server to start")
    p.add_argument("--json", type=Path, help="write the figures to this file after every phase")
    return p


def more_files() -> None:
    """Every request under way is an open connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(argv), Console()
    more_files()
    try:
        if args.url:
            phases = asyncio.run(run(args, args.url, None, args.admin_api_key, console))
        else:
            key = secrets.token_urlsafe(16)
            flags = {
                "model-path": args.model_path,
                "dllm-algorithm": "SelectThenSample",
                "max-total-tokens": KV_TOKENS,
                "admin-api-key": key,
                "log-level": "warning",
            }
            flags |= {"device": args.device} if args.device else {}
            with ServerProcess("rollout.server", flags, args.log) as server:
                phases = asyncio.run(run(args, server.url, server.pid, key, console))
                if server.process.poll() is not None:
                    phases[-1].problem(f"the server ended with {server.process.returncode}")
    except (ConfigError, RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(table_of(phases))
    for phase in phases:
        for problem in phase.problems:
            console.print(f"[red]{phase.name}[/red]: {escape(problem)}", highlight=False)
    return 1 if any(phase.problem_count for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
