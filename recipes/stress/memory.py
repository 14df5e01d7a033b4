"""Memory of a server's processes, and whether it stays flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

WARM_UP = 0.25
"""Share of a run that is left out: allocators, caches and lazily touched pools fill up in it."""

FLAT_SHARE, FLAT_MIB = 0.02, 8.0
"""Growth over the rest of the run that counts as flat: the larger of a share of the size and MiB."""


NAMES = {"sglang::schedul": "sglang::scheduler", "sglang::detoken": "sglang::detokenizer"}
"""Whole names of processes by the 15 letters that Linux keeps."""


def memory_mib(pid: int) -> dict[str, float]:
    """MiB by process: ``server`` (HTTP and tokenizer), ``sglang::scheduler``, ``sglang::detokenizer``.

    Counted is what a process allocated (heap, tensors). Pages of libraries and other files are not: the kernel drops
    them when the host is short of memory, and the size would fall while the process grows.

    Further children of the server, if there are any, are summed under the name of their program.
    """
    root, sizes = psutil.Process(pid), {}
    for process in [root, *root.children(recursive=True)]:
        try:
            # The kernel's name of a process, 15 letters. A command line lies in the memory of the process itself and
            # is not always to be read; the process would change its name in the middle of a run.
            kernels = process.name()[:15]
            name = "server" if process == root else NAMES.get(kernels, kernels)
            memory = process.memory_info()
            sizes[name] = sizes.get(name, 0.0) + (memory.rss - getattr(memory, "shared", 0)) / 2**20
        except psutil.NoSuchProcess:
            continue
    return sizes


@dataclass(frozen=True)
class Growth:
    """A line through the sizes of one process after the warm-up.

    Attributes:
        first, last: sizes at its ends in MiB.
        per_minute: its slope in MiB.
    """

    first: float
    last: float
    per_minute: float

    @property
    def flat(self) -> bool:
        return self.last - self.first <= max(FLAT_MIB, FLAT_SHARE * self.first)


def growth(seconds: Sequence[float], mib: Sequence[float]) -> Growth:
    """Least squares over the samples after the first ``WARM_UP`` of the time."""
    times, sizes = np.asarray(seconds), np.asarray(mib)
    kept = times >= times[0] + WARM_UP * (times[-1] - times[0])
    slope, offset = np.polyfit(times[kept], sizes[kept], 1)
    ends = offset + slope * times[kept][[0, -1]]
    return Growth(float(ends[0]), float(ends[1]), float(60 * slope))


def growths(seconds: Sequence[float], samples: Sequence[Mapping[str, float]]) -> dict[str, Growth]:
    """``growth`` of every process that was there all the time."""
    names = set.intersection(*(set(sample) for sample in samples))
    return {name: growth(seconds, [sample[name] for sample in samples]) for name in sorted(names)}
