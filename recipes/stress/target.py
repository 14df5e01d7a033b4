"""The server under stress: sending to it, and what it still holds when it is idle."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

from recipes.stress.report import Phase

PATIENCE = 600.0
"""Seconds after which a request counts as not answered."""


@dataclass
class Target:
    """A rollout server.

    Attributes:
        info: its answer to ``GET /rollout/info``.
        pid: of its process where it is on this host and was started here.
        admin: headers with the key of the server's administrator, for aborts and flushes.
    """

    http: httpx.AsyncClient
    info: dict[str, Any]
    pid: int | None
    admin: dict[str, str]

    @classmethod
    async def at(cls, url: str, pid: int | None, admin_key: str | None) -> Target:
        # The server closes a connection that was idle for 5 s; a request must not meet that.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=1)
        http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(PATIENCE), limits=limits)
        admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        return cls(http, (await http.get("/rollout/info")).raise_for_status().json(), pid, admin)

    async def load(self) -> dict[str, int]:
        """Requests in the engine and tokens in its KV cache, summed over its ranks."""
        ranks = (await self.http.get("/v1/loads", params={"include": "core"})).raise_for_status().json()["loads"]
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
        return {name: sum(int(rank[name]) for rank in ranks) for name in names}

    async def at_rest(self, seconds: float = 60) -> dict[str, int]:
        """``load`` when nothing runs and the prefix cache was dropped; after ``seconds`` as it is."""
        end = time.monotonic() + seconds
        while True:
            flushed = await self.http.post("/flush_cache", headers=self.admin)
            load = await self.load()
            load["running"] = int((await self.http.get("/rollout/info")).json()["running"])
            busy = load["running"] or load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"]
            if (flushed.status_code == 200 and not busy) or time.monotonic() > end:
                return load
            await asyncio.sleep(0.5)

    async def check(self, phase: Phase) -> None:
        """Ask for a good sample, then look for what an idle server still holds."""
        good = await self.http.post("/rollout/generate", json={"prompts": [{"input_ids": [8, 9]}], "seed": 0})
        if good.status_code != 200:
            phase.problem(f"a good request afterwards: {good.status_code} {good.text[:200]}")
        load = await self.at_rest()
        phase.figures["leaked_kv_tokens"] = load["num_used_tokens"]
        phase.figures["requests_left"] = load["running"] + load["num_running_reqs"] + load["num_waiting_reqs"]
        if load["num_used_tokens"]:
            phase.problem(f"{load['num_used_tokens']} tokens of the KV cache are in use by nobody")
        if phase.figures["requests_left"]:
            phase.problem(f"{phase.figures['requests_left']} requests are left that nobody waits for")
