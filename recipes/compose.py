"""From command-line overrides to a checked config: everything that can be refused is refused here."""

from __future__ import annotations

import importlib.util
import json
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dllm.config import ConfigError
from dllm.decoding import make_decoder
from dllm.likelihood import make_likelihood
from recipes.devices import check_devices
from recipes.host import visible_gpus
from recipes.settings import DllmSettings, RecipeSettings, typed
from rollout import preflight
from rollout.algorithm_config import read_algorithm_config
from rollout.saved import check_saved
from trainers.objective import check_objective

CONFIG_DIR = Path(__file__).parent / "config"
CHECKPOINT_DIR = Path(__file__).parent / "checkpoints"


@dataclass
class ResolvedRun:
    """A run that passed its checks.

    Attributes:
        config: resolved verl config.
        directory: where everything the run writes goes.
        report: the engine's preflight.
        resumed: whether the directory already holds a run that will be continued.
    """

    config: DictConfig
    dllm: DllmSettings
    recipe: RecipeSettings
    directory: Path
    hardware: str
    report: preflight.Report
    resumed: bool

    def yaml(self) -> str:
        return OmegaConf.to_yaml(self.config, resolve=True)

    def write_config(self) -> None:
        (self.directory / "config.yaml").write_text(self.yaml(), encoding="utf-8")


def _checkpoint(name: str) -> str:
    """Path of a checkpoint that ships with the project."""
    path = CHECKPOINT_DIR / name
    if not path.is_dir():
        known = sorted(p.name for p in CHECKPOINT_DIR.iterdir() if p.is_dir())
        raise ConfigError(f"checkpoint {name!r} does not ship with this project; use one of {known} or give a path")
    return str(path)


def _if_exact(value: str, *, _root_: DictConfig) -> str | None:
    """``value`` under ``dllm.likelihood=exact``; null under others, whose values are not log-probs of draws."""
    return value if _root_.dllm.likelihood == "exact" else None


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose a config of ``recipes/config``.

    Raises:
        ConfigError: an override or a group does not exist, or cannot be parsed.
    """
    OmegaConf.register_new_resolver("checkpoint", _checkpoint, replace=True)
    OmegaConf.register_new_resolver("if_exact", _if_exact, replace=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR.resolve()), version_base=None):
            return compose(config_name, overrides=[_search_path(), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error


def _search_path() -> str:
    """Where Hydra finds verl's config and ours for it, as directories: naming the packages would import verl before
    its environment is set."""
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer" / "config"
    ours = Path(__file__).parent.parent / "rollout" / "verl" / "config"
    return f"hydra.searchpath=[file://{verl},file://{ours}]"


def _explain(error: Exception) -> str:
    """Hydra's message as one sentence, with the remedy."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if cause is not None and str(cause):
        lines += [line.strip() for line in str(cause).splitlines()[:1]]
    return " ".join(lines)[:600] + " (recipe.dry_run=true prints every key)"


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments with the recipe's flags as the overrides that they stand for: ``--dllm-algorithm NAME``,
    ``--dllm-algorithm-config FILE.yaml``, ``--save-debug-rollouts DIR``, ``--load-debug-rollouts DIR``.

    Raises:
        ConfigError: a flag has no value or does not exist, or the file cannot be read, names a key that the decoder
            does not have, or sets ``block_size``.
    """
    flags = ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    flags.add_argument("--dllm-algorithm", metavar="NAME")
    flags.add_argument("--dllm-algorithm-config", metavar="FILE.yaml")
    flags.add_argument("--save-debug-rollouts", metavar="DIR")
    flags.add_argument("--load-debug-rollouts", metavar="DIR")
    known = " ".join(f"[{action.option_strings[0]} {action.metavar}]" for action in flags._actions)
    try:
        given, rest = flags.parse_known_args(list(arguments))
    except ArgumentError as error:
        raise ConfigError(f"{error}; the flags are {known}") from error
    if unknown := [argument for argument in rest if argument.startswith("--")]:
        raise ConfigError(f"there is no flag {unknown[0]}; the flags are {known}, everything else is KEY=VALUE")
    for name in ("save_debug_rollouts", "load_debug_rollouts"):
        if (directory := getattr(given, name)) is not None:
            rest.append(f"recipe.{name}={quoted(directory)}")
    if given.dllm_algorithm is not None:
        rest.append(f"dllm.algorithm={quoted(given.dllm_algorithm)}")
    if given.dllm_algorithm_config is not None:
        named = [a.partition("=")[2].strip("'\"") for a in rest if a.startswith("dllm.algorithm=")]
        options = read_algorithm_config((named or [DllmSettings.algorithm])[-1], given.dllm_algorithm_config)
        if "block_size" in options:
            raise ConfigError(
                f"{given.dllm_algorithm_config} sets block_size, which a run takes from the checkpoint; remove it"
            )
        rest += [f"++dllm.options.{key}={json.dumps(value)}" for key, value in options.items()]
    return rest


def quoted(text: str) -> str:
    """A text as the value of an override."""
    return "'" + text.replace("'", "\\'") + "'"


def run_name(recipe: RecipeSettings) -> str:
    """The run's name: as asked for, or the time."""
    return recipe.run or time.strftime("%Y%m%d-%H%M%S")


