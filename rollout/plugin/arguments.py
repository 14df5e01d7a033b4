"""The server's command line, read with SGLang's own parser and without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def parser() -> argparse.ArgumentParser:
    """SGLang's parser of server flags."""
    from rollout.plugin.cpu import prepare_environment

    prepare_environment()
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(prog="python -m rollout.preflight", description="Check the flags of a server.")
    ServerArgs.add_cli_args(made)
    return made


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Flags that were given, by their names in ``ServerArgs``, and the preflight's own options.

    A flag with its default value counts as not given.
    """
    made = parser()
    defaults = vars(made.parse_args(["--model-path", "."]))
    group = made.add_argument_group("preflight")
    group.add_argument("--json", action="store_true", help="one JSON object instead of text")
    group.add_argument("--training", action="store_true", help="the engine will serve a trainer")
    group.add_argument("--gpu-memory-gb", type=float, metavar="GB", help="plan for a GPU of this size (1e9 bytes)")
    values = made.parse_args(list(argv))
    given = {name: value for name, value in vars(values).items() if name in defaults and value != defaults[name]}
    return {"model_path": values.model_path, **given}, values
