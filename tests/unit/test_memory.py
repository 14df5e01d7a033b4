"""Memory of published models on published cards."""

from __future__ import annotations

import gzip
import json

import pytest

from dllm.config import ConfigError
from rollout.memory import default_graph_batch, estimate, kv_bytes_per_token, weight_bytes
from rollout.published import PUBLISHED
from tests.support import DATA

MINI, FLASH = PUBLISHED["inclusionAI/LLaDA2.0-mini"].config, PUBLISHED["inclusionAI/LLaDA2.0-flash"].config
FILES = {
    "inclusionAI/LLaDA2.0-mini": "llada2_mini",
    "inclusionAI/LLaDA2.0-flash": "llada2_flash",
    "JetLM/SDAR-4B-Chat": "sdar_4b",
    "JetLM/SDAR-8B-Chat": "sdar_8b",
    "JetLM/SDAR-30B-A3B-Chat": "sdar_30b_a3b",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_the_published_ones(name):
    config = json.loads((DATA / f"{FILES[name]}_config.json").read_text())
    ours = {key: value for key, value in PUBLISHED[name].config.items() if key != "dtype"}
    assert ours == {key: config.get(key) for key in ours}


def test_weights_are_those_of_the_published_files():
    """The files hold the routers in bf16, the engine in fp32: 19 layers of 256 x 2048, two bytes more."""
    index = json.loads(gzip.decompress((DATA / "llada2_mini_index.json.gz").read_bytes()))
    assert weight_bytes(MINI) - index["metadata"]["total_size"] == pytest.approx(19 * 256 * 2048 * 2, rel=0.01)
    assert weight_bytes(MINI, "float32") == pytest.approx(2 * weight_bytes(MINI), rel=0.01)
    assert weight_bytes({"architectures": ["NewModel"]}) is None
    assert weight_bytes(dict(MINI) | {"rope_scaling": {"factor": 2}}) is None


def test_keys_and_values():
    """20 layers, keys and values of 4 heads of 128 numbers, 2 bytes each; a head is never split."""
    assert kv_bytes_per_token(MINI) == 20 * 2 * 4 * 128 * 2
    assert [kv_bytes_per_token(MINI, tp_size=n) // (20 * 2 * 128 * 2) for n in (1, 2, 4, 8)] == [4, 2, 1, 1]


def test_graphs_and_logits_at_this_batch():
    """By hand: 64 blocks of 32 tokens; 5 bytes per token and position, 6 and 12 per token and word."""
    made = estimate(MINI, int(141e9), running=64, block_size=32)
    assert made.graphs == 64 * 32 * (5 * 32768 + 6 * 157184)
    assert made.logits == 64 * 32 * 157184 * 12
    assert estimate(MINI, int(141e9), running=64, block_size=32, graph_batch=0).graphs == 0
    assert estimate(MINI, int(141e9), running=64, block_size=32, graph_batch=16).graphs * 4 == made.graphs


@pytest.mark.parametrize(
    ("config", "gigabytes", "tp_size", "fits"),
    [
        (MINI, 80, 1, True),
        (MINI, 141, 1, True),
        (MINI, 40, 1, False),
        (FLASH, 80, 1, False),
        (FLASH, 141, 1, False),
        (FLASH, 80, 2, False),
        (FLASH, 141, 2, True),
        (FLASH, 80, 4, True),
    ],
)
def test_what_fits(config, gigabytes, tp_size, fits):
    made = estimate(config, int(gigabytes * 1e9), running=128, block_size=32, tp_size=tp_size)
    if fits:
        made.check()
        assert made.fixed + made.kv_tokens * made.kv_per_token <= gigabytes * 1e9
    else:
        with pytest.raises(ConfigError, match=r"not enough GPU memory: .* use more GPUs \(tp_size\)"):
            made.check()


def test_flash_on_two_cards_of_141_gb():
    made = estimate(FLASH, int(141e9), running=128, block_size=32, tp_size=2)
    assert made.weights == pytest.approx(103e9, rel=0.01) and 5000 < made.kv_tokens / 128 < 7000


@pytest.mark.parametrize(
    ("gib", "tp_size", "expected"), [(16, 1, 8), (24, 1, 24), (48, 4, 160), (80, 1, 256), (141, 4, 512), (180, 1, 512)]
)
def test_largest_graph(gib, tp_size, expected):
    assert default_graph_batch(gib << 30, tp_size) == expected
