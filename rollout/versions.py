"""Versions this package is made for, what is installed, and whether SGLang will find the plugin.

The plugins hook into SGLang and verl by name, so that those two must be exact; the others must be what they were tested
with, or their kernels and file formats differ.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata

from dllm.config import ConfigError

REQUIRED = {
    "torch": "2.11.0",
    "sglang": "0.5.17",
    "transformers": "5.12.1",
    "flashinfer-python": "0.6.15.post1",
    "sglang-kernel": "0.4.5",
    "verl": "0.9.1",
}
"""Tested versions; the first five serve, verl trains."""

GPU_ONLY = ("flashinfer-python", "sglang-kernel")
TRAINING_ONLY = ("verl",)

PLUGIN = "dllm_rollout"
"""Name of this package's plugin, as ``SGLANG_PLUGINS`` lists it."""


@dataclass(frozen=True)
class Version:
    """One package.

    Attributes:
        installed: None if it is not.
        needed: whether this machine's use of the package needs it.
    """

    name: str
    required: str
    installed: str | None
    needed: bool = True

    @property
    def fits(self) -> bool:
        """Local builds (``2.11.0+cu130``) fit."""
        return self.installed is not None and self.installed.partition("+")[0] == self.required

    @property
    def verdict(self) -> str:
        if self.fits:
            return "ok"
        if not self.needed:
            return "not needed here"
        return "missing" if self.installed is None else f"needs {self.required}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"verdict": self.verdict}


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(device: str, training: bool = False) -> list[Version]:
    """What is installed of ``REQUIRED``, and whether an engine on ``device`` (cpu, cuda) needs it."""
    unneeded = (*(GPU_ONLY if device == "cpu" else ()), *(() if training else TRAINING_ONLY))
    return [
        Version(name, required, installed_version(name), name not in unneeded) for name, required in REQUIRED.items()
    ]


def check_versions(device: str, training: bool = False) -> list[Version]:
    """Refuse packages that do not fit.

    Raises:
        ConfigError: a needed package is missing or has another version.
    """
    found = versions(device, training)
    wrong = [v for v in found if v.needed and not v.fits]
    if wrong:
        listed = ", ".join(f"{v.name} {v.installed or 'is not installed'} (needs {v.required})" for v in wrong)
        raise ConfigError(
            f"versions that do not fit: {listed}; install the pinned ones (uv sync) into this environment"
        )
    return found


def check_plugin() -> None:
    """Refuse an environment in which SGLang does not load this package's plugin.

    Raises:
        ConfigError: the package is not installed, or ``SGLANG_PLUGINS`` leaves the plugin out.
    """
    if PLUGIN not in {point.name for point in metadata.entry_points(group="sglang.srt.plugins")}:
        raise ConfigError(
            f"SGLang finds no plugin {PLUGIN!r}: this package is not installed in this environment (on a path only it "
            "is no plugin); install it (uv sync, or pip install -e .)"
        )
    chosen = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if chosen and PLUGIN not in chosen:
        raise ConfigError(
            f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']!r} leaves out {PLUGIN!r}, without which the engine logs "
            "nothing; add it"
        )


def python_fits() -> bool:
    """Whether this interpreter is one of those the package supports (3.11, 3.12)."""
    return platform.python_version_tuple()[:2] in (("3", "11"), ("3", "12"))