def resolve_run(overrides: Sequence[str], hardware: str) -> ResolvedRun:
    """Compose, check and complete the config of ``recipes.grpo_llada2``.

    Raises:
        ConfigError: something would fail later; no process was started and nothing was written.
    """
    config = compose_config("grpo_llada2", [f"hardware={hardware}", *overrides])
    dllm, recipe = typed(config)
    directory = (Path(recipe.output_dir) / run_name(recipe)).resolve()
    resumed = (directory / "metrics.jsonl").exists()
    if resumed and config.trainer.resume_mode == "disable":
        raise ConfigError(
            f"recipe.run={recipe.run!r} already exists in {directory.parent}; add trainer.resume_mode=auto to go on "
            "with it, or choose another name"
        )
    report = check_engine(config, dllm)
    report.notes += check_devices(config, *visible_gpus(), dry_run=recipe.dry_run)
    _check_lengths(config, report)
    _check_batches(config)
    _check_objective(config, dllm)
    if recipe.load_debug_rollouts is not None:
        _check_saved(config, recipe.load_debug_rollouts)
    train_files, val_files = task_files(config, recipe)
    if recipe.dry_run and not _is_built(config, recipe):
        report.notes.append(
            "prompts are not built yet: whether they fit data.max_prompt_length is checked at the start"
        )
    else:
        _check_prompts(config, [train_files, val_files])
    with open_dict(config):
        config.data.train_files, config.data.val_files = train_files, val_files
        config.trainer.experiment_name = directory.name
        config.trainer.default_local_dir = str(directory / "checkpoints")
        config.trainer.rollout_data_dir = str(directory / "rollouts")
        config.trainer.validation_data_dir = str(directory / "validation")
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    return ResolvedRun(config, dllm, recipe, directory, hardware, report, resumed)


