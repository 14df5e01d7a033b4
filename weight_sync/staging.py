"""Where the buckets of an update wait until the engine takes them: files in memory, or on disk where that is short."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash

from weight_sync.buckets import view
from weight_sync.checksum import TensorSums, origin, same_checksum
from weight_sync.messages import BucketSpec, Manifest

PREFIX = "weight_staging_"

ROOTS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
"""Where staging areas are made, the first that has room."""

SPARE = 1.05
"""Room that an update takes for each byte of its tensors: buckets are padded."""


ROUNDING = 1 << 20
"""Room for the padding of small updates, in bytes."""


class StagingError(RuntimeError):
    """There is no room for an update, or a bucket did not arrive as it was sent.

    Attributes:
        full: it is a matter of room.
        damaged: index of a bucket that was right when it arrived and is not any more.
    """

    def __init__(self, message: str, full: bool = False, damaged: int | None = None) -> None:
        super().__init__(message)
        self.full, self.damaged = full, damaged


class Staging:
    """Buckets of one update, in files that vanish with it.

    Args:
        manifest: of the update.
        roots: directories to choose from.

    Raises:
        StagingError: none of them has room for the update.
    """

    def __init__(self, manifest: Manifest, roots: Sequence[Path] = ROOTS) -> None:
        self.manifest = manifest
        self.specs: dict[int, BucketSpec] = {}
        sweep(roots)
        need = int(manifest.nbytes * SPARE) + ROUNDING
        room = {root: shutil.disk_usage(root).free for root in roots if root.is_dir()}
        chosen = next((root for root, free in room.items() if free > need), None)
        if chosen is None:
            found = ", ".join(f"{root} has {free:,}" for root, free in room.items())
            raise StagingError(f"an update of {need:,} bytes needs room: {found}; free some of it", full=True)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_", dir=chosen))

    def file(self, index: int) -> Path:
        return self.directory / f"{index}.bin"

    def writer(self, spec: BucketSpec) -> BucketWriter:
        """Takes the bytes of a bucket as they come."""
        return BucketWriter(self, spec)

    def check(self, spec: BucketSpec) -> None:
        """Refuse a bucket whose tensors are not those of the manifest, before its bytes are taken.

        Raises:
            StagingError: it names an unknown tensor, other rows or another dtype, or its tensors overlap.
        """
        if not 0 <= spec.nbytes <= self.manifest.nbytes * SPARE + ROUNDING:
            raise StagingError(f"bucket {spec.index} has {spec.nbytes:,} bytes, all tensors {self.manifest.nbytes:,}")
        known = {name: (shape, dtype) for name, shape, dtype in self.manifest.tensors}
        end = 0
        for placement in sorted(spec.placements, key=lambda p: p.offset):
            shape, dtype = known.get(placement.name, ((), ""))
            rows = placement.shape[0] if placement.shape else 1
            inside = placement.start >= 0 and placement.start + rows <= (shape or (1,))[0]
            fits = placement.dtype == dtype and placement.shape[1:] == tuple(shape)[1:] and inside
            if not fits or len(placement.shape) != len(shape):
                raise StagingError(
                    f"bucket {spec.index}: tensor {placement.name!r} {placement.dtype} {placement.shape} from row "
                    f"{placement.start} is not in the manifest"
                )
            if placement.offset < end or placement.offset + placement.nbytes > spec.nbytes:
                raise StagingError(f"bucket {spec.index}: tensor {placement.name!r} does not lie within the bucket")
            end = placement.offset + placement.nbytes

    def verify(self) -> str:
        """Read everything that is here, and check that it is the whole of the manifest in the order of its rows.

        Returns:
            The checksum of all tensors (16 hex digits), which the engine has to arrive at.

        Raises:
            StagingError: a tensor is missing, twice there or cut in another order, or a file is damaged.
        """
        rows: dict[str, int] = {}
        sums = TensorSums()
        for index in sorted(self.specs):
            spec = self.specs[index]
            file = self.file(index)
            data = torch.from_numpy(np.fromfile(file, dtype=np.uint8) if file.exists() else np.zeros(0, np.uint8))
            if data.numel() != spec.nbytes or not same_checksum(data, spec.placements, spec.checksum):
                raise StagingError(f"bucket {index} was damaged in {self.directory}; send it again", damaged=index)
            for placement in spec.placements:
                if placement.start != rows.get(placement.name, 0):
                    raise StagingError(f"rows of tensor {placement.name!r} are twice there or out of order")
                rows[placement.name] = placement.start + (placement.shape[0] if placement.shape else 1)
                sums.add(placement.name, view(data, placement), origin(placement))
        missing = [name for name, shape, _ in self.manifest.tensors if rows.get(name, 0) != (tuple(shape) or (1,))[0]]
        if missing:
            raise StagingError(f"{len(missing)} tensors never arrived, e.g. {missing[0]!r}")
        return f"{sums.value():016x}"

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class BucketWriter:
    """One bucket on its way into a file, which gets its name when the bytes were found to be right."""

    def __init__(self, staging: Staging, spec: BucketSpec) -> None:
        self.staging, self.spec = staging, spec
        self.partial = staging.directory / f"{spec.index}.{os.urandom(4).hex()}.part"
        self.digest, self.size = xxhash.xxh3_128(), 0

    def write(self, chunk: bytes | memoryview) -> None:
        """Raises ``StagingError``: there is no room, or there are more bytes than announced."""
        self.size += len(chunk)
        if self.size > self.spec.nbytes:
            raise StagingError(f"bucket {self.spec.index} has more than the {self.spec.nbytes} bytes announced")
        try:
            with self.partial.open("ab") as file:
                file.write(chunk)
        except OSError as error:
            raise StagingError(
                f"bucket {self.spec.index} cannot be written to {self.staging.directory}: {error.strerror}", full=True
            ) from error
        self.digest.update(chunk)

    def finish(self) -> None:
        """Raises ``StagingError``: bytes are missing or wrong."""
        if self.size != self.spec.nbytes:
            raise StagingError(f"bucket {self.spec.index} has {self.size} of {self.spec.nbytes} bytes")
        if self.spec.checksum != f"xxh3:{self.digest.hexdigest()}":
            raise StagingError(f"bucket {self.spec.index} was damaged on the way")
        self.partial.touch()
        self.partial.rename(self.staging.file(self.spec.index))
        self.staging.specs[self.spec.index] = self.spec

    def take(self, content: bytes | memoryview) -> None:
        """All bytes at once."""
        try:
            self.write(content)
            self.finish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop what was written; nothing is left to drop after ``finish``."""
        self.partial.unlink(missing_ok=True)


def sweep(roots: Sequence[Path] = ROOTS, prefix: str = PREFIX) -> None:
    """Remove what processes of this host that were killed left behind, in directories ``<prefix><pid>_…``."""
    for root in roots:
        for directory in root.glob(f"{prefix}*"):
            pid = directory.name.removeprefix(prefix).partition("_")[0]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(directory, ignore_errors=True)
