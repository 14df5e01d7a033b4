"""The recipe's config: every group composes, and what cannot work is refused before anything is written."""

from __future__ import annotations

import itertools
import json
import re

import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf

from dllm.config import ConfigError
from dllm.decoding import DECODERS
from recipes import grpo_llada2
from recipes.compose import CONFIG_DIR, as_overrides, compose_config, resolve_run
from recipes.summary import count_prompts
from tests.support import DATA

GROUPS = {group.name: sorted(f.stem for f in group.glob("*.yaml")) for group in CONFIG_DIR.iterdir() if group.is_dir()}
ROOTS = sorted(f.stem for f in CONFIG_DIR.glob("*.yaml"))


@pytest.fixture
def resolve(tiny_dir, tmp_path):
    """``resolve_run`` for the tiny checkpoint, with its output below a temporary directory."""

    def run(*overrides: str, hardware: str = "cpu", dry: bool = True):
        given = [
            f"actor_rollout_ref.model.path={tiny_dir}",
            f"recipe.output_dir={tmp_path / 'runs'}",
            f"recipe.cache_dir={tmp_path / 'cache'}",
            "task.val_size=4",
            "task.sft_size=0",
            "task.train_size=16",
            f"recipe.dry_run={str(dry).lower()}",
        ]
        run = resolve_run([*given, *overrides], hardware)
        assert dry is False or not (tmp_path / "runs").exists()
        return run

    return run


def test_the_groups_are_there():
    assert "grpo_llada2" in ROOTS
    assert {"hardware", "model", "task"} <= GROUPS.keys()
    assert {"cpu", "gpu1", "gpus", "separate", "separate_cpu"} <= set(GROUPS["hardware"])
    assert {"tiny", "llada2_mini", "llada2_flash"} <= set(GROUPS["model"])
    assert {"chain_sum", "parquet"} <= set(GROUPS["task"])


@pytest.mark.parametrize("name", ROOTS)
def test_every_root_composes(name):
    assert compose_config(name, [])


def _decoder_of(model: str) -> DictConfig:
    """What a model group says about the decoder, or the root's defaults."""
    group = OmegaConf.load(CONFIG_DIR / "model" / f"{model}.yaml")
    return group.get("dllm") or OmegaConf.create({"algorithm": "SelectThenSample", "options": {"threshold": None}})


def test_a_model_group_wins_over_the_defaults(resolve):
    config = resolve("model=llada2_mini").config
    assert (config.actor_rollout_ref.actor.optim.lr, config.data.max_response_length) == (1e-6, 1024)


@pytest.mark.parametrize(("hardware", "model"), itertools.product(GROUPS["hardware"], GROUPS["model"]))
def test_hardware_and_model_resolve(resolve, hardware, model):
    """With a model path, every pair passes its preflight and has no key that is missing or cannot be resolved."""
    # The checkpoint that stands in for all has two heads.
    ranks = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"] if model.endswith("flash") else []
    run = resolve(f"model={model}", *ranks, hardware=hardware)
    assert not {key for key in OmegaConf.missing_keys(run.config) if not key.startswith("reward.reward_model.")}
    plain = OmegaConf.to_container(run.config, resolve=True)
    assert plain["actor_rollout_ref"]["rollout"]["name"] == "sglang_dllm"
    device = "cpu" if hardware.endswith("cpu") else "cuda"
    assert plain["trainer"]["device"] == device
    assert plain["actor_rollout_ref"]["rollout"]["engine_kwargs"]["sglang_dllm"] == {
        **OmegaConf.to_container(_decoder_of(model)),
        "routing_every": 0,
        "load_debug_rollouts": None,
        "train_mixed": False,
    }
    assert run.report.effective["device"] == device
    assert run.report.block_diffusion.block_size == 32
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        assert plain["trainer"][key].startswith(str(run.directory))


@pytest.mark.parametrize("task", sorted(set(GROUPS["task"]) - {"parquet"}))
def test_tasks_resolve(tiny_dir, tmp_path, task):
    overrides = [f"task={task}", f"actor_rollout_ref.model.path={tiny_dir}", "recipe.dry_run=true"]
    run = resolve_run([*overrides, f"recipe.output_dir={tmp_path}"], "cpu")
    assert task in run.config.data.train_files and task in run.config.data.val_files


