"""What a block-diffusion model needs beyond its architecture: block size, mask id, stop ids.

Published checkpoints rarely name them (LLaDA2.0-mini's config.json has none of the three), so they are
looked for in a fixed order, and where each was found is kept:

    flag > config.json > generation_config.json > tokenizer > published name > table of known architectures

Stop ids are the exception: without a flag they are those of all three files together, because the engine stops at any
of them. (SDAR's config.json names ``<|endoftext|>`` alone, its generation_config.json also the end of a chat turn.)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key, its value and the remedy."""


@dataclass(frozen=True)
class KnownArchitecture:
    """Defaults of a published model family, used when its files name nothing.

    Attributes:
        block_size: None where the family was published with several block sizes and no file says which.
        names: pattern of the published names of such a family. Its group ``block`` is the block size, 4 without it.
    """

    block_size: int | None
    mask_id: int
    eos_ids: tuple[int, ...]
    source: str
    names: re.Pattern[str] | None = None


# JetLM publishes SDAR with blocks of 4 and, as SDAR-*-b8 to -b64, of 8 to 64; their config.json are equal.
_SDAR_NAMES = re.compile(r"(?:^|--)(?:SDAR-(?:1\.7B|4B|8B|30B-A3B)-(?:Chat|Sci)(?:-b(?P<block>\d+))?|TraDo-[48]B-\w+)$")

KNOWN_ARCHITECTURES: Mapping[str, KnownArchitecture] = {
    "LLaDA2MoeModelLM": KnownArchitecture(32, 156895, (156892,), "inclusionAI/LLaDA2.0-mini"),
    "SDARForCausalLM": KnownArchitecture(None, 151669, (151643,), "JetLM/SDAR-8B-Chat", _SDAR_NAMES),
    "SDARMoeForCausalLM": KnownArchitecture(None, 151669, (151643,), "JetLM/SDAR-30B-A3B-Chat", _SDAR_NAMES),
}

# Names under which published configs spell each setting.
_BLOCK_SIZE_KEYS = ("block_size", "block_length")
_MASK_KEYS = ("mask_token_id", "mask_id")
_EOS_KEYS = ("eos_token_id",)

MAX_SIZE = 1 << 24
"""What no size of a network exceeds. A file that says more is damaged, and a tensor of it could not be described."""

MAX_SIZES = {"num_hidden_layers": 512, "num_experts": 4096, "world_size": 1 << 16}
"""The same for what is made one by one in Python."""


