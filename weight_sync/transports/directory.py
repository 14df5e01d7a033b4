"""A directory of checkpoints, one per version: for engines that share a file system with the trainer, or start later.

A version is a Hugging Face directory in the published layout. It appears under its name when it is complete, with the
checksum of every file, and older versions stay beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dllm.config import is_whole, load_hf_config
from dllm.models.checkpoint import split_experts
from weight_sync.buckets import Bucket, Placement, new_buffer, view
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec, WeightSyncError
from weight_sync.transports import Engine, fan_out

INDEX = "weight_version.json"
"""Version, run and the checksum of every file; written last."""

READ_BYTES = 8 << 20

_NAME = re.compile(r"^v(\d+)$")
_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


class DirectoryTransport:
    """Writes every version into a directory, and tells the engines of it when it is complete.

    Args:
        root: where versions lie, ``v0``, ``v1``, …
        base: checkpoint whose config.json and tokenizer belong to every version.
        keep: how many versions stay; older ones are removed after a new one is complete.
    """

    def __init__(self, root: str | Path, base: str | Path, keep: int = 2) -> None:
        self.root, self.base, self.keep = Path(root), Path(base), keep
        self.layout = CheckpointLayout.from_config(load_hf_config(base))
        self._partial: Path | None = None
        self._whole: tuple[str, str] | None = None
        self._files: dict[str, dict[str, Any]] = {}
        self._places: dict[str, str] = {}
        self._pieces: dict[str, list[Tensor]] = {}

    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        return new_buffer(index, size, device)

    def send(self, bucket: Bucket, spec: BucketSpec, engines: list[Engine]) -> list[str]:
        """Write a bucket; after the last one the version appears and the engines read it.

        Raises:
            WeightSyncError: the disk is full or cannot be written. The version does not appear, and others stay.
        """
        bucket.wait()
        directory = self.root / f"v{spec.version}"
        try:
            # A bucket comes again where an engine has lost it behind its check; here it lies in a file.
            if self._whole != (spec.run_id, spec.version):
                if bucket.index == 0:
                    self._begin(spec)
                self._write(bucket.index, bucket.data.cpu(), spec.placements)
                if not spec.last:
                    return [""] * len(engines)
                self._complete(spec, directory)
        except OSError as error:
            self.release()
            held = ", ".join(f"v{n}" for n in versions(self.root)) or "none"
            raise WeightSyncError(
                f"version {spec.version} cannot be written to {self.root}: {error.strerror}; complete there: {held}"
            ) from error
        return fan_out(engines, lambda engine: _tell(engine, spec, directory))

    def release(self) -> None:
        """Drop a version that was not completed."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._partial, self._whole, self._files, self._places, self._pieces = None, None, {}, {}, {}

    def close(self) -> None:
        self.release()

    def _begin(self, spec: BucketSpec) -> None:
        self.release()
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.glob(".v*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.root.glob(".v*.replaced"):
            whole = self.root / left.name.removeprefix(".").removesuffix(".replaced")
            # A writer that was killed between two renames has left no other copy.
            if whole.exists():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.rename(whole)
        self._partial = self.root / f".v{spec.version}.partial"
        self._partial.mkdir()
        for file in sorted(self.base.iterdir()):
            if (
                file.is_file()
                and "safetensors" not in file.name
                and file.name != INDEX
                and not file.name.startswith(".")
            ):
                self._add(file.name, file.read_bytes())

    def _write(self, index: int, data: Tensor, placements: list[Placement]) -> None:
        """The tensors of a bucket under their published names; one that goes on in the next bucket waits for it."""
        tensors: dict[str, Tensor] = {}
        for placement in placements:
            rows = view(data, placement)
            if _EXPERTS.search(placement.name):
                tensors |= _experts(placement, rows)
                continue
            shape = self.layout.wire[placement.name].shape
            if placement.shape == shape:
                tensors[placement.name] = rows
                continue
            pieces = self._pieces.setdefault(placement.name, [])
            pieces.append(rows.clone())
            if sum(map(len, pieces)) == shape[0]:
                tensors[placement.name] = torch.cat(self._pieces.pop(placement.name))
        name = f"model-{index:05}.safetensors"
        if tensors:
            made = {n: t.contiguous() for n, t in tensors.items()}
            self._add(name, save(made, metadata={"format": "pt"}))
            self._places |= dict.fromkeys(made, name)

    def _add(self, name: str, content: bytes) -> None:
        assert self._partial is not None
        with (self._partial / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = {"bytes": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}

    def _complete(self, spec: BucketSpec, directory: Path) -> None:
        assert self._partial is not None
        index = {"metadata": {}, "weight_map": self._places}
        self._add("model.safetensors.index.json", json.dumps(index, indent=1, sort_keys=True).encode())
        content = {"version": spec.version, "run_id": spec.run_id, "files": dict(self._files)}
        self._add(INDEX, json.dumps(content, indent=1).encode())
        replaced = self.root / f".v{spec.version}.replaced"
        if directory.exists():
            directory.rename(replaced)
        self._partial.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync(self.root)
        self._partial, self._whole = None, (spec.run_id, spec.version)
        for number in versions(self.root)[: -self.keep]:
            if number != int(spec.version):
                shutil.rmtree(self.root / f"v{number}", ignore_errors=True)


def _experts(placement: Placement, rows: Tensor) -> dict[str, Tensor]:
    """Published tensors of the experts from ``placement.start`` on."""
    shift = lambda name: re.sub(r"(\.mlp\.experts\.)(\d+)\.", lambda m: f"{m[1]}{int(m[2]) + placement.start}.", name)
    return {shift(name): tensor for name, tensor in split_experts([(placement.name, rows)])}


def _tell(engine: Any, spec: BucketSpec, directory: Path) -> str:
    """Only ``weight_sync.client.ServiceControl`` reads directories."""
    if not hasattr(engine, "send_directory"):
        raise WeightSyncError(f"engine {engine.url} cannot read a directory; use ServiceControl")
    return engine.send_directory(spec.run_id, spec.version, directory)


def versions(root: str | Path) -> list[int]:
    """Complete versions below ``root``, oldest first."""
    path = Path(root)
    found = [_NAME.match(d.name) for d in path.iterdir() if (d / INDEX).is_file()] if path.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def verify(directory: str | Path) -> dict[str, Any] | None:
    """Read every file of a version and compare it with the index.

    Returns:
        The index; None for a checkpoint that has none, which was not written here.

    Raises:
        WeightSyncError: a file is missing or differs, or the index is none.
    """
    path = Path(directory)
    if not (path / INDEX).is_file():
        return None
    index = _index(path / INDEX, "files", _checksummed)
    for name, expected in index["files"].items():
        digest, size = xxhash.xxh3_128(), 0
        try:
            with (path / name).open("rb") as file:
                while chunk := file.read(READ_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
        except (OSError, ValueError) as error:  # a ValueError for names that the file system cannot have
            raise WeightSyncError(f"{path / name} cannot be read: {error}") from error
        if (size, digest.hexdigest()) != (expected["bytes"], expected["xxh3"]):
            raise WeightSyncError(
                f"{path / name} is damaged: it is not what version {index.get('version')} was written with"
            )
    extra = {file.name for file in path.glob("*.safetensors")} - index["files"].keys()
    if extra:
        raise WeightSyncError(f"{path} has {min(extra)}, which is not part of version {index.get('version')}")
    return index


def headers(directory: str | Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of every tensor of a checkpoint, without its bytes.

    Raises:
        WeightSyncError: there are no safetensors files, or one cannot be read.
    """
    for file in weight_files(directory):
        with _opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118  (safe_open is not a mapping)
                part = reader.get_slice(name)
                yield name, tuple(part.get_shape()), DTYPES.get(part.get_dtype(), torch.uint8)


def tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, file by file; no code of it runs.

    Raises:
        WeightSyncError: as ``headers``.
    """
    for file in weight_files(directory):
        with _opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118
                yield name, reader.get_tensor(name)


def weight_files(directory: str | Path) -> list[Path]:
    """Safetensors files of a checkpoint; those of its index, if it has one.

    Raises:
        WeightSyncError: there are none, or one of the index is missing, or the index is none.
    """
    path = Path(directory)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_index(index, "weight_map", _is_inside)["weight_map"].values()))
        if lost := [n for n in names if not os.path.isfile(path / n)]:
            raise WeightSyncError(f"checkpoint {path} lacks {lost[0]}, which its index names; copy it again")
        return [path / name for name in names]
    if not (files := sorted(path.glob("*.safetensors"))):
        raise WeightSyncError(f"{path} has no *.safetensors file; pass a Hugging Face checkpoint directory")
    return files


def _index(file: Path, key: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """An index file of a checkpoint, whose ``key`` is an object of names.

    Args:
        fits: whether a value of that object can be right.

    Raises:
        WeightSyncError: it is no JSON object, lacks the key, says something else there, or names a file outside of the
            checkpoint.
    """
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError("it is no JSON object")
        if key not in index:
            raise ValueError(f"it lacks {key!r}")
        if not isinstance(index[key], dict) or not index[key]:
            raise ValueError(f"its {key}={index[key]!r} is no object with names of files")
        for name, value in index[key].items():
            if not fits(value) or (key == "files" and not _is_inside(name)):
                raise ValueError(f"its {key} has {name!r}: {value!r}")
    except (ValueError, RecursionError, OSError) as error:
        raise WeightSyncError(f"{file} is damaged: {error}; copy the checkpoint again") from error
    return index


def _is_inside(name: Any) -> bool:
    """The name of a file that does not lead out of its directory. It may be a link, as in the hub's cache."""
    return isinstance(name, str) and name != "" and not Path(name).is_absolute() and ".." not in Path(name).parts


def _checksummed(entry: Any) -> bool:
    """What ``DirectoryTransport`` writes of a file."""
    found = entry if isinstance(entry, dict) else {}
    return is_whole(found.get("bytes"), 0, sys.maxsize) and isinstance(found.get("xxh3"), str)


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Names of dtypes in a safetensors header; what is not a float counts as uint8, which no engine takes."""


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file of tensors; what cannot be read of it within the block is a WeightSyncError."""
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except Exception as error:  # safetensors has its own error classes for every kind of damage
        raise WeightSyncError(f"{file} cannot be read: {error}") from error


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
