"""Leaves nothing behind: ends every process a run has started once its driver is gone, however it went.

Ray's agents outlive a killed driver by minutes. A small process in a session of its own keeps a list of the
driver's descendants and ends what is left of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

INTERVAL = 2.0
"""Seconds between two looks at the driver."""

GRACE = 5.0
"""Seconds that processes get to end by themselves after the driver is gone."""


def start_reaper() -> subprocess.Popen:
    """Start the process that cleans up after this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainers.reaper", str(os.getpid())],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def follow(driver: psutil.Process) -> set[psutil.Process]:
    """All descendants the driver has had, collected until it ends."""
    seen: set[psutil.Process] = set()
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
        try:
            seen.update(driver.children(recursive=True))
        except psutil.NoSuchProcess:
            break
        time.sleep(INTERVAL)
    return {process for process in seen if process.pid != os.getpid()}


def main(argv: Sequence[str]) -> None:
    try:
        left = follow(psutil.Process(int(argv[0])))
    except psutil.NoSuchProcess:
        return
    # psutil compares creation times, so a reused process id is never mistaken for one of ours.
    _, alive = psutil.wait_procs(left, timeout=GRACE)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