def test_the_default_run_has_at_least_256_held_out_prompts():
    config = compose_config("grpo_llada2", ["hardware=cpu"])
    assert config.task.name == "chain_sum" and config.task.val_size >= 256


def test_prompts_are_built_and_disjoint(resolve):

    run = resolve("recipe.run=a", dry=False)
    train, held_out = (pd.read_parquet(run.config.data[key]) for key in ("train_files", "val_files"))
    assert (len(train), len(held_out)) == (16, 4)
    assert not {str(p) for p in train.prompt} & {str(p) for p in held_out.prompt}


class TestLikelihood:
    def handed_over(self, run):
        """What the actor's engine reads."""
        return OmegaConf.to_container(run.config.actor_rollout_ref.model.override_config, resolve=True)

    def test_exact_is_the_default_and_corrected(self, resolve):
        run = resolve()
        assert self.handed_over(run) == {
            "attn_implementation": "sdpa",
            "model_config": {},
            "dllm": {
                "likelihood": "exact",
                "likelihood_options": {},
                "algorithm": "SelectThenSample",
                "options": {"threshold": None},
            },
        }
        assert run.config.algorithm.rollout_correction.rollout_is == "token"

    @pytest.mark.parametrize("name", ["elbo", "one_step", "coupled"])
    def test_one_switch_is_enough(self, resolve, name):
        """Other likelihoods are not on the engine's scale, so nothing is corrected by its log-probs."""
        run = resolve(f"dllm.likelihood={name}")
        assert self.handed_over(run)["dllm"]["likelihood"] == name
        assert run.config.algorithm.rollout_correction.rollout_is is None

    def test_options_reach_the_engine(self, resolve):
        run = resolve("dllm.likelihood=elbo", "+dllm.likelihood_options={samples: 3, noise: coupled}")
        assert self.handed_over(run)["dllm"]["likelihood_options"] == {"samples": 3, "noise": "coupled"}

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                ["dllm.likelihood=elbo", "algorithm.rollout_correction.rollout_is=token"],
                "rollout_correction.rollout_is=token compares .* dllm.likelihood=elbo, .*; set it to null",
            ),
            (
                ["dllm.likelihood=elbo", "dllm.max_logprob_diff=0.001"],
                "dllm.max_logprob_diff=0.001 compares engine and trainer, which dllm.likelihood=elbo does not allow",
            ),
            (
                ["+dllm.likelihood_options.keep=0.5", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
                "keep=0.5 sub-samples states, which biases loss_mode=gspo",
            ),
            (
                ["actor_rollout_ref.actor.policy_loss.loss_mode=step_ratio", "dllm.likelihood=coupled"],
                "loss_mode=step_ratio needs dllm.likelihood=exact, not coupled",
            ),
            (
                [
                    "actor_rollout_ref.actor.policy_loss.loss_mode=dapo_constant",
                    "actor_rollout_ref.actor.loss_scale_factor=null",
                ],
                "loss_scale_factor=None leaves loss_mode=dapo_constant without its constant denominator; set it to",
            ),
        ],
    )
    def test_pairs_without_a_meaning_are_refused(self, resolve, overrides, message):
        with pytest.raises(ConfigError, match=message):
            resolve(*overrides)


def test_a_path_is_used_instead_of_the_checkpoint_that_ships(resolve, tiny_dir):
    assert resolve().report.effective["model_path"] == str(tiny_dir)


def test_verl_overrides_reach_the_config(resolve):
    run = resolve("actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=7", "algorithm.adv_estimator=rloo")
    assert run.config.actor_rollout_ref.rollout.n == 4
    assert run.config.trainer.total_training_steps == 7
    assert run.config.algorithm.adv_estimator == "rloo"


