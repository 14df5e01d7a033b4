"""Encodings of an answer: JSON, and msgpack with the per-token numbers as packed arrays.

In msgpack a list of numbers under one of ``PACKED`` becomes an extension of type 1: one byte of dtype, then the
values, little-endian. Both decode to the same Python objects; floats are the engine's float32 in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

JSON, MSGPACK, EVENTS = "application/json", "application/msgpack", "text/event-stream"

PACKED: Mapping[str, str] = {
    "input_ids": "<i4",
    "output_ids": "<i4",
    "ids": "<i4",
    "reveal_step": "<i2",
    "steps_per_block": "<i4",
    "logprob": "<f4",
    "logprob_raw": "<f4",
    "confidence": "<f4",
}
_DTYPES = ("<i2", "<i4", "<f4")
_EXTENSION = 1


def _pack(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _pack_field(name, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    return value


def _pack_field(name: str, value: Any) -> Any:
    dtype = PACKED.get(name)
    if dtype is None or not isinstance(value, list) or not all(type(v) in (int, float) for v in value):
        return _pack(value)
    return msgpack.ExtType(_EXTENSION, bytes([_DTYPES.index(dtype)]) + np.asarray(value, dtype).tobytes())


def _unpack(code: int, data: bytes) -> Any:
    if code != _EXTENSION or not data or data[0] >= len(_DTYPES):
        raise ValueError(f"msgpack extension {code} is not one of this service")
    return np.frombuffer(data[1:], _DTYPES[data[0]]).tolist()


def encode_msgpack(value: Any) -> bytes:
    return msgpack.packb(_pack(value))


def decode_msgpack(data: bytes) -> Any:
    """Inverse of ``encode_msgpack``.

    Raises:
        ValueError: not msgpack, or an extension that is not ours.
    """
    return msgpack.unpackb(data, ext_hook=_unpack)


def msgpack_stream() -> msgpack.Unpacker:
    """A decoder of concatenated messages: ``feed`` bytes, iterate over what is complete."""
    return msgpack.Unpacker(ext_hook=_unpack)


def encode_json(value: Any) -> bytes:
    """JSON in UTF-8; numbers that JSON has no word for are an error."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def encode(value: Any, media_type: str) -> bytes:
    return encode_msgpack(value) if media_type == MSGPACK else encode_json(value)


def decode(data: bytes, media_type: str) -> Any:
    """The object in ``data``.

    Raises:
        ValueError: the bytes are not of that type.
    """
    return decode_msgpack(data) if media_type.startswith(MSGPACK) else json.loads(data)
