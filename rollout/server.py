"""SGLang's HTTP server with the rollout service on it.

    python -m rollout.server --model-path DIR --dllm-algorithm SelectThenSample [any flag of SGLang's server]

Every endpoint of SGLang stays as it is. New are ``POST /rollout/generate`` and ``/rollout/abort``
(docs/rollout_service.md). What the preflight refuses is printed before anything is loaded; the exit status is 2 then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from dllm.config import ConfigError
from rollout.backends import default_device


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Value of a flag on the command line."""
    for index, part in enumerate(argv):
        if part.startswith(f"{flag}="):
            return part.partition("=")[2]
        if part == flag and index + 1 < len(argv):
            return argv[index + 1]
    return None


def device_of(argv: Sequence[str]) -> str | None:
    """Value of ``--device``, on the command line or in the ``--config`` file.

    It decides about the environment before SGLang, which reads that file, is imported.
    """
    device, file = value_of("--device", argv), value_of("--config", argv)
    if device is None and file is not None:
        # A file that cannot be read is SGLang's to refuse, a moment later and with its reason.
        with suppress(OSError, yaml.YAMLError, UnicodeDecodeError, AttributeError):
            device = yaml.safe_load(Path(file).read_text(encoding="utf-8")).get("device")
    return device


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    from rollout.plugin import cpu

    # As in rollout.generate; the preflight sets the flag, and says so.
    if (device_of(argv) or default_device()) == "cpu":
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
