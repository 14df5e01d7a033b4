"""Requests that schemathesis makes from the server's own OpenAPI description."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from dllm.config import ConfigError
from recipes.stress.malformed import Attempt

DECODING = (
    "/generate", "/encode", "/classify", "/v1/", "/api/", "/invocations", "/vertex_generate", "/rollout/",
    "/parse_function_call", "/separate_reasoning", "/open_session", "/close_session",
)  # fmt: skip
"""What anyone may call; the other operations are the administrator's or say how the server is."""

OTHERS = 10
"""Requests to each operation that is none of ``DECODING``; an administrator's refuses them without its key."""

COVERED, DRAWN = 2000, 60
"""Cases of one operation at most: each property at its borders and beyond, and drawn at random."""


def described(
    description: Mapping[str, Any], count: int, seed: int, paths: tuple[str, ...] = DECODING, random_cases: int = DRAWN
) -> list[Attempt]:
    """``count`` requests, each operation with about the same number; fewer if there are no more.

    Args:
        description: the server's ``/openapi.json``.
        paths: what the paths of the operations begin with. ``("/",)``, all of them, is for a server with an
            administrator's key: without one, its operations would take effect.
        random_cases: of one operation at most.

    Raises:
        ConfigError: schemathesis is not installed.
    """
    try:
        import schemathesis
    except ImportError as error:
        raise ConfigError(f"{error}; install the group dev, or pass --described 0 to leave its requests out") from error
    rng = random.Random(seed)
    schema = schemathesis.openapi.from_dict(dict(description))
    pools: list[list[Attempt]] = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if not operation.path.startswith(paths):
            continue
        fields = fields_of(description, operation.path, operation.method)
        pool = list(islice(covered(schema, operation), COVERED))
        if operation.path.startswith(DECODING):
            pool += drawn(operation, seed, random_cases)
            rng.shuffle(pool)
        else:
            pool = rng.sample(pool, min(OTHERS, len(pool)))
        pools.append([replace(attempt, fields=fields) for attempt in pool])
    made = list(islice(round_robin(pools), count))
    rng.shuffle(made)
    return made


def fields_of(description: Mapping[str, Any], path: str, method: str) -> frozenset[str]:
    """Names of the fields of an operation's body and query."""
    operation = description["paths"][path][method.lower()]
    names = {parameter["name"] for parameter in operation.get("parameters", [])}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content.get("schema", {})
        named = description.get("components", {}).get("schemas", {}).get(schema.get("$ref", "").rpartition("/")[2], {})
        names |= {*schema.get("properties", {}), *named.get("properties", {})}
    return frozenset(names)


def round_robin(pools: list[list[Attempt]]) -> Iterator[Attempt]:
    """One of each, as long as there are any."""
    for turn in range(max(map(len, pools), default=0)):
        yield from (pool[turn] for pool in pools if turn < len(pool))


def covered(schema: Any, operation: Any) -> Iterator[Attempt]:
    """Every property at its borders, beyond them, of other types and missing; the same each time."""
    from schemathesis import GenerationMode

    config = schema.config.generation_for(operation=operation, phase="coverage")
    modes = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]
    for case in schema.iter_coverage_cases(operation=operation, generation_modes=modes, generation_config=config):
        if case.method == operation.method.upper():
            yield attempt_of(case, "described, at borders")


def drawn(operation: Any, seed: int, count: int) -> list[Attempt]:
    """Random bodies that the description allows."""
    import hypothesis
    from schemathesis import GenerationMode

    made: list[Attempt] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def collect(case: Any) -> None:
        made.append(attempt_of(case, "described, at random"))

    collect()
    return made


def attempt_of(case: Any, kind: str) -> Attempt:
    """The bytes schemathesis would send."""
    import requests

    names = ("method", "url", "headers", "params", "data", "json", "files", "cookies")
    given = {k: v for k, v in case.as_transport_kwargs("http://server").items() if k in names}
    request = requests.Request(**given).prepare()
    left_to_the_client = ("user-agent", "accept-encoding", "connection", "content-length", "x-schemathesis-testcaseid")
    headers = {k: v for k, v in request.headers.items() if k.lower() not in left_to_the_client}
    body = request.body or b""
    content = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    return Attempt(kind, str(request.path_url), content, headers, method=str(request.method))
