"""What follows an update that failed: the engine goes on with its old weights, or stays closed."""

from __future__ import annotations

import asyncio

from weight_sync.control import EngineControl
from weight_sync.gate import Requests
from weight_sync.messages import WeightSyncError
from weight_sync.session import Key, Machine


class Rescue:
    """Its last step opens the engine, so that no update may begin before its end: there is one at a time."""

    def __init__(self, control: EngineControl, machine: Machine, requests: Requests) -> None:
        self.control, self.machine, self.requests = control, machine, requests
        self._task: asyncio.Task[None] | None = None

    def begin(self, key: Key) -> asyncio.Task[None]:
        """Start it; the engine was fenced until now."""
        self._task = asyncio.create_task(self._run(key))
        return self._task

    async def run(self, key: Key) -> None:
        """To its end; it goes on if the caller leaves."""
        await asyncio.shield(self.begin(key))

    async def settle(self) -> None:
        """Wait until there is none; whoever fences the engine does so right behind this."""
        while self._task is not None and not self._task.done():
            await asyncio.shield(self._task)

    async def _run(self, key: Key) -> None:
        if self.machine.admits:
            try:
                await asyncio.to_thread(self.control.abort, *key)
                await asyncio.to_thread(self.control.resume)
                return
            except WeightSyncError as error:
                # What the engine holds is unknown, or a mixture of somebody else's.
                self.machine.tear(f"version {key[1]} was given up, and the engine was not opened again: {error}")
        # Those that wait in a closed engine would do so for ever.
        self.requests.turn_away()
