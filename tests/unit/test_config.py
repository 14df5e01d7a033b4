"""Where block size, mask id and stop ids come from, and what is refused."""

from __future__ import annotations

import json

import pytest

from dllm.config import ConfigError, load_hf_config, resolve, tokenizer_token_id
from tests.support import DATA, write_json

FLAG = {"block_size": 5, "mask_id": 15, "eos_ids": (25,)}
CONFIG = {"block_size": 6, "mask_token_id": 16, "eos_token_id": 26}
GENERATION = {"block_size": 7, "mask_token_id": 17, "eos_token_id": [27, 28]}
TOKENIZER = {
    "mask_token": "<m>",
    "eos_token": {"content": "<e>"},
    "added_tokens_decoder": {"18": {"content": "<m>"}, "29": {"content": "<e>"}},
}


def checkpoint(path, config=None, generation=None, tokenizer=None, architecture="LLaDA2MoeModelLM", vocab=157184):
    base = {"architectures": [architecture], "vocab_size": vocab}
    write_json(path / "config.json", base | (config or {}))
    if generation is not None:
        write_json(path / "generation_config.json", generation)
    if tokenizer is not None:
        write_json(path / "tokenizer_config.json", tokenizer)
    return path


@pytest.mark.parametrize(
    ("given", "block_size", "mask_id", "eos_ids", "sources"),
    [
        ({}, 32, 156895, (156892,), ["known architecture LLaDA2MoeModelLM"] * 3),
        (
            {"tokenizer": TOKENIZER},
            32,
            18,
            (29,),
            ["known architecture LLaDA2MoeModelLM", "tokenizer mask_token", "tokenizer eos_token"],
        ),
        (
            {"tokenizer": TOKENIZER, "generation": GENERATION},
            7,
            17,
            (27, 28, 29),
            [
                "generation_config.json block_size",
                "generation_config.json mask_token_id",
                "generation_config.json eos_token_id, tokenizer eos_token",
            ],
        ),
        (
            {"tokenizer": TOKENIZER, "generation": GENERATION, "config": CONFIG},
            6,
            16,
            (26, 27, 28, 29),
            [
                "config.json block_size",
                "config.json mask_token_id",
                "config.json eos_token_id, generation_config.json eos_token_id, tokenizer eos_token",
            ],
        ),
    ],
    ids=["table", "tokenizer", "generation_config", "config"],
)
def test_order_of_sources(tmp_path, given, block_size, mask_id, eos_ids, sources):
    found = resolve(checkpoint(tmp_path, **given))
    assert (found.block_size, found.mask_id, found.eos_ids) == (block_size, mask_id, eos_ids)
    assert [found.sources[name] for name in ("block_size", "mask_id", "eos_ids")] == sources
    for source in sources:
        assert source in found.describe()


def test_flags_win_over_everything(tmp_path):
    found = resolve(checkpoint(tmp_path, CONFIG, GENERATION, TOKENIZER), **FLAG)
    assert (found.block_size, found.mask_id, found.eos_ids) == (5, 15, (25,))
    assert set(found.sources.values()) == {"flag"}


def test_each_setting_has_its_own_source(tmp_path):
    found = resolve(checkpoint(tmp_path, {"block_size": 8}, tokenizer=TOKENIZER), eos_ids=(3, 4))
    assert found.sources == {
        "block_size": "config.json block_size",
        "mask_id": "tokenizer mask_token",
        "eos_ids": "flag",
    }


@pytest.mark.parametrize(("key", "name"), [("block_length", "block_size"), ("mask_id", "mask_id")])
def test_other_published_spellings(tmp_path, key, name):
    assert getattr(resolve(checkpoint(tmp_path, {key: 9})), name) == 9


