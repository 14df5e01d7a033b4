"""Held-out accuracy and speed of a checkpoint on the real engine, for one decoder or several side by side.

    python -m recipes.evaluate --model-path DIR --task chain_sum
    python -m recipes.evaluate --model-path DIR --task gsm8k.parquet --threshold 0.8 0.9 0.95
    python -m recipes.evaluate --model-path DIR --task countdown --dllm-algorithm SelectThenSample SampleThenSelect

Writes into --out: results.json (the table), answers.jsonl (one line per answer, with its log), accuracy.png (accuracy
against tokens per forward) and engine.log. The engine starts once per decoder and threshold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from tqdm import tqdm

from dllm.config import ConfigError, load_hf_config, resolve
from dllm.decoding import SamplingParams
from dllm.trace import TraceError
from recipes.console import library_output_to
from recipes.plot import plot_accuracy
from recipes.tasks.held_out import held_out_rows
from recipes.tokenizer import prompt_ids
from recipes.variants import Variant, parse_option, variant_grid
from recipes.variants_table import results_table
from rollout.algorithm_config import read_algorithm_config
from rollout.engine import Engine, GenerateParams, check_prompt
from rollout.generate import load_tokenizer
from rollout.records import RolloutError, RolloutSample, tokens_per_forward, write_line
from trainers.scores import ScoreSummary, score_answer, summarise_scores

HISTOGRAM_BINS = 20


@dataclass(frozen=True)
class Result:
    """What one variant did.

    Attributes:
        label, algorithm, options: the variant.
        scores: accuracy with its interval, malformed answers.
        tokens: generated tokens, the rest of each terminal block included.
        visible_tokens: those of the answers.
        seconds: wall time of the generation, without the engine's start.
        tokens_per_forward: ``tokens`` per denoise forward, as in training (``dllm/tokens_per_forward``).
        tokens_per_second: ``visible_tokens`` per second.
        steps_per_block: denoise steps, mean.
        length_limit: share of answers that reached the limit of new tokens.
        confidence_histogram: shares of the tokens whose confidence at the reveal lies in each of 20 equal parts of 0
            to 1.
        start_seconds: time the engine took to start.
    """

    label: str
    algorithm: str
    options: dict[str, Any]
    scores: ScoreSummary
    tokens: int
    visible_tokens: int
    seconds: float
    tokens_per_forward: float
    tokens_per_second: float
    steps_per_block: float
    length_limit: float
    confidence_histogram: list[float]
    start_seconds: float


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m recipes.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model-path", required=True, help="Hugging Face checkpoint directory")
    p.add_argument("--task", required=True, help="a name of recipes/config/task, gsm8k, math500, or FILE.parquet")
    p.add_argument("--limit", type=int, help="take the first so many held-out prompts only")
    p.add_argument("--dllm-algorithm", nargs="+", default=["SelectThenSample"], help="decoders to compare")
    p.add_argument("--dllm-algorithm-config", metavar="FILE.yaml", help="options of the decoder; --threshold wins")
    p.add_argument("--threshold", nargs="+", type=float, help="values of the decoder's option threshold")
    p.add_argument(
        "--option", action="append", default=[], metavar="KEY=V1,V2", help="values of another option of the decoder"
    )
    p.add_argument("--n", type=int, default=1, help="answers per prompt")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=-1)
    p.add_argument("--seed", type=int, default=0, help="same seed, same answers")
    p.add_argument("--max-new-tokens", type=int, default=512)
    p.add_argument("--out", help="directory to write, default outputs/evaluate/<time>")
    p.add_argument("--cache-dir", default="outputs/cache", help="where prompts of task generators are kept")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if one is visible")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    p.add_argument("--max-running-requests", type=int, help="default: chosen from memory")
    p.add_argument("--tp-size", type=int, default=1)
    p.add_argument("--trust-remote-code", action="store_true")
    return p


@dataclass(frozen=True)
class Plan:
    """A checked evaluation: nothing was started or written yet."""

    variants: list[Variant]
    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    params: GenerateParams
    out: Path


def from_file(algorithms: Sequence[str], path: str) -> dict[str, list[Any]]:
    """Options of a YAML file, each as its only value.

    Raises:
        ConfigError: it goes with several decoders, cannot be read, or holds a key that the decoder does not have.
    """
    if len(algorithms) > 1:
        raise ConfigError(f"--dllm-algorithm-config={path} goes with one decoder, not with {len(algorithms)}")
    options = read_algorithm_config(algorithms[0], path)
    if "block_size" in options:
        raise ConfigError(f"{path} sets block_size, which an evaluation takes from the checkpoint; remove it")
    return {key: [value] for key, value in options.items()}


def make_plan(args: argparse.Namespace) -> Plan:
    """Check the arguments.

    Raises:
        ConfigError: one of them cannot work.
    """
    for name, least in (("n", 1), ("max_new_tokens", 1), ("limit", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')}={value} is too small; use at least {least}")
    if args.n > 1 and args.temperature == 0:
        raise ConfigError(f"--n={args.n} at temperature 0 gives equal answers; add --temperature 1 or leave --n out")
    try:
        sampling = SamplingParams(args.temperature, args.top_p, args.top_k)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    options = {} if args.threshold is None else {"threshold": args.threshold}
    if args.dllm_algorithm_config is not None:
        options = from_file(args.dllm_algorithm, args.dllm_algorithm_config) | options
    for key, values in map(parse_option, args.option):
        if key in options:
            raise ConfigError(f"option {key!r} is given twice; list its values in one place")
        options[key] = values
    mask_id = resolve(args.model_path).mask_id
    variants = variant_grid(args.dllm_algorithm, options, mask_id)
    out = Path(args.out or Path("outputs/evaluate") / time.strftime("%Y%m%d-%H%M%S"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={str(out)!r} exists already; choose another directory")
    rows = held_out_rows(args.task, args.cache_dir, args.limit)
    tokenizer = load_tokenizer(args.model_path, args.trust_remote_code)
    vocab_size = int(load_hf_config(args.model_path)["vocab_size"])
    prompts = []
    for number, row in enumerate(rows):
        score_answer(row, "")  # a data source without a reward is refused here
        try:
            prompts.append(prompt_ids(tokenizer, row["prompt"]))
        except Exception as error:  # whatever the checkpoint's template raises
            raise ConfigError(f"prompt {number}: the chat template refuses it: {error}") from error
        check_prompt(prompts[-1], mask_id, vocab_size)
    return Plan(variants, rows, prompts, GenerateParams(sampling, args.max_new_tokens), out)


def histogram(samples: Sequence[RolloutSample]) -> list[float]:
    """Shares of the drawn tokens by their confidence at the reveal."""
    values = np.concatenate([s.trace.confidence[s.trace.reveal_step >= 0] for s in samples])
    counts, _ = np.histogram(values.clip(0, 1), bins=HISTOGRAM_BINS, range=(0, 1))
    return (counts / max(1, len(values))).tolist()


def answer_line(variant: Variant, row: Mapping[str, Any], prompt: int, made: RolloutSample) -> dict[str, Any]:
    """One line of ``answers.jsonl``: the rollout's line (see ``rollout.records``) with its task and its score."""
    score = score_answer(row, made.text)
    return {
        "variant": variant.label,
        "prompt": prompt,
        "data_source": row["data_source"],
        "ground_truth": row["reward_model"]["ground_truth"],
        "acc": score["acc"],
        "malformed": score["malformed"],
        **made.to_line(),
    }


