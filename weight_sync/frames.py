"""A bucket as the body of a request: 8 bytes length of the header (little-endian), the header as JSON, the bytes."""

from __future__ import annotations

import json
from typing import Any

import torch

from weight_sync.buckets import Placement
from weight_sync.gate import Rejected
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec, Manifest
from weight_sync.staging import StagingError

HEADER_BYTES = 64 << 20
"""Largest header of a bucket; one of LLaDA2-mini's takes a few kilobytes."""


TYPES = {
    "run_id": (str,),
    "version": (str,),
    "index": (int,),
    "last": (bool,),
    "checksum": (str,),
    "file": (str, type(None)),
    "slot": (int, type(None)),
    "nbytes": (int,),
}
"""Types of the fields of a bucket's header, besides its placements; a bool is no int here."""


def take_header(buffer: bytearray) -> dict[str, Any] | None:
    """Take the header from the beginning of a bucket's body; None if it has not arrived yet."""
    if len(buffer) < 8:
        return None
    length = int.from_bytes(buffer[:8], "little")
    if length > HEADER_BYTES:
        raise StagingError(f"a bucket's header has {length} bytes, at most {HEADER_BYTES} are taken")
    if len(buffer) < 8 + length:
        return None
    try:
        header = json.loads(bytes(buffer[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise StagingError(f"the header of the bucket is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise StagingError("the header of the bucket is not an object")
    del buffer[: 8 + length]
    return header


def frame(header: str) -> bytes:
    """What comes before a bucket's bytes."""
    encoded = header.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def bucket_spec(raw: dict, placed: bool = False) -> BucketSpec:
    """A bucket's header from JSON of a stranger.

    Args:
        placed: keep where its bytes lie on this host; otherwise they follow the header.

    Raises:
        StagingError: a field is missing or of another type.
    """
    try:
        spec = BucketSpec.from_dict({k: v for k, v in raw.items() if placed or k not in ("file", "slot")})
        for placement in spec.placements:
            _check_placement(placement)
        wrong = [name for name, kind in TYPES.items() if type(getattr(spec, name)) not in kind]
        if wrong:
            raise TypeError(f"{wrong[0]} is {getattr(spec, wrong[0])!r}")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise StagingError(f"the header of the bucket is not one: {error}") from error
    return spec


def check_manifest(manifest: Manifest, layout: CheckpointLayout) -> None:
    """Refuse an update whose tensors are not those of the engine.

    Raises:
        Rejected: with an example.
    """
    sent, mine = set(manifest.tensors), set(layout.tensors())
    if sent != mine or len(manifest.tensors) != len(mine):
        wrong = sorted(sent ^ mine)
        example = f"e.g. {wrong[0]}" if wrong else "one is listed twice"
        raise Rejected(422, f"{len(wrong)} tensors of the manifest are not those of this engine, {example}")
    if manifest.nbytes != layout.nbytes:
        raise Rejected(422, f"nbytes={manifest.nbytes} of the manifest are not those of its tensors")


def _check_placement(placement: Placement) -> None:
    sizes = (*placement.shape, placement.offset, placement.start)
    if not all(type(n) is int and n >= 0 for n in sizes) or not isinstance(placement.torch_dtype, torch.dtype):
        raise ValueError(f"placement {placement}")
    if not isinstance(placement.name, str):
        raise TypeError(f"the name {placement.name!r} is no string")
