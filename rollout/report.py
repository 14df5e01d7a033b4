"""What a preflight found: requested and effective settings, or everything that was refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from dllm.config import BlockDiffusionConfig, ConfigError
from rollout.memory import MemoryEstimate
from rollout.versions import Version


@dataclass
class Report:
    """Outcome of a preflight.

    Attributes:
        requested: flags as given.
        effective: flags as the engine will run with them.
        reasons: why a flag was changed.
        block_diffusion: block size, mask id and stop ids, or None for an autoregressive model.
        memory: estimate for one GPU; None on a CPU, or if no GPU is there to ask.
        versions: packages and whether they fit.
        notes: what a user should know and no setting says.
    """

    requested: dict[str, Any]
    effective: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    block_diffusion: BlockDiffusionConfig | None = None
    memory: MemoryEstimate | None = None
    versions: list[Version] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, reason: str) -> None:
        self.effective[name] = value
        self.reasons[name] = reason

    def describe(self) -> str:
        """One line per setting, asked for, filled in or changed; block-diffusion settings; memory."""
        asked = [f"{n}: {v} (as asked)" for n, v in self.requested.items() if v is not None and n not in self.reasons]
        lines = asked + [
            f"{n}: {self.requested.get(n)} -> {self.effective[n]} ({why})" for n, why in self.reasons.items()
        ]
        if self.block_diffusion is not None:
            lines.insert(0, self.block_diffusion.describe())
        if self.memory is not None:
            lines.append(self.memory.describe())
        return "\n".join(lines + self.notes)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "ok": True,
            "requested": self.requested,
            "effective": self.effective,
            "reasons": self.reasons,
            "block_diffusion": None if self.block_diffusion is None else asdict(self.block_diffusion),
            "memory": None if self.memory is None else self.memory.as_dict(),
            "versions": [version.as_dict() for version in self.versions],
            "notes": self.notes,
        }


class Refusals:
    """Collects what is refused, so that a user hears of everything at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def note(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            if str(error) not in self.messages:  # several checks read the same file
                self.messages.append(str(error))

    def raise_all(self) -> None:
        if self.messages:
            raise ConfigError("\n".join(self.messages))