def run_variant(args: argparse.Namespace, plan: Plan, variant: Variant, answers: TextIO, terminal: TextIO) -> Result:
    """Start an engine, answer every prompt and sum up; lines are written as they come."""
    begin = time.perf_counter()
    with Engine(
        args.model_path,
        dllm_algorithm=variant.algorithm,
        options=variant.options,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        max_running_requests=args.max_running_requests,
        tp_size=args.tp_size,
    ) as engine:
        # The first request pays for what is compiled or captured on demand.
        engine.generate(plan.prompts[:1], GenerateParams(plan.params.sampling, 1), seed=args.seed)
        ready = time.perf_counter()
        lines: list[dict[str, Any]] = []
        total = len(plan.prompts) * args.n
        with tqdm(total=total, desc=variant.label, unit="answer", file=terminal, dynamic_ncols=True) as bar:

            def on_sample(prompt: int, _: int, made: RolloutSample) -> None:
                lines.append(answer_line(variant, plan.rows[prompt], prompt, made))
                write_line(answers, lines[-1])
                bar.update()
                bar.set_postfix_str(f"accuracy {sum(line['acc'] for line in lines) / len(lines):.3f}")

            made = engine.generate(plan.prompts, plan.params, n=args.n, seed=args.seed, on_sample=on_sample)
        seconds = time.perf_counter() - ready
    samples = [sample for group in made for sample in group]
    tokens = sum(len(s.trace.replay_ids) for s in samples)
    visible = sum(s.trace.visible for s in samples)
    return Result(
        label=variant.label,
        algorithm=variant.algorithm,
        options=dict(variant.options),
        scores=summarise_scores(lines, [line["prompt"] for line in lines]),
        tokens=tokens,
        visible_tokens=visible,
        seconds=seconds,
        tokens_per_forward=tokens_per_forward(s.trace for s in samples),
        tokens_per_second=visible / seconds,
        steps_per_block=float(np.mean([n for s in samples for n in s.trace.steps_per_block])),
        length_limit=float(np.mean([s.finish_reason == "length" for s in samples])),
        confidence_histogram=histogram(samples),
        start_seconds=ready - begin,
    )


def evaluate(args: argparse.Namespace, plan: Plan) -> list[Result]:
    """Run every variant, one engine after the other; what is finished is on disk if a later one fails."""
    plan.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with (
        library_output_to(plan.out / "engine.log") as terminal,
        (plan.out / "answers.jsonl").open("w", encoding="utf-8") as answers,
    ):
        for number, variant in enumerate(plan.variants, 1):
            print(f"starting engine {number} of {len(plan.variants)}: {variant.label}", file=terminal, flush=True)
            results.append(run_variant(args, plan, variant, answers, terminal))
            content = {"arguments": vars(args), "results": [asdict(result) for result in results]}
            (plan.out / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            plot_accuracy([(r.label, r.tokens_per_forward, r.scores) for r in results], plan.out / "accuracy.png")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        plan = make_plan(args)
        results = evaluate(args, plan)
    except (ConfigError, TraceError, RolloutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    title = f"{args.task}: {len(plan.prompts)} prompts, {args.n} answer(s) each, temperature {args.temperature:g}"
    console.print(results_table(results, title))
    print(f"files in {plan.out}: results.json, answers.jsonl, accuracy.png, engine.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
