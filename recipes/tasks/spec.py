"""What a task is: the typed form of the config group ``task``, checked before anything is built."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from dllm.config import ConfigError
from recipes.tasks.demonstrations import FLAWED

TASK_DIR = Path(__file__).parent.parent / "config" / "task"
# Part of the cache key: raise it when the files that are built from the same parameters change.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ReasoningGymTask:
    """Prompts drawn from one generator of reasoning-gym.

    One stream of distinct prompts is cut into three parts without overlap: held-out prompts first, then those of
    the supervised warm start, then those of RL. Growing a later part leaves the earlier ones as they are.

    Attributes:
        name: the generator.
        params: its parameters.
        seed: of the stream.
        val_size, sft_size, train_size: prompts per part.
        flawed_share: fraction of a warm start's demonstrations with a systematic error (see ``demonstrations``).
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    val_size: int = 256
    sft_size: int = 8192
    train_size: int = 4096
    flawed_share: float = 0.0

    def __post_init__(self) -> None:
        from reasoning_gym.factory import DATASETS

        if self.name not in DATASETS:
            raise ConfigError(
                f"task.name={self.name!r} does not exist in reasoning-gym {version('reasoning-gym')}; use one of "
                f"{', '.join(sorted(DATASETS))}"
            )
        known = {f.name for f in dataclasses.fields(DATASETS[self.name][1])} - {"seed", "size"}
        for key in self.params:
            if key not in known:
                raise ConfigError(
                    f"task.params.{key}={self.params[key]!r} is not a parameter of {self.name}; valid keys are "
                    f"{', '.join(sorted(known))}"
                )
        try:
            DATASETS[self.name][1](**self.params, seed=self.seed, size=1).validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"task.params={dict(self.params)} is refused by {self.name}: {error}") from error
        for key, least in (("val_size", 1), ("sft_size", 0), ("train_size", 1)):
            if getattr(self, key) < least:
                raise ConfigError(f"task.{key}={getattr(self, key)} is too small; use at least {least}")

        if not 0 <= self.flawed_share < 1:
            raise ConfigError(f"task.flawed_share={self.flawed_share} is not a share; use 0 up to 0.9")
        if self.flawed_share and self.name not in FLAWED:
            raise ConfigError(
                f"task.flawed_share={self.flawed_share}: {self.name} has no flawed annotator (only "
                f"{', '.join(FLAWED)}); set it to 0 or add one to recipes/tasks/demonstrations.py"
            )

    @property
    def key(self) -> str:
        """Hash of everything the built files depend on."""
        content = {
            **dataclasses.asdict(self),
            "flawed_share": None,
            "format": FORMAT_VERSION,
            "library": version("reasoning-gym"),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ParquetTask:
    """Prompts in parquet files of verl's format, used as they are."""

    train_files: list[str]
    val_files: list[str]
    name: str = "parquet"

    def __post_init__(self) -> None:
        for key in ("train_files", "val_files"):
            if not getattr(self, key):
                raise ConfigError(f"task.{key} is empty; name at least one parquet file in verl's format")
            for file in getattr(self, key):
                if not Path(file).is_file():
                    raise ConfigError(f"task.{key}: {file!r} is not a file; give the path of a parquet file")


Task = ReasoningGymTask | ParquetTask
_SOURCES: Mapping[str, type] = {"reasoning_gym": ReasoningGymTask, "parquet": ParquetTask}


def available_tasks() -> list[str]:
    """Names of the config group ``task``."""
    return sorted(file.stem for file in TASK_DIR.glob("*.yaml"))


def task_from_config(config: Mapping[str, Any]) -> Task:
    """The task described by a (resolved) config group.

    Raises:
        ConfigError: an unknown source or key, or a value that cannot work.
    """
    values = dict(config)
    source = values.pop("source", None)
    if source not in _SOURCES:
        raise ConfigError(f"task.source={source!r} does not exist; use one of {', '.join(sorted(_SOURCES))}")
    cls = _SOURCES[source]
    names = {f.name for f in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(f"task.{key}={value!r} is not a key of a {source} task; valid keys are {sorted(names)}")
    if source == "parquet":
        for key in names & set(values):
            values[key] = [values[key]] if isinstance(values[key], str) else list(values[key] or [])
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(
            f"task of source {source!r} is incomplete ({error}); valid keys are {sorted(names)}"
        ) from error


def load_task(name: str) -> Task:
    """A task of the config group by its name, with the values of its file.

    Raises:
        ConfigError: there is no such task.
    """
    path = TASK_DIR / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"task={name!r} does not exist; use one of {', '.join(available_tasks())}")
    return task_from_config(yaml.safe_load(path.read_text(encoding="utf-8")))
