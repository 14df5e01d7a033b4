"""Checkpoints of a training run: which there are, which are complete, and which one is meant."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from dllm.config import ConfigError, positive_int, read_json
from recipes.console import validation_accuracy
from recipes.records import read_metrics

STEP_DIRECTORY = re.compile(r"^global_step_(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """One step of a run.

    Attributes:
        actor: directory with the shards of the policy.
        base: directory of the model that the run started from, if it still exists.
    """

    step: int
    actor: Path
    base: Path | None


def find_checkpoint(given: str | Path, step: str = "last") -> Checkpoint:
    """The checkpoint of a run directory, of its ``checkpoints`` directory, or of one ``global_step_N``.

    Raises:
        ConfigError: there is none, or not this one, or it was not written to its end, or a file of the run that says
            so is damaged.
    """
    path = Path(given)
    if not os.path.isdir(path):  # False, and no error, for a name that is too long
        raise ConfigError(f"run directory {str(given)!r} does not exist; pass one of outputs/grpo_llada2/*")
    if match := STEP_DIRECTORY.match(path.absolute().name):
        if step not in ("last", match[1]):
            raise ConfigError(f"--step={step} contradicts {str(given)!r}; pass the run directory to choose a step")
        return _checked(path, int(match[1]), path.absolute().parent)
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = {int(m[1]): d for d in root.iterdir() if d.is_dir() and (m := STEP_DIRECTORY.match(d.name))}
    if not steps:
        raise ConfigError(
            f"{str(given)!r} has no checkpoint (checkpoints/global_step_*); a run writes one every trainer.save_freq "
            "steps"
        )
    number = _choose(root.absolute().parent, steps, step, _finished(root))
    return _checked(steps[number], number, root)


def _finished(root: Path) -> int | None:
    """Step of the last checkpoint that was written to its end, as the trainer noted it; None without a note.

    Raises:
        ConfigError: the note is no number.
    """
    note = root / "latest_checkpointed_iteration.txt"
    text = note.read_bytes().strip() if note.is_file() else b""
    if text and not (text.isdigit() and len(text) < 19):
        raise ConfigError(
            f"{note} holds {text[:100]!r}, not the number of the last complete step; correct or remove it"
        )
    return int(text) if text else None


def _choose(run: Path, steps: Mapping[int, Path], step: str, finished: int | None) -> int:
    if step == "last":
        return finished if finished in steps else max(steps)
    if step == "best":
        try:
            scores = {
                record["step"]: accuracy
                for record in read_metrics(run)
                if record["kind"] == "validation" and (accuracy := validation_accuracy(record)) is not None
            }
        except ConfigError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"val/accuracy of {run / 'metrics.jsonl'} is no number ({error}); use --step last or a number"
            ) from error
        if not (kept := [n for n in steps if n in scores]):
            raise ConfigError(
                f"--step=best needs a validated checkpoint; {run} has checkpoints {sorted(steps)} and validations "
                f"{sorted(scores)}. Use --step last or a number"
            )
        return max(kept, key=lambda n: (scores[n], n))
    if not (step.isdecimal() and len(step) < 19) or int(step) not in steps:
        raise ConfigError(f"--step={step} is not one of {sorted(steps)}, last or best")
    return int(step)


def _checked(directory: Path, step: int, root: Path) -> Checkpoint:
    """Refuse a checkpoint that was not written to its end."""
    finished = _finished(root)
    actor = directory / "actor"
    lacks = None if (actor / "fsdp_config.json").is_file() else "fsdp_config.json"
    for name in () if lacks else (*shard_names(actor), "huggingface/config.json"):
        if not (actor / name).is_file():
            lacks = name
            break
    if lacks or (finished is not None and step > finished):
        what = f"lacks {lacks}" if lacks else f"is newer than the last complete one, {finished}"
        raise ConfigError(f"checkpoint {directory} is unfinished: it {what}; export an earlier step with --step")
    return Checkpoint(step, actor, _base_model(root.absolute().parent))


def _base_model(run: Path) -> Path | None:
    """Directory of the model that a run was started from, as its config.yaml has it.

    Raises:
        ConfigError: the file is no YAML, or has no text where the path belongs.
    """
    config = run / "config.yaml"
    if not config.is_file():
        return None
    try:
        found = yaml.safe_load(config.read_text(encoding="utf-8"))
    except Exception as error:  # of YAML's own, of Python's for what is no UTF-8, no date, no number
        raise ConfigError(f"{config} is not valid YAML ({error}); correct or remove it") from error
    at = "the file"
    for key in ("actor_rollout_ref", "model", "path"):
        if found is None:
            return None
        if not isinstance(found, dict):
            raise ConfigError(f"{at} of {config} is {found!r}, not a mapping; correct or remove the file")
        at, found = key if at == "the file" else f"{at}.{key}", found.get(key)
    if not isinstance(found, (str, type(None))):
        raise ConfigError(f"{at} of {config} is {found!r}, not a path; correct it, or remove the file")
    return Path(found) if found and os.path.isdir(found) else None


def shard_names(actor: Path) -> list[str]:
    """Files of the model, in the order of ranks.

    Raises:
        ConfigError: fsdp_config.json does not say how many.
    """
    file = actor / "fsdp_config.json"
    size = positive_int(read_json(file), "world_size", where=file)
    return [shard_name(size, rank) for rank in range(size)]


def shard_name(size: int, rank: int) -> str:
    """File of one rank's part of the model, as verl's checkpoint manager names it."""
    return f"model_world_size_{size}_rank_{rank}.pt"