def test_seed_reaches_the_data(resolve):
    assert resolve("recipe.seed=5").config.data.seed == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("foo.bar=1", r"Could not override 'foo.bar'.*recipe.dry_run=true prints every key"),
        (
            "actor_rollout_ref.rollout.nn=8",
            r"Could not override 'actor_rollout_ref.rollout.nn'.*Key 'nn' is not in struct",
        ),
        ("dllm.threshold=0.9", r"Could not override 'dllm.threshold'"),
        ("recipe.name=a", r"Could not override 'recipe.name'"),
        ("data.train_batch_size", r"Error parsing override 'data.train_batch_size'"),
        (
            "+dllm.options.treshold=0.9",
            r"'treshold' is not an option of SelectThenSample; valid keys are \['threshold'\]",
        ),
        ("dllm.options.threshold=2", r"threshold=2 is not in \(0, 1\]; LLaDA2 uses 0.95"),
        ("dllm.options.threshold=high", r"threshold='high' has the wrong type; expected float"),
        ("dllm.algorithm=Sample", r"dllm algorithm 'Sample' does not exist; use one of"),
        ("dllm.likelihood=guess", r"dllm.likelihood='guess' does not exist; use one of \['coupled', 'elbo', 'exact'"),
        (
            "+dllm.likelihood_options.keeps=1",
            r"'keeps' is not an option of exact; valid keys are \['keep', 'keep_floor'\]",
        ),
        ("+dllm.likelihood_options.keep=2", r"dllm.likelihood_options.keep=2.0 is not in \(0, 1\]"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=ppo", r"loss_mode='ppo' does not exist; use one of"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=spg", r"loss_mode=spg needs dllm.likelihood=elbo, not exact"),
        ("dllm.measure_every=-1", "dllm.measure_every=-1 is negative; use 0 to measure no flips"),
        ("dllm.max_logprob_diff=small", r"dllm.max_logprob_diff: Value 'small' of type 'str' could not be converted"),
        ("recipe.seed=zero", r"recipe.seed: Value 'zero' of type 'str' could not be converted to Integer"),
        ("task=nothing", r"Could not find 'task/nothing' Available options in 'task': .*chain_sum"),
        ("task.name=nothing", r"task.name='nothing' does not exist in reasoning-gym .*; use one of"),
        ("+task.params.max_term=3", r"task.params.max_term=3 is not a parameter of chain_sum; valid keys are"),
        ("model=nothing", r"Could not find 'model/nothing' Available options in 'model'"),
        ("actor_rollout_ref.model.path=nowhere", r"model path 'nowhere' is not a directory; pass a local Hugging Face"),
        (
            "actor_rollout_ref.rollout.max_num_seqs=1",
            r"max_running_requests=1 .*actor_rollout_ref.rollout.max_num_seqs",
        ),
        (
            "actor_rollout_ref.rollout.n=1",
            r"actor_rollout_ref.rollout.n=1 leaves GRPO without a group .*; use at least 2",
        ),
        (
            "data.train_batch_size=9",
            r"actor.ppo_micro_batch_size_per_gpu=32 does not divide the 72 samples .*n=8, 1 ranks\); set it to .* 8",
        ),
        ("data.max_response_length=8", r"data.max_response_length=8 is shorter than a block of 32 tokens; raise it to"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.page_size=48",
            r"page_size=48 is not a multiple of the block size 32; use one, or leave it unset",
        ),
    ],
)
def test_refusals(resolve, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(override)
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_hardware(resolve):
    with pytest.raises(
        ConfigError, match=r"Could not find 'hardware/tpu' Available options in 'hardware': cpu gpu1 gpus"
    ):
        resolve(hardware="tpu")


def test_a_decoder_that_draws_nothing_is_refused(resolve):
    with pytest.raises(ConfigError, match="dllm_algorithm='LowConfidence' draws nothing: .* use SelectThenSample"):
        resolve("dllm.algorithm=LowConfidence")


@pytest.mark.parametrize("name", sorted(set(DECODERS) - {"LowConfidence"}))
def test_a_decoder_needs_nothing_but_its_name(resolve, name):
    from rollout.verl.server import decoder_settings

    run = resolve(f"dllm.algorithm={name}")
    engine = OmegaConf.to_container(run.config.actor_rollout_ref.rollout.engine_kwargs, resolve=True)
    assert decoder_settings(engine)["options"] == getattr(DECODERS[name], "rl_options", {})


@pytest.mark.parametrize("model", ["llada2_mini", "llada2_flash"])
def test_a_published_model_needs_a_path(model):
    with pytest.raises(ConfigError, match="actor_rollout_ref.model.path is not set; give it the directory of a LLaDA2"):
        resolve_run([f"model={model}", "recipe.dry_run=true"], "cpu")


class TestParquetTask:
    def resolve(self, tiny_dir, tmp_path, *overrides):
        given = [f"actor_rollout_ref.model.path={tiny_dir}", f"recipe.output_dir={tmp_path}", "task=parquet"]
        return resolve_run([*given, *overrides, "recipe.run=a"], "cpu")

    def test_files_by_path(self, resolve, tiny_dir, tmp_path):
        built = resolve("recipe.run=a", dry=False).config.data
        files = [f"task.train_files=[{built.train_files}]", f"task.val_files=[{built.val_files}]"]
        data = self.resolve(tiny_dir, tmp_path, *files, "data.max_prompt_length=384").config.data
        assert (data.train_files, data.val_files) == (built.train_files, built.val_files)

    def test_several_files_stay_several(self, tiny_dir, tmp_path):
        frame = pd.read_parquet(DATA / "gsm8k_50.parquet")
        parts = [str(tmp_path / f"{i}.parquet") for i in range(4)]
        for part, rows in zip(parts, (slice(0, 10), slice(10, 20), slice(20, 25), slice(25, 30)), strict=True):
            frame.iloc[rows].to_parquet(part)
        files = [f"task.train_files=[{parts[0]},{parts[1]}]", f"task.val_files=[{parts[2]},{parts[3]}]"]
        data = self.resolve(tiny_dir, tmp_path, *files, "data.max_prompt_length=384").config.data
        assert (list(data.train_files), list(data.val_files)) == (parts[:2], parts[2:])
        assert count_prompts(data.val_files) == 10

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ([], "task.train_files is empty; name at least one parquet file"),
            (
                ["task.train_files=[no.parquet]", "task.val_files=[no.parquet]"],
                "task.train_files: 'no.parquet' is not a file; give the path of a parquet file",
            ),
        ],
    )
    def test_refusals(self, tiny_dir, tmp_path, files, message):
        with pytest.raises(ConfigError, match=message):
            self.resolve(tiny_dir, tmp_path, *files)


