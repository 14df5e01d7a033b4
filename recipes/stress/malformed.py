"""Requests that no careful client sends, drawn at random, for every endpoint that decodes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

JSON = {"Content-Type": "application/json"}
NAN, INFINITY = float("nan"), float("inf")

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, -(1 << 63), 1 << 70, 0.5, -0.0, 1e308, NAN, INFINITY, -INFINITY,
    "", "a", "\x00", "\ud7ff", "é" * 50, "<|endoftext|>", "0", [], [[]], [None], {}, {"a": {"b": []}}, [1, "a"],
    "(", r"(.|.|\s)*Z{3}Q",
)  # fmt: skip

FIELDS = {
    "/rollout/generate": ("prompts", "n", "sampling_params", "step", "seed", "stream", "deadline_s", "rid", "routing"),
    "/generate": ("text", "input_ids", "sampling_params", "stream", "rid", "return_logprob", "top_logprobs_num"),
    "/v1/completions": (
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "stop_regex",
        "stream",
        "seed",
        "logit_bias",
    ),
    "/v1/chat/completions": ("messages", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "tools"),
    "/rollout/abort": ("rid",),
}
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "n",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "json_schema", "regex", "ebnf",
    "skip_special_tokens", "sampling_seed", "stop_regex", "no such parameter",
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """One request: what is odd about it, where it goes, its bytes.

    Attributes:
        hang_up: read the first bytes of the answer and close the connection.
        fields: what its endpoint takes, where the server's description says so.
    """

    kind: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    hang_up: bool = False
    method: str = "POST"
    fields: frozenset[str] = frozenset()


def good_body(rng: random.Random, path: str, info: dict[str, Any]) -> dict[str, Any]:
    """A request that would be answered."""
    usable = [t for t in range(6, min(info["vocab_size"], 250)) if t != info["mask_id"]]
    ids = [rng.choice(usable) for _ in range(rng.choice((1, 2, 31, 32, 33, 70)))]
    params = {"max_new_tokens": rng.choice((1, 5, 32, 40)), "temperature": rng.choice((0, 1))}
    return {
        "/rollout/generate": {"prompts": [{"input_ids": ids}], "seed": 1, "sampling_params": params},
        "/generate": {"input_ids": ids, "sampling_params": params},
        "/v1/completions": {"model": "m", "prompt": "12 + 3 =", "max_tokens": 5},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "7 + 8 ="}], "max_tokens": 5},
        "/rollout/abort": {"rid": "nobody"},
    }[path]


def dump(body: Any) -> bytes:
    """JSON as careless clients write it, NaN included."""
    return json.dumps(body).encode("utf-8", "surrogatepass")


def odd_field(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    body = good_body(rng, path, info) | {rng.choice(FIELDS[path]): rng.choice(ODD)}
    return Attempt("odd field", path, dump(body))


def missing_field(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    body = good_body(rng, path, info)
    body.pop(rng.choice(sorted(body)))
    return Attempt("missing field", path, dump(body))


def odd_sampling(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    body = good_body(rng, path, info)
    target = body.get("sampling_params", body)
    for name in rng.sample(SAMPLING, rng.choice((1, 1, 2))):
        target[name] = rng.choice(ODD)
    return Attempt("odd sampling", path, dump(body))


def odd_prompt(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    vocab, mask, context = info["vocab_size"], info["mask_id"], info["context_length"]
    ids = rng.choice(
        (
            [],
            [7],
            [mask],
            [7, mask, 8],
            [vocab],
            [-1],
            [1 << 40],
            [7] * (context - 1),
            [7] * (context + 1),
            [7.5],
            ["7"],
        )
    )
    text = rng.choice(("", " ", "\x00", "x" * 10_000, "é" * 3000, "<|mask|>", "\n" * 500))
    body = good_body(rng, path, info)
    if path == "/rollout/generate":
        body["prompts"] = [rng.choice(({"input_ids": ids}, {"text": text}, {"resume": [{"input_ids": ids}]}, {}))]
    elif path == "/generate":
        del body["input_ids"]
        body |= rng.choice(({"input_ids": ids}, {"text": text}, {"input_ids": [ids, ids]}, {"text": [text, ""]}))
    elif path == "/v1/completions":
        body["prompt"] = rng.choice((text, ids, [text], [ids]))
    elif path == "/v1/chat/completions":
        body["messages"] = rng.choice(
            ([], [{}], [{"role": "nobody", "content": text}], [{"role": "user", "content": ids}], [{"role": "user"}])
        )
    return Attempt("odd prompt", path, dump(body))


def garbage(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    body = dump(good_body(rng, path, info))
    cut = rng.randrange(len(body))
    made = rng.choice((body[:cut], body[:cut] + b"\xff" + body[cut:], b"", b"null", b"[" * 2000, rng.randbytes(100)))
    kind = rng.choice((*[JSON] * 4, {"Content-Type": "text/plain"}, {"Content-Type": "application/msgpack"}, {}))
    return Attempt("garbage", path, made, dict(kind))


def huge(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    """A megabyte of text."""
    text = rng.choice("a0 é") * (1 << 20)
    body = {
        "/rollout/generate": {"prompts": [{"text": text}]},
        "/generate": {"text": text},
        "/v1/completions": {"model": "m", "prompt": text},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": text}]},
        "/rollout/abort": {"rid": text},
    }[path]
    return Attempt("huge", path, dump(body))


def same_rid(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    body = good_body(rng, path, info)
    if path in ("/rollout/generate", "/generate", "/rollout/abort"):
        body["rid"] = "the same"
    return Attempt("same rid", path, dump(body))


def hang_up(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    path = rng.choice(("/rollout/generate", "/generate", "/v1/completions", "/v1/chat/completions"))
    body = good_body(rng, path, info) | {"stream": True}
    if "sampling_params" in body:
        body["sampling_params"] |= {"max_new_tokens": 500, "ignore_eos": True}
    return Attempt("hang up", path, dump(body), hang_up=True)


def fine(rng: random.Random, path: str, info: dict[str, Any]) -> Attempt:
    return Attempt("fine", path, dump(good_body(rng, path, info)))


KINDS: tuple[tuple[Callable[[random.Random, str, dict[str, Any]], Attempt], int], ...] = (
    (odd_field, 25),
    (missing_field, 8),
    (odd_sampling, 25),
    (odd_prompt, 20),
    (garbage, 10),
    (same_rid, 4),
    (hang_up, 4),
    (fine, 3),
    (huge, 1),
)
"""How often each kind is drawn."""


def attempts(rng: random.Random, count: int, info: dict[str, Any]) -> Iterator[Attempt]:
    """``count`` attempts.

    Args:
        info: what ``GET /rollout/info`` answered.
    """
    makers, weights = zip(*KINDS, strict=True)
    for _ in range(count):
        (make,) = rng.choices(makers, weights)
        yield make(rng, rng.choice(tuple(FIELDS)), info)