def test_published_llada2_mini(tmp_path):
    """Its config.json names none of the three."""
    config = json.loads((DATA / "llada2_mini_config.json").read_text())
    write_json(tmp_path / "config.json", config)
    found = resolve(tmp_path)
    assert (found.block_size, found.mask_id, found.eos_ids) == (32, 156895, (156892,))


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("SDAR-8B-Chat", 4),
        ("SDAR-1.7B-Chat-b64", 64),
        ("SDAR-30B-A3B-Sci", 4),
        ("SDAR-30B-A3B-Chat-b16", 16),
        ("TraDo-8B-Instruct", 4),
        ("models--JetLM--SDAR-4B-Chat-b32/snapshots/6d87c0c", 32),
    ],
)
def test_published_sdar(tmp_path, name, block_size):
    """config.json of every block size is the same: the name alone tells them apart."""
    path = tmp_path / name
    write_json(path / "config.json", json.loads((DATA / "sdar_8b_config.json").read_text()))
    write_json(path / "generation_config.json", {"eos_token_id": [151645, 151643]})
    found = resolve(path)
    assert (found.block_size, found.mask_id, found.eos_ids) == (block_size, 151669, (151643, 151645))
    assert found.sources["block_size"].startswith("published name ")


@pytest.mark.parametrize("architecture", ["SDARForCausalLM", "SDARMoeForCausalLM"])
def test_sdar_under_another_name_has_to_say_its_block_size(tmp_path, architecture):
    """Stock SGLang takes 4 for it, which is wrong for most of the published checkpoints."""
    path = checkpoint(tmp_path / "my-SDAR", {"eos_token_id": 151643}, architecture=architecture)
    refused(
        path,
        f"block_size of architecture '{architecture}' is not named by .* several block sizes; add 'block_size' to",
    )
    assert resolve(path, block_size=8).block_size == 8
    assert resolve(checkpoint(path, {"block_size": 16}, architecture=architecture)).block_size == 16


def test_token_ids_are_read_from_tokenizer_json(tmp_path):
    content = {"added_tokens": [{"content": "<a>", "id": 3}], "model": {"vocab": {"b": 4}}}
    write_json(tmp_path / "tokenizer.json", content)
    assert [tokenizer_token_id(tmp_path, token) for token in ("<a>", "b", "c")] == [3, 4, None]


def test_special_tokens_map_names_the_mask_token(tmp_path):
    checkpoint(tmp_path)
    write_json(tmp_path / "special_tokens_map.json", {"mask_token": "<x>"})
    write_json(tmp_path / "tokenizer.json", {"added_tokens": [{"content": "<x>", "id": 77}]})
    assert resolve(tmp_path).mask_id == 77


def test_a_table_value_outside_the_vocabulary_is_not_used(tmp_path):
    with pytest.raises(
        ConfigError, match=r"mask_id of architecture 'LLaDA2MoeModelLM' is not named by .*mask_token_id"
    ):
        resolve(checkpoint(tmp_path, vocab=320))


def refused(path, message, **flags):
    with pytest.raises(ConfigError, match=message):
        resolve(path, **flags)


def test_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", r"model path '.*nowhere' is not a directory; pass a local Hugging Face checkpoint")


def test_directory_without_config(tmp_path):
    refused(tmp_path, r"has no config.json; pass a Hugging Face checkpoint directory")


def test_broken_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, r"config.json is not valid JSON .*; restore the file")
    with pytest.raises(ConfigError):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "name"),
    [({}, "block_size"), ({"block_size": 4}, "mask_id"), ({"block_size": 4, "mask_token_id": 3}, "eos_ids")],
)
def test_unknown_architecture_that_names_too_little(tmp_path, config, name):
    path = checkpoint(tmp_path, config, architecture="SomethingElse")
    refused(path, rf"{name} of architecture 'SomethingElse' is not named by .*; add '\w+' to config.json")


def test_unknown_architecture_that_names_all_three(tmp_path):
    assert resolve(checkpoint(tmp_path, CONFIG, architecture="SomethingElse")).block_size == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"block_size": 0},
            r"block_size=0 \(from config.json block_size\) is not a positive integer; use the block size",
        ),
        ({"block_size": "32"}, r"block_size='32' \(from .*\) is not a positive integer"),
        ({"mask_token_id": -1}, r"mask_id=-1 \(from config.json mask_token_id\) is not a token id; "),
        ({"mask_token_id": 157184}, r"mask_id=157184 .* outside the vocabulary of 157184; .*'mask_token_id'"),
        ({"mask_token_id": 7, "eos_token_id": [3, 7]}, r"mask_id=7 .* is also a stop id .*: correct one of them"),
    ],
)
def test_impossible_values(tmp_path, config, message):
    refused(checkpoint(tmp_path, config), message)