class TestExistingRuns:
    def prepare(self, tmp_path):
        directory = tmp_path / "runs" / "old"
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text("{}\n")

    def arguments(self, tiny_dir, tmp_path, *more):
        return [
            f"actor_rollout_ref.model.path={tiny_dir}",
            f"recipe.output_dir={tmp_path / 'runs'}",
            "recipe.run=old",
            "recipe.dry_run=true",
            *more,
        ]

    def test_refused_without_resume(self, tiny_dir, tmp_path):
        self.prepare(tmp_path)
        with pytest.raises(ConfigError, match=r"recipe.run='old' already exists in .*; add trainer.resume_mode=auto"):
            resolve_run(self.arguments(tiny_dir, tmp_path), "cpu")

    def test_continued_with_resume(self, tiny_dir, tmp_path):
        self.prepare(tmp_path)
        run = resolve_run(self.arguments(tiny_dir, tmp_path, "trainer.resume_mode=auto"), "cpu")
        assert run.resumed and run.directory == (tmp_path / "runs" / "old").resolve()

    def test_a_new_name_is_a_new_run(self, tiny_dir, tmp_path):
        run = resolve_run(self.arguments(tiny_dir, tmp_path, "trainer.resume_mode=auto"), "cpu")
        assert not run.resumed and run.config.trainer.experiment_name == "old"


