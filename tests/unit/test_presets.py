"""The table of published models agrees with the rest of the package, with the model groups and with its page."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from dllm.config import ConfigError, resolve
from dllm.decoding import make_decoder
from dllm.models import MODELS
from dllm.presets import PRESETS, preset
from recipes.compose import CONFIG_DIR
from tests.support import DATA, ROOT, write_json

GROUPS = {
    "llada21_mini": "LLaDA2.1-mini",
    "llada21_flash": "LLaDA2.1-flash",
    "sdar_4b": "SDAR-4B-Chat",
    "sdar_8b": "SDAR-8B-Chat",
    "sdar_30b_a3b": "SDAR-30B-A3B-Chat",
}


@pytest.mark.parametrize("name", PRESETS)
def test_decoders_can_be_built(name):
    p = PRESETS[name]
    assert p.architecture in MODELS and 0 < p.threshold < 1
    for decoder, options in ((p.decoder, p.options), (p.rl_decoder, p.rl_options), (p.decoder, p.options | p.fast)):
        assert make_decoder(decoder, p.mask_id, options).mask_id == p.mask_id


@pytest.mark.parametrize("name", PRESETS)
def test_a_checkpoint_of_that_name_resolves_to_the_same(tmp_path, name):
    """Block size and mask id come from files or the name, and are those of the table."""
    p = PRESETS[name]
    file = {"LLaDA2MoeModelLM": "llada2_mini", "SDARForCausalLM": "sdar_8b", "SDARMoeForCausalLM": "sdar_30b_a3b"}
    config = json.loads((DATA / f"{file[p.architecture]}_config.json").read_text())
    write_json(tmp_path / name / "config.json", config)
    found = resolve(tmp_path / name)
    assert (found.architecture, found.block_size, found.mask_id) == (p.architecture, p.block_size, p.mask_id)


def test_rl_edits_rarely():
    """At low thresholds argmax edits undo what sampling explored."""
    editing = [p for p in PRESETS.values() if p.rl_decoder == "JointThreshold"]
    assert len(editing) == 2 and all(p.rl_options["edit_threshold"] >= 0.9 for p in editing)


@pytest.mark.parametrize(("group", "name"), GROUPS.items())
def test_model_groups_have_the_rl_decoder(group, name):
    p, config = preset(name), OmegaConf.load(CONFIG_DIR / "model" / f"{group}.yaml")
    assert (config.dllm.algorithm, OmegaConf.to_container(config.dllm.options)) == (p.rl_decoder, dict(p.rl_options))
    assert p.name in (CONFIG_DIR / "model" / f"{group}.yaml").read_text()


def test_every_preset_is_on_the_page():
    page = (ROOT / "docs" / "models.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    for p in PRESETS.values():
        columns = [c.strip() for c in rows[p.name].split("|")]
        options = ", ".join(f"{key}={value}" for key, value in p.options.items())
        assert columns[2:7] == [p.architecture, str(p.block_size), str(p.mask_id), p.decoder, options]


def test_unknown_names_are_refused():
    assert preset("inclusionAI/LLaDA2.0-mini") is preset("LLaDA2.0-mini")
    with pytest.raises(ConfigError, match="model 'LLaDA3' has no preset; the published ones are "):
        preset("LLaDA3")