@dataclass(frozen=True)
class BlockDiffusionConfig:
    """The three numbers every stage must agree on.

    Attributes:
        block_size: tokens per block on the absolute grid (block of position i is ``i // block_size``).
        mask_id: id of the mask token; it is an input of the model and never an output of a decoder.
        eos_ids: ids that end a response.
        architecture: first entry of ``architectures`` in config.json.
        sources: where each of the three was found, e.g. ``{"mask_id": "tokenizer mask_token"}``.
    """

    block_size: int
    mask_id: int
    eos_ids: tuple[int, ...]
    architecture: str
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def describe(self) -> str:
        """One line for the log: every value with its source."""
        return ", ".join(
            f"{name}={getattr(self, name)} ({self.sources.get(name, 'given')})"
            for name in ("block_size", "mask_id", "eos_ids")
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an empty one if there is no such file.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    try:
        if not path.is_file():
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise ConfigError(f"{path} is not valid JSON ({error}); restore the file from the checkpoint") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object; restore the file from the checkpoint")
    return found


def load_hf_config(model_dir: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face model directory.

    Raises:
        ConfigError: the directory or its config.json is missing, or cannot be read.
    """
    path = Path(model_dir)
    # isdir, unlike Path.is_dir, has an answer for names that are too long and for directories that nobody may enter.
    if not os.path.isdir(path):
        raise ConfigError(f"model path {str(model_dir)!r} is not a directory; pass a local Hugging Face checkpoint")
    config = read_json(path / "config.json")
    if not config:
        raise ConfigError(f"model path {str(model_dir)!r} has no config.json; pass a Hugging Face checkpoint directory")
    return config


def architecture_name(config: Mapping[str, Any]) -> str:
    """First entry of ``architectures`` in a config.json, "unknown" without one.

    Raises:
        ConfigError: it is not a list of names.
    """
    names = config.get("architectures")
    if names is None or names == []:
        return "unknown"
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise wrong_value(config, "architectures", "a list of names")
    return names[0]


def wrong_value(config: Mapping[str, Any], key: str, wanted: str, where: object = "config.json") -> ConfigError:
    """For a key of a checkpoint's file that is missing, or has a value that is not what is wanted."""
    found = "is missing" if (value := config.get(key)) is None else f"is {value!r}, not {wanted}"
    return ConfigError(f"{key} of {where} {found}; restore the file from the checkpoint")


def is_whole(value: Any, least: int, most: int = MAX_SIZE) -> bool:
    """An integer from ``least`` to ``most``; true and false, which Python counts as integers, are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def positive_int(config: Mapping[str, Any], key: str, least: int = 1, where: object = "config.json") -> int:
    """A size that a file of a checkpoint has.

    Args:
        where: the file, for the message.

    Raises:
        ConfigError: it is missing, or not an integer from ``least`` to ``MAX_SIZE`` (``MAX_SIZES`` of some keys).
    """
    value, most = config.get(key), MAX_SIZES.get(key, MAX_SIZE)
    if not is_whole(value, least, most):
        large = isinstance(value, int) and value > most
        wanted = f"at most {most}" if large else "a positive integer" if least == 1 else f"an integer from {least}"
        raise wrong_value(config, key, wanted, where)
    return config[key]


def attention_heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key-value heads and the size of a head, with what a config.json may leave out.

    Raises:
        ConfigError: a number is missing or wrong.
    """
    heads = positive_int(config, "num_attention_heads")
    return (
        heads,
        positive_int(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads,
        positive_int(config, "head_dim") if config.get("head_dim") else positive_int(config, "hidden_size") // heads,
    )


def tokenizer_token_id(model_dir: str | Path, token: str) -> int | None:
    """Id of ``token`` in the tokenizer files of a checkpoint, read without loading a tokenizer."""
    root = Path(model_dir)
    for token_id, entry in read_json(root / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return int(token_id)
    tokenizer = read_json(root / "tokenizer.json")
    for entry in tokenizer.get("added_tokens", []):
        if entry.get("content") == token:
            return int(entry["id"])
    vocab = tokenizer.get("model", {}).get("vocab", {})
    return int(vocab[token]) if isinstance(vocab, dict) and token in vocab else None


def _from_keys(config: Mapping[str, Any], keys: tuple[str, ...], file: str) -> Iterator[tuple[Any, str]]:
    for key in keys:
        if config.get(key) is not None:
            yield config[key], f"{file} {key}"


def _from_tokenizer(model_dir: str | Path, key: str) -> Iterator[tuple[int, str]]:
    token = read_json(Path(model_dir) / "tokenizer_config.json").get(key)
    if token is None:
        token = read_json(Path(model_dir) / "special_tokens_map.json").get(key)
    content = token.get("content") if isinstance(token, Mapping) else token
    try:
        token_id = tokenizer_token_id(model_dir, content) if content else None
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer files of {model_dir} are damaged, {key}={content!r} cannot be looked up in them "
            f"({error!r}); restore them from the checkpoint"
        ) from error
    if token_id is not None:
        yield token_id, f"tokenizer {key}"


def _from_published_name(model_dir: str | Path, names: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Block size that the name of a directory says; a snapshot of the hub's cache has it two levels up."""
    for part in reversed(Path(model_dir).absolute().parts[-3:]):
        if match := names.search(part):
            yield int(match["block"] or 4), f"published name {part}"
            return


def resolve(
    model_dir: str | Path,
    *,
    block_size: int | None = None,
    mask_id: int | None = None,
    eos_ids: tuple[int, ...] | None = None,
) -> BlockDiffusionConfig:
    """Find block size, mask id and stop ids of the checkpoint in ``model_dir``.

    Arguments given explicitly win over everything the checkpoint says. A value from the table of known
    architectures is used only if it fits the vocabulary.

    Raises:
        ConfigError: the model directory is missing, or one of the three cannot be found or cannot be right.
    """
    config = load_hf_config(model_dir)
    generation = read_json(Path(model_dir) / "generation_config.json")
    architecture = architecture_name(config)
    known = KNOWN_ARCHITECTURES.get(architecture)
    vocab_size = positive_int(config, "vocab_size") if "vocab_size" in config else None

    def from_files(keys: tuple[str, ...], token_key: str | None) -> Iterator[tuple[Any, str]]:
        yield from _from_keys(config, keys, "config.json")
        yield from _from_keys(generation, keys, "generation_config.json")
        if token_key is not None:
            yield from _from_tokenizer(model_dir, token_key)

    def from_table(name: str) -> Iterator[tuple[Any, str]]:
        if known is None:
            return
        if name == "block_size" and known.names is not None:
            yield from _from_published_name(model_dir, known.names)
        if (value := getattr(known, name)) is not None:
            ids = value if isinstance(value, tuple) else (value,)
            if name == "block_size" or vocab_size is None or max(ids) < vocab_size:
                yield value, f"known architecture {architecture}"

    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, flag, keys, token_key in (
        ("block_size", block_size, _BLOCK_SIZE_KEYS, None),
        ("mask_id", mask_id, _MASK_KEYS, "mask_token"),
        ("eos_ids", eos_ids, _EOS_KEYS, "eos_token"),
    ):
        given = [(flag, "flag")] if flag is not None else []
        matches = [*given, *from_files(keys, token_key), *from_table(name)]
        if not matches:
            hint = ": the family was published with several block sizes" if known and known.names else ""
            raise ConfigError(
                f"{name} of architecture {architecture!r} is not named by {model_dir} (config.json, "
                f"generation_config.json, tokenizer), and none of the known architectures "
                f"{sorted(KNOWN_ARCHITECTURES)} supplies one that fits{hint}; add {keys[0]!r} to config.json"
            )
        found[name], sources[name] = matches[0]
        if name == "eos_ids" and flag is None and (files := list(from_files(keys, token_key))):
            found[name] = tuple(dict.fromkeys(token for value, source in files for token in _ids(value, source)))
            sources[name] = ", ".join(source for _, source in files)
    found["eos_ids"] = _ids(found["eos_ids"], sources["eos_ids"])
    result = BlockDiffusionConfig(architecture=architecture, sources=sources, **found)
    _check(result, vocab_size)
    return result


def _ids(value: Any, source: str) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(is_whole(token, 0) for token in ids):
        raise ConfigError(
            f"eos_ids={value!r} (from {source}) is neither a token id nor a list of them; add the right "
            "'eos_token_id' to config.json"
        )
    return ids


def _check(config: BlockDiffusionConfig, vocab_size: int | None) -> None:
    where = config.sources
    if not is_whole(config.block_size, 1):
        raise ConfigError(
            f"block_size={config.block_size!r} (from {where['block_size']}) is not a positive integer; "
            "use the block size the checkpoint was trained with"
        )
    if not is_whole(config.mask_id, 0):
        raise ConfigError(
            f"mask_id={config.mask_id!r} (from {where['mask_id']}) is not a token id; add the right 'mask_token_id' to "
            "config.json"
        )
    if vocab_size is not None and config.mask_id >= vocab_size:
        raise ConfigError(
            f"mask_id={config.mask_id} (from {where['mask_id']}) is outside the vocabulary of {vocab_size}; "
            "add the right 'mask_token_id' to config.json"
        )
    if config.mask_id in config.eos_ids:
        raise ConfigError(
            f"mask_id={config.mask_id} (from {where['mask_id']}) is also a stop id (from {where['eos_ids']}); "
            "a mask token that ends responses cannot be decoded: correct one of them in the checkpoint"
        )