class TestCommand:
    def test_dry_run_prints_and_starts_nothing(self, tiny_dir, tmp_path, capsys):
        code = grpo_llada2.main(
            [
                "hardware=cpu",
                "recipe.dry_run=true",
                f"recipe.output_dir={tmp_path / 'runs'}",
                f"actor_rollout_ref.model.path={tiny_dir}",
            ]
        )
        out = capsys.readouterr().out
        assert code == 0 and "preflight: ok" in out
        assert "name: sglang_dllm" in out and "mask_id=" in out
        first = out.splitlines()[0]
        assert first.startswith("hardware=cpu (as asked); ")
        assert json.loads(first.partition("; ")[2])["fp32_gflops_per_core"] > 0
        assert not (tmp_path / "runs").exists()

    def test_a_refusal_is_one_sentence_and_code_2(self, capsys):
        assert grpo_llada2.main(["hardware=cpu", "no.such.key=1"]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: Could not override 'no.such.key'.")
        assert len(captured.err.splitlines()) == 1 and "Traceback" not in captured.err

    def test_help(self, capsys):
        assert grpo_llada2.main(["--help"]) == 0
        assert "python -m recipes.grpo_llada2" in capsys.readouterr().out


class TestPromptLengths:
    """Tasks whose prompts do not fit are refused before anything starts, with the length that they need."""

    def arguments(self, tiny_dir, tmp_path, *more):
        return [
            "task.train_size=8",
            "task.val_size=4",
            "task.sft_size=0",
            f"actor_rollout_ref.model.path={tiny_dir}",
            f"recipe.output_dir={tmp_path / 'runs'}",
            f"recipe.cache_dir={tmp_path / 'cache'}",
            *more,
        ]

    @pytest.mark.parametrize("task", ["countdown", "gcd", "mini_sudoku", "sudoku"])
    def test_too_long(self, tiny_dir, tmp_path, task):
        given = self.arguments(tiny_dir, tmp_path, f"task={task}")
        message = rf"data.max_prompt_length=64 is too short for \d+ of the 12 prompts of task={task}: the longest has"
        with pytest.raises(ConfigError, match=message) as refusal:
            resolve_run(given, "cpu")
        remedy = re.search(r"set (data.max_prompt_length=\d+)", str(refusal.value))[1]
        with pytest.raises(ConfigError, match=message):
            resolve_run([*given, "recipe.dry_run=true"], "cpu")
        run = resolve_run([*given, remedy], "cpu")
        assert remedy == f"data.max_prompt_length={run.config.data.max_prompt_length}"

    def test_a_dry_run_says_what_it_did_not_check(self, tiny_dir, tmp_path):
        run = resolve_run(self.arguments(tiny_dir, tmp_path, "task=gcd", "recipe.dry_run=true"), "cpu")
        assert "prompts are not built yet" in run.report.describe() and not (tmp_path / "cache").exists()

    def test_prompts_that_verl_drops_are_not_refused(self, tiny_dir, tmp_path):
        resolve_run(self.arguments(tiny_dir, tmp_path, "task=gcd", "data.filter_overlong_prompts=true"), "cpu")


class TestDecoderFlags:
    """The flags of the other commands work for a run too."""

    @pytest.mark.parametrize("name", ["SampleThenSelect", "FastDLLMv2"])
    def test_a_name_is_enough(self, tiny_dir, tmp_path, name):
        given = as_overrides(["--dllm-algorithm", name, f"actor_rollout_ref.model.path={tiny_dir}"])
        run = resolve_run([*given, f"recipe.output_dir={tmp_path}", "recipe.dry_run=true"], "cpu")
        assert run.config.actor_rollout_ref.rollout.engine_kwargs.sglang_dllm.algorithm == name

    def test_a_file_of_options(self, tmp_path):
        file = tmp_path / "options.yaml"
        file.write_text("tokens_per_step: 4\n")
        given = as_overrides(
            ["trainer.test_freq=3", "--dllm-algorithm=StaticSteps", "--dllm-algorithm-config", str(file)]
        )
        assert given == ["trainer.test_freq=3", "dllm.algorithm='StaticSteps'", "++dllm.options.tokens_per_step=4"]

    def test_a_third_party_and_its_file(self, tmp_path):
        name = "tests.unit.test_decoders:Rightmost"
        assert as_overrides(["--dllm-algorithm", name]) == [f"dllm.algorithm='{name}'"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("treshold: 0.9", r"'treshold' is not an option of SelectThenSample; valid keys are \['threshold'\]"),
            ("{block_size: 8}", "sets block_size, which a run takes from the checkpoint; remove it"),
            ("", "is empty or not a mapping"),
        ],
    )
    def test_refusals(self, tmp_path, content, message):
        file = tmp_path / "options.yaml"
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            as_overrides(["--dllm-algorithm-config", str(file)])

    def test_a_flag_without_its_value(self):
        with pytest.raises(ConfigError, match="--dllm-algorithm: expected one argument; the flags are .*NAME"):
            as_overrides(["--dllm-algorithm"])

    def test_a_flag_that_does_not_exist(self):
        with pytest.raises(ConfigError, match="there is no flag --dllm-algoritm; the flags are .*NAME"):
            as_overrides(["--dllm-algoritm", "SelectThenSample"])
