"""The server's command line, read with SGLang's own parser and without starting anything."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from dllm.config import ConfigError


def parser() -> argparse.ArgumentParser:
    """SGLang's parser of server flags."""
    from rollout.plugin.cpu import prepare_environment

    prepare_environment()
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(prog="python -m rollout.preflight", description="Check the flags of a server.")
    ServerArgs.add_cli_args(made)
    return made


def merged(made: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The command line with the flags of its ``--config`` file in it, as SGLang's server reads them.

    Raises:
        ConfigError: the file cannot be read as flags.
    """
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    try:
        return ConfigArgumentMerger(made).merge_config_with_args(list(argv))
    except Exception as error:  # SGLang's and YAML's own
        raise ConfigError(f"config: {' '.join(str(error).split())}; pass one YAML file of server flags") from error


def gigabytes(text: str) -> float:
    """A positive finite number.

    Raises:
        ValueError: it is not.
    """
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Flags that were given, by their names in ``ServerArgs``, and the preflight's own options.

    A flag with its default value counts as not given.

    Raises:
        ConfigError: a ``--config`` file cannot be read.
    """
    made = parser()
    defaults = vars(made.parse_args(["--model-path", "."]))
    group = made.add_argument_group("preflight")
    group.add_argument("--json", action="store_true", help="one JSON object instead of text")
    group.add_argument("--training", action="store_true", help="the engine will serve a trainer")
    group.add_argument("--gpu-memory-gb", type=gigabytes, metavar="GB", help="plan for a GPU of this size (1e9 bytes)")
    values = made.parse_args(merged(made, argv))
    given = {name: value for name, value in vars(values).items() if name in defaults and value != defaults[name]}
    return {"model_path": values.model_path, **given}, values
