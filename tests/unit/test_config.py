"""Where block size, mask id and stop ids come from, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from dllm.config import MAX_SIZE, ConfigError, load_hf_config, positive_int, resolve, tokenizer_token_id
from dllm.models import meta_model
from tests.support import DATA, sdar_hf_config, write_json

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
        ({"block_size": True}, r"block_size=True \(from .*\) is not a positive integer"),
        ({"mask_token_id": True}, r"mask_id=True .* is not a token id"),
        ({"mask_token_id": 10**30}, r"mask_id=10+ .* is not a token id"),
        ({"eos_token_id": "x"}, r"eos_ids='x' \(from config.json eos_token_id\) is neither a token id nor a list of "),
        ({"eos_token_id": 1.5}, r"eos_ids=1.5 .* is neither"),
        ({"eos_token_id": [3, None]}, r"eos_ids=\[3, None\] .* is neither"),
        ({"eos_token_id": -1}, r"eos_ids=-1 .* is neither"),
        ({"vocab_size": -1}, r"vocab_size of config.json is -1, not a positive integer; restore the file"),
        ({"architectures": -1}, r"architectures of config.json is -1, not a list of names; restore the file"),
        ({"architectures": [3]}, r"architectures of config.json is \[3\], not a list of names"),
        ({"mask_token_id": 7, "eos_token_id": [3, 7]}, r"mask_id=7 .* is also a stop id .*: correct one of them"),
    ],
)
def test_impossible_values(tmp_path, config, message):
    refused(checkpoint(tmp_path, config), message)


@pytest.mark.parametrize(
    "tokenizer", [{"added_tokens_decoder": []}, {"added_tokens_decoder": {"x": {"content": "<m>"}}}]
)
def test_damaged_tokenizer_files(tmp_path, tokenizer):
    refused(checkpoint(tmp_path, tokenizer={"mask_token": "<m>"} | tokenizer), "mask_token='<m>' cannot be looked up")


def test_a_config_that_is_no_file_of_text(tmp_path):
    for content, message in ((b"\xff", "is not valid JSON"), (b"[" * 100_000, "is not valid JSON")):
        (tmp_path / "config.json").write_bytes(content)
        refused(tmp_path, message)
    refused(tmp_path / "config.json", "is not a directory; pass a local")
    refused(tmp_path / ("long" * 100), "is not a directory; pass a local")


def test_sizes():
    assert positive_int({"a": MAX_SIZE}, "a") == MAX_SIZE and positive_int({"a": 0}, "a", least=0) == 0
    for value, message in (
        (MAX_SIZE + 1, f"not at most {MAX_SIZE}"),
        (True, "not a positive integer"),
        (None, "missing"),
    ):
        with pytest.raises(ConfigError, match=f"a of other.json is .*{message}"):
            positive_int({"a": value}, "a", where="other.json")


CONFIGS = {
    "llada2": json.loads((DATA / "llada2_mini_config.json").read_text()),
    "sdar": sdar_hf_config(False, mask_token_id=5),
    "sdar_moe": sdar_hf_config(True, mask_token_id=5),
}
VALUES = [-1, 0, "x", None, [], {}, 1.5, True, 1e30, 10**30, float("nan"), float("inf"), [3], {"rope_theta": "x"}]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_any_value_of_any_key_is_read_or_refused(tmp_path, name, value):
    """Nothing else escapes, and nothing is allocated or counted to for a number that is absurd."""
    config = CONFIGS[name] | {"num_hidden_layers": 2}
    for key in (*config, "rope_parameters", "block_size", "mask_id"):
        changed = config | {key: value}
        write_json(tmp_path / "config.json", changed)
        for read in (lambda changed=changed: meta_model(changed), lambda: resolve(tmp_path)):
            with suppress(ConfigError):
                read()


SIZES = [
    ("llada2", {"vocab_size": -1}, "vocab_size of config.json is -1, not a positive integer"),
    ("llada2", {"hidden_size": "x"}, "hidden_size of config.json is 'x', not a positive integer"),
    ("llada2", {"n_group": 0}, "n_group of config.json is 0, not a positive integer"),
    ("llada2", {"num_hidden_layers": 10**9}, "num_hidden_layers of config.json is 1000000000, not at most 512"),
    ("llada2", {"first_k_dense_replace": -1}, "first_k_dense_replace of config.json is -1, not an integer from 0"),
    ("llada2", {"num_experts_per_tok": 200}, "num_experts_per_tok=200 is more than the 128 experts of topk_group=4"),
    ("llada2", {"partial_rotary_factor": 1e30}, "partial_rotary_factor=1e\\+30 is more than 1"),
    ("llada2", {"rope_theta": float("nan")}, "rope_theta of config.json is nan, not a positive number"),
    ("llada2", {"rope_parameters": 3}, "rope_parameters of config.json is 3, not an object"),
    ("llada2", {"architectures": -1}, "architectures of config.json is -1, not a list of names"),
    ("llada2", {"architectures": [3]}, r"architectures of config.json is \[3\], not a list of names"),
    ("sdar", {"head_dim": 1.5}, "head_dim of config.json is 1.5, not a positive integer"),
    ("sdar_moe", {"norm_topk_prob": "x"}, "norm_topk_prob of config.json is 'x', not true or false"),
    (
        "sdar",
        {"head_dim": MAX_SIZE, "num_attention_heads": MAX_SIZE, "hidden_size": MAX_SIZE},
        "config.json does not describe a network of its architecture 'SDARForCausalLM': RuntimeError",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), SIZES)
def test_sizes_that_are_no_network(name, change, message):
    with pytest.raises(ConfigError, match=message):
        meta_model(CONFIGS[name] | change)


@pytest.mark.parametrize("name", ["llada2_mini", "llada2_flash", "sdar_4b", "sdar_8b", "sdar_30b_a3b"])
def test_published_configs_are_networks(name):
    meta_model(json.loads((DATA / f"{name}_config.json").read_text()))
