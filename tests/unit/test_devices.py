"""Trainer and engines on devices of their own: what composes, and what is refused before any process starts."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from omegaconf import DictConfig, OmegaConf

from dllm.config import ConfigError
from recipes.compose import compose_config, resolve_run
from recipes.devices import BACKEND, check_devices, check_staging

ROLLOUT = "actor_rollout_ref.rollout"


@cache
def group(hardware: str) -> DictConfig:
    return compose_config("grpo_llada2", [f"hardware={hardware}"])


def composed(hardware: str, *overrides: str) -> DictConfig:
    """The recipe's config; composed once for each hardware, because it takes most of a second."""
    config = copy.deepcopy(group(hardware))
    for key, value in (override.split("=") for override in overrides):
        OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
    return config


def check(config: DictConfig, visible: int = 8, dry_run: bool = False) -> list[str]:
    return check_devices(config, visible, None, dry_run=dry_run)


@pytest.mark.parametrize("hardware", ["separate", "separate_cpu"])
def test_engines_have_devices_of_their_own(tiny_dir, tmp_path, hardware):
    given = [f"actor_rollout_ref.model.path={tiny_dir}", f"recipe.output_dir={tmp_path}", "recipe.dry_run=true"]
    config = resolve_run(given, hardware).config
    rollout = config.actor_rollout_ref.rollout
    assert not config.actor_rollout_ref.hybrid_engine and not rollout.free_cache_engine
    assert (rollout.nnodes, rollout.n_gpus_per_node, rollout.checkpoint_engine.backend) == (1, 1, BACKEND)
    assert rollout.checkpoint_engine.engine_kwargs[BACKEND] == {"model_path": str(tiny_dir), "dtype": rollout.dtype}
    assert config.trainer.v1.trainer_mode == "sync"


def test_an_engine_of_several_gpus_gets_them():
    config = composed("separate", f"{ROLLOUT}.tensor_model_parallel_size=4")
    assert config.actor_rollout_ref.rollout.n_gpus_per_node == 4 and check(config, visible=5) == []
    with pytest.raises(ConfigError, match="need 5 GPUs, and 4 are visible here; lower trainer.n_gpus_per_node or"):
        check(config, visible=4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ROLLOUT}.nnodes=0"], "rollout.nnodes=0 leaves 0 devices for engines of 1; give a multiple of 1"),
        ([f"{ROLLOUT}.n_gpus_per_node=0"], "n_gpus_per_node=0 on .* leaves 0 devices for engines of 1"),
        (
            [f"{ROLLOUT}.n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=2"],
            "leaves 3 devices for engines of 2; give a multiple of 2",
        ),
        ([f"{ROLLOUT}.free_cache_engine=true"], "free_cache_engine=true puts engines to sleep .* set it to false"),
        (
            [f"{ROLLOUT}.checkpoint_engine.backend=nccl"],
            "checkpoint_engine.backend=nccl sends weights that nobody reads back .* use weight_sync",
        ),
        (["trainer.v1.trainer_mode=separate_async"], "trainer_mode=separate_async is not what this recipe runs"),
        (["trainer.n_gpus_per_node=8"], "need 9 GPUs, and 8 are visible here"),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(composed("separate", *overrides))


@pytest.mark.parametrize("override", [f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.checkpoint_engine.backend=weight_sync"])
def test_keys_that_engines_on_the_trainers_devices_would_ignore(override):
    with pytest.raises(ConfigError, match="asks for engines on devices of their own, .* use hardware=separate, or"):
        check(composed("gpu1", override))


def test_logical_slots_of_a_cpu():
    config = composed("separate_cpu", f"{ROLLOUT}.n_gpus_per_node=16")
    with pytest.raises(ConfigError, match=r"num_gpus=16 logical slots are too few for 17 ranks .*; set it to 17"):
        check(config, visible=0)


def test_a_dry_run_on_a_smaller_machine_says_so():
    [note] = check(composed("separate"), visible=1, dry_run=True)
    assert note == "trainer and engines need 2 GPUs, and 1 are visible here: a start would be refused"


def test_what_a_refresh_stages_must_fit_beside_the_engine():
    check_staging(32_500_000_000, 141_000_000_000, 0.6)
    with pytest.raises(ConfigError, match=r"0.8 leaves 28.2 GB of a GPU, .* stages 32.5 GB of weights there; lower it"):
        check_staging(32_500_000_000, 141_000_000_000, 0.8)
