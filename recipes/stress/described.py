"""Requests that schemathesis makes from the server's own OpenAPI description."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
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


def described(description: Mapping[str, Any], count: int, seed: int, admin: bool) -> list[Attempt]:
    """``count`` requests, each operation with about the same number.

    Args:
        description: the server's ``/openapi.json``.
        admin: also the operations outside ``DECODING``. Only for a server with an administrator's key: without one
            they would take effect.

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
        open_to_all = operation.path.startswith(DECODING)
        if not open_to_all and not admin:
            continue
        pool = list(islice(covered(schema, operation), COVERED))
        if open_to_all:
            pool += drawn(operation, seed)
        rng.shuffle(pool)
        pools.append(pool if open_to_all else pool[:OTHERS])
    made = list(islice(round_robin(pools), count))
    rng.shuffle(made)
    return made


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


def drawn(operation: Any, seed: int) -> list[Attempt]:
    """Random bodies that the description allows."""
    import hypothesis
    from schemathesis import GenerationMode

    made: list[Attempt] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=DRAWN,
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