def check_engine(config: DictConfig, dllm: DllmSettings) -> preflight.Report:
    """Preflight of the rollout engine this config would start.

    Raises:
        ConfigError: see ``rollout.preflight``.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set; give it the directory of a LLaDA2 checkpoint")
    make_decoder(dllm.algorithm, 0, dllm.options)
    engine_kwargs = OmegaConf.to_container(rollout.engine_kwargs, resolve=True)
    flags = {
        "model_path": model.path,
        "dtype": rollout.dtype,
        "dllm_algorithm": dllm.algorithm,
        "max_running_requests": rollout.max_num_seqs,
        "tp_size": rollout.tensor_model_parallel_size,
        "pp_size": rollout.pipeline_model_parallel_size,
        "disable_cuda_graph": rollout.enforce_eager,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "device": "cpu" if config.trainer.device == "cpu" else "cuda",
        **(engine_kwargs.get("sglang") or {}),
    }
    return preflight.check_server(flags, training=True)


def _check_lengths(config: DictConfig, report: preflight.Report) -> None:
    size = report.block_diffusion.block_size if report.block_diffusion else 1
    if config.data.max_response_length < size:
        raise ConfigError(
            f"data.max_response_length={config.data.max_response_length} is shorter than a block of {size} tokens; "
            f"raise it to at least {size}"
        )
    if config.actor_rollout_ref.rollout.n < 2 and config.algorithm.adv_estimator == "grpo":
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n} leaves GRPO without a group to compare "
            "with; use at least 2"
        )


def _check_saved(config: DictConfig, directory: str) -> None:
    """Without an engine nothing can be validated, and no step can be taken whose rollouts were not saved."""
    for key, off in (("val_before_train", False), ("test_freq", -1)):
        value = config.trainer[key]
        if value is True or (value is not False and value > 0):
            raise ConfigError(
                f"trainer.{key}={value} needs an engine, and recipe.load_debug_rollouts={directory!r} runs without; "
                f"set trainer.{key}={str(off).lower()}"
            )
    check_saved(directory, config.trainer.total_training_steps)


def _check_prompts(config: DictConfig, files: Sequence[str | list[str]]) -> None:
    """verl drops prompts that are too long if it is told to, and fails on them otherwise."""
    from recipes.tasks.lengths import check_prompt_lengths
    from rollout.generate import load_tokenizer

    data, model = config.data, config.actor_rollout_ref.model
    if data.filter_overlong_prompts:
        return
    names = [name for part in files for name in ([part] if isinstance(part, str) else part)]
    tokenizer = load_tokenizer(model.path, bool(model.trust_remote_code))
    check_prompt_lengths(names, tokenizer, data.max_prompt_length, config.task.name)


def _check_batches(config: DictConfig) -> None:
    """verl splits what a rank gets into micro-batches without a rest."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for key, prompts, micro, dynamic in (
        (
            "actor.ppo_micro_batch_size_per_gpu",
            actor.ppo_mini_batch_size,
            actor.ppo_micro_batch_size_per_gpu,
            actor.use_dynamic_bsz,
        ),
        (
            "rollout.log_prob_micro_batch_size_per_gpu",
            config.data.train_batch_size,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_use_dynamic_bsz,
        ),
    ):
        samples = -(-prompts * rollout.n // ranks)
        if micro and not dynamic and samples % micro:
            raise ConfigError(
                f"actor_rollout_ref.{key}={micro} does not divide the {samples} samples of a rank ({prompts} prompts, "
                f"actor_rollout_ref.rollout.n={rollout.n}, {ranks} ranks); set it to a divisor such as "
                f"{gcd(samples, micro)}"
            )


def _check_objective(config: DictConfig, dllm: DllmSettings) -> None:
    if dllm.max_logprob_diff is not None and dllm.likelihood != "exact":
        raise ConfigError(
            f"dllm.max_logprob_diff={dllm.max_logprob_diff} compares engine and trainer, which dllm.likelihood="
            f"{dllm.likelihood} does not allow; set it to null"
        )
    check_objective(
        dllm.likelihood,
        make_likelihood(dllm.likelihood, dllm.likelihood_options),
        config.actor_rollout_ref.actor,
        config.algorithm.rollout_correction,
        own_losses=config.actor_rollout_ref.model.external_lib != "trainers.engine",
    )


def _is_built(config: DictConfig, recipe: RecipeSettings) -> bool:
    from recipes.tasks.build import is_built

    return is_built(OmegaConf.to_container(config.task, resolve=True), recipe.cache_dir)


def task_files(config: DictConfig, recipe: RecipeSettings) -> tuple[str | list[str], str | list[str]]:
    """Paths of the train and held-out prompts; prompts of a generator are built on a real start only.

    Raises:
        ConfigError: the task or a file does not exist.
    """
    from recipes.tasks.build import build, check_task

    task: dict[str, Any] = OmegaConf.to_container(config.task, resolve=True)
    check_task(task)
    if recipe.dry_run and not _is_built(config, recipe):
        return f"<{task['name']}: train>", f"<{task['name']}: held-out>"
    return build(task, Path(recipe.cache_dir))
