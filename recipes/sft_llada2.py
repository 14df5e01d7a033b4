"""Warm start of a LLaDA2 by block-diffusion SFT: a checkpoint that RL can start from.

    python -m recipes.sft_llada2                                     # makes recipes/checkpoints/tiny_llada2's weights
    python -m recipes.sft_llada2 task=gcd recipe.run=NAME            # another task
    python -m recipes.sft_llada2 model.shape.layers=6 model.shape.hidden=256   # another size
    python -m recipes.sft_llada2 recipe.dry_run=true                 # show the config, start nothing

Writes outputs/sft_llada2/<run>/: config.yaml, metrics.jsonl and model/ in Hugging Face layout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dllm.config import BlockDiffusionConfig, ConfigError, load_hf_config, resolve
from dllm.models.checkpoint import load_model
from dllm.models.llada2 import LLaDA2MoeModelLM
from recipes.compose import compose_config, run_name
from recipes.settings import RecipeSettings
from recipes.tasks import ReasoningGymTask, build_task, check_task, load_rows, load_task
from recipes.tasks.build import distinct_entries
from recipes.tasks.demonstrations import demonstrations
from recipes.tiny import TinyShape, make_model_dir, shrink_weights, write_model_dir
from recipes.tokenizer import ROLE_END, build_tokenizer, prompt_ids
from trainers.evaluation import Evaluation, evaluate
from trainers.sft import Example, SFTSettings, train_steps

# Prompts the tokenizer's merges are trained on: of the task itself and of these others. A list, because a task that is
# added to the config group must not change the tokenizer of a checkpoint that is made again.
OWN_PROMPTS, OTHER_PROMPTS = 2000, 200
OTHER_TASKS = ("chain_sum", "countdown", "gcd", "mini_sudoku")


@dataclass
class ModelSettings:
    path: str | None = None
    vocab_size: int = 320
    shape: TinyShape = field(default_factory=TinyShape)


@dataclass
class EvaluationSettings:
    every: int = 25
    target_accuracy: float = 0.4
    threshold: float = 0.95
    max_new_tokens: int = 32


@dataclass
class Settings:
    """The config without its task, typed."""

    recipe: RecipeSettings = field(default_factory=RecipeSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    sft: SFTSettings = field(default_factory=SFTSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


@dataclass
class Data:
    """Training examples, held-out rows and the ids of their prompts."""

    examples: list[Example]
    held_out: list[dict[str, Any]]
    held_out_prompts: list[list[int]]


def load_settings(overrides: Sequence[str]) -> tuple[Settings, ReasoningGymTask, DictConfig]:
    """Compose and check the config.

    Raises:
        ConfigError: a key, a value or the task cannot work.
    """
    config = compose_config("sft_llada2", overrides)
    task = check_task(OmegaConf.to_container(config.task, resolve=True))
    if not isinstance(task, ReasoningGymTask) or not task.sft_size:
        raise ConfigError(f"task.name={task.name!r} has no prompts for a warm start; use one with task.sft_size > 0")
    plain = OmegaConf.masked_copy(config, ["recipe", "model", "sft", "evaluation"])
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'config'}: {str(error).splitlines()[0]}") from error
    assert isinstance(settings, Settings)
    return settings, task, config


def tokenizer_prompts(task: ReasoningGymTask) -> list[str]:
    """Text the merges of a fresh tokenizer are trained on."""
    others = [load_task(name) for name in OTHER_TASKS if name != task.name]
    parts = [(task, OWN_PROMPTS), *((other, OTHER_PROMPTS) for other in others)]
    return [entry["question"] for part, count in parts for entry in islice(distinct_entries(part), count)]


def prepare_model(
    settings: ModelSettings, task: ReasoningGymTask, seed: int, directory: Path
) -> tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast]:
    """The model to train and its tokenizer, which lie in ``directory`` afterwards."""
    if settings.path is not None:
        load_hf_config(settings.path)
        return load_model(settings.path, torch.float32), AutoTokenizer.from_pretrained(settings.path)
    tokenizer = build_tokenizer(tokenizer_prompts(task), settings.vocab_size)
    model = make_model_dir(directory, tokenizer, settings.shape, seed=seed)
    shrink_weights(model)
    return model, tokenizer


def prepare_data(task: ReasoningGymTask, tokenizer: PreTrainedTokenizerFast, cache_dir: str) -> Data:
    """Tokenise the task: the response is the answer, the end of the turn and, in training, stop tokens.

    Every prompt comes with each of its demonstrations once per pass.
    """
    files = build_task(task, cache_dir)
    role_end = tokenizer.convert_tokens_to_ids(ROLE_END)

    def examples(row: Mapping[str, Any]) -> list[Example]:
        prompt = prompt_ids(tokenizer, row["prompt"])
        answers = tokenizer(demonstrations(task.name, row, task.flawed_share), add_special_tokens=False).input_ids
        return [Example(prompt, [*answer, role_end]) for answer in answers]

    held_out = load_rows(files.val)
    return Data(
        [example for row in load_rows(files.sft) for example in examples(row)],
        held_out,
        [prompt_ids(tokenizer, r["prompt"]) for r in held_out],
    )


def run(settings: Settings, task: ReasoningGymTask, directory: Path) -> dict[str, Any]:
    """Train until the target accuracy or the end of the schedule; returns the last evaluation's figures."""
    model_dir = directory / "model"
    model, tokenizer = prepare_model(settings.model, task, settings.recipe.seed, model_dir)
    config = load_hf_config(settings.model.path or model_dir)
    block_diffusion: BlockDiffusionConfig = resolve(settings.model.path or model_dir)
    data = prepare_data(task, tokenizer, settings.recipe.cache_dir)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {next(model.parameters()).device}, "
        f"{len(data.examples)} examples, {len(data.held_out)} held-out prompts; {block_diffusion.describe()}"
    )

    def measure(**how: Any) -> Evaluation:
        return evaluate(
            model,
            data.held_out,
            data.held_out_prompts,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            block_diffusion,
            threshold=settings.evaluation.threshold,
            max_new_tokens=settings.evaluation.max_new_tokens,
            **how,
        )

    steps = train_steps(model, data.examples, block_diffusion, settings.sft, settings.recipe.seed)
    started, losses, summary = time.time(), [], {}
    with tqdm(total=settings.sft.steps, unit="step", dynamic_ncols=True) as bar:
        for step, loss in steps:
            bar.update()
            losses.append(loss)
            if step % settings.evaluation.every and step < settings.sft.steps:
                continue
            greedy = measure()
            summary = {
                "step": step,
                "loss": sum(losses) / len(losses),
                "accuracy": greedy.accuracy,
                "malformed": greedy.malformed,
                "steps_per_block": greedy.steps_per_block,
                "seconds": time.time() - started,
            }
            losses.clear()
            bar.write(
                f"step {step:>5}  loss {summary['loss']:.4f}  held-out accuracy {greedy.accuracy:.3f}  malformed "
                f"{greedy.malformed:.3f}  steps per block {greedy.steps_per_block:.2f}"
            )
            write_model_dir(model_dir, model, config, tokenizer)
            _append(directory / "metrics.jsonl", summary)
            if greedy.accuracy >= settings.evaluation.target_accuracy:
                break
    sampled = measure(temperature=1.0, samples=8)
    summary |= {f"sampled_{key}": value for key, value in asdict(sampled).items() if key != "texts"}
    _append(directory / "metrics.jsonl", summary)
    return summary


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(record)) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return 0
    try:
        settings, task, config = load_settings(arguments)
        if settings.recipe.dry_run:
            print(OmegaConf.to_yaml(config, resolve=True))
            return 0
        directory = Path(settings.recipe.output_dir) / run_name(settings.recipe)
        if directory.exists():
            raise ConfigError(
                f"recipe.run={settings.recipe.run!r} already exists in {directory.parent}; choose another name"
            )
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
        summary = run(settings, task, directory)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"held-out greedy accuracy {summary['accuracy']:.3f}, malformed {summary['malformed']:.3f} after "
        f"{summary['step']} steps in {summary['seconds']:.0f} s; at temperature 1 accuracy "
        f"{summary['sampled_accuracy']:.3f}, pass@8 {summary['sampled_pass_at_n']:.3f}, "
        f"{summary['sampled_distinct']:.1f} distinct answers of 8\ncheckpoint {directory / 'model'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
