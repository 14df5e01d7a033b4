"""SGLang's HTTP server with the rollout service on it.

    python -m rollout.server --model-path DIR --dllm-algorithm SelectThenSample [any flag of SGLang's server]

Every endpoint of SGLang stays as it is. New are ``POST /rollout/generate`` and ``/rollout/abort``
(docs/rollout_service.md). What the preflight refuses is printed before anything is loaded; the exit status is 2 then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dllm.config import ConfigError


def device_of(argv: Sequence[str]) -> str | None:
    """Value of ``--device``, which decides about the environment before SGLang is imported."""
    for index, part in enumerate(argv):
        if part.startswith("--device="):
            return part.partition("=")[2]
        if part == "--device" and index + 1 < len(argv):
            return argv[index + 1]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    from rollout.plugin import cpu

    if device_of(argv) == "cpu":
        os.environ.update(cpu.cpu_environment())
    cpu.prepare_environment()
    from rollout.plugin import http

    try:
        http.serve(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
