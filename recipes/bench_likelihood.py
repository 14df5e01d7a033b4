"""Likelihoods side by side: what they cost, and how far they are from what they estimate.

    python -m recipes.bench_likelihood                                  # a random tiny model
    python -m recipes.bench_likelihood --device cuda --dtype bfloat16 --model-path DIR --checkpoint-layers \\
        --prompt 256 --response 2048 --samples 1 --row 8192 --json FILE

Cost: tokens of the forward pass, as a multiple of the P + R of the sequences too, and seconds, for random sequences of
one shape. Accuracy: mean and standard deviation over many draws of the masks on a small random model, against the ELBO
with all its states enumerated and against the log-likelihood of the decoder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from dllm.attention import attention_for
from dllm.config import ConfigError, load_hf_config, resolve
from dllm.decoding import SamplingBatch, SamplingParams
from dllm.likelihood import Coupled, Elbo, Exact, OneStep, States
from dllm.likelihood.exact import target_head
from dllm.likelihood.states import content_generator, forward_tokens, pack_states, split
from dllm.likelihood.subsample import inclusion_probabilities, slice_signals, subsample
from dllm.models import BlockDiffusionLM, meta_model
from dllm.models.checkpoint import load_model
from dllm.replay import SampleSlices
from dllm.trace import RolloutTrace
from recipes.likelihood_accuracy import MASK, Accuracy, measure_accuracy, random_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KEEP = 0.25


@torch.no_grad()
def random_weights(model_dir: str, dtype: torch.dtype, device: str, seed: int) -> BlockDiffusionLM:
    """The network of a config.json, its weights drawn on ``device``: what a published model costs, without its files.

    Raises:
        ConfigError: the directory has no config.json of a known architecture.
    """
    config = load_hf_config(model_dir)
    model = in_dtype(meta_model(config, model_dir), dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def in_dtype(model: BlockDiffusionLM, dtype: torch.dtype) -> BlockDiffusionLM:
    """All of the model in ``dtype``, but for what computes in fp32 everywhere."""
    model.to(dtype)
    for part in model.fp32_modules():
        part.float()
    return model


def random_trace(
    generator: np.random.Generator, prompt: int, response: int, size: int, per_step: float, vocab: int, mask_id: int
) -> RolloutTrace:
    """Random tokens, revealed in random order, ``per_step`` of them at each step on average."""
    tokens = generator.integers(0, vocab - 1, prompt + response).astype(np.int32)
    tokens[tokens == mask_id] = vocab - 1
    steps = np.zeros(response, np.int16)
    counts = []
    for start in range(prompt // size * size, prompt + response, size):
        free = np.arange(max(start, prompt), start + size) - prompt
        count = max(1, round(len(free) / per_step))
        steps[generator.permutation(free)] = np.arange(len(free)) % count
        counts.append(count)
    logprob = np.log(generator.uniform(0.2, 1.0, response)).astype(np.float32)
    ones, versions = np.ones(response, np.float32), [""] * len(counts)
    return RolloutTrace(
        tokens[:prompt], tokens[prompt:], response, steps, logprob, logprob, ones, counts, versions, size
    )


# Cost


def row_per_step(states: States) -> list[States]:
    """The same slices with a copy of the clean tokens for every step, as where each round is a row of its own."""
    count = len(states.sample.slices)
    steps = sorted({piece.step for piece in states.sample.slices})
    ends = np.cumsum([0, *(len(piece.columns) for piece in states.sample.slices)])
    rows = []
    for step in steps:
        chosen = [i for i in range(count) if states.sample.slices[i].step == step]
        weights = np.concatenate([states.weights[ends[i] : ends[i + 1]] for i in chosen])
        sample = SampleSlices(states.sample.clean, [states.sample.slices[i] for i in chosen])
        rows.append(States(sample, weights))
    return rows


def kept_states(trace: RolloutTrace, mask_id: int) -> list[States]:
    """The replay's states, sub-sampled to ``KEEP`` of them."""
    states = Exact().states(trace, mask_id)
    probability = inclusion_probabilities(slice_signals(states, trace.logprob), KEEP, 0.1)
    return [subsample(states, probability, len(trace.replay_ids), content_generator(trace, "keep"))[0]]


@dataclass(frozen=True)
class Method:
    """What is measured.

    Attributes:
        rows: the states of one response, as one or several rows.
        passes: a forward pass for every row, as with micro-batches; else all rows are one batch.
    """

    rows: Callable[[RolloutTrace, int], list[States]]
    passes: bool = False


def methods(row: int) -> dict[str, Method]:
    """Methods by name; ``row`` is the length of rows that are split."""
    alone = lambda likelihood: Method(lambda trace, mask_id: [likelihood.states(trace, mask_id)])
    return {
        "exact": alone(Exact()),
        f"exact, keep={KEEP}": Method(kept_states),
        f"exact, rows of {row}": Method(lambda trace, mask_id: split(Exact().states(trace, mask_id), row), passes=True),
        "exact, a row per step": Method(lambda trace, mask_id: row_per_step(Exact().states(trace, mask_id))),
        "elbo, stratified, 2": alone(Elbo(2)),
        "elbo, coupled, 1": alone(Elbo(1, "coupled")),
        "elbo, stratified, 16": alone(Elbo(16)),
        "one_step": alone(OneStep()),
        "coupled": alone(Coupled()),
    }


@dataclass
class Cost:
    """One row of the cost table; seconds are the fastest of the repeats."""

    method: str
    tokens: int
    multiple: float
    forward_s: float
    update_s: float


def _weighted_sum(model: BlockDiffusionLM, states: Sequence[States], size: int, mask_id: int, device: str) -> Any:
    batch, weights = pack_states(states, size, device)
    sampling = SamplingBatch.from_params([SamplingParams()] * len(states), [0] * len(states), device)
    values = model(batch.input_ids, batch.position, attention_for(batch), target_head(batch, sampling, mask_id))
    return (weights * values.logprob).sum()


def _fastest(action: Callable[[], Any], repeats: int, device: str) -> float:
    seconds = []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_cost(
    model: BlockDiffusionLM, traces: Sequence[RolloutTrace], mask_id: int, device: str, repeats: int, row: int
) -> list[Cost]:
    """Forward passes without gradients, and forward with backward, over all traces at once."""
    costs = []
    size = traces[0].block_size
    for name, method in tqdm(methods(row).items(), desc="cost", unit="method", disable=None):
        states = [piece for trace in traces for piece in method.rows(trace, mask_id)]
        tokens, multiple = forward_tokens(states, sum(t.prompt_len + len(t.replay_ids) for t in traces))
        batches = [[piece] for piece in states] if method.passes else [states]

        def forward(batches: Sequence[Sequence[States]] = batches) -> None:
            with torch.no_grad():
                for batch in batches:
                    _weighted_sum(model, batch, size, mask_id, device)

        def update(batches: Sequence[Sequence[States]] = batches) -> None:
            for batch in batches:
                _weighted_sum(model, batch, size, mask_id, device).backward()
            model.zero_grad(set_to_none=True)

        forward()  # compiles and allocates
        costs.append(
            Cost(name, tokens, multiple, _fastest(forward, repeats, device), _fastest(update, repeats, device))
        )
    return costs


# Output


def cost_table(costs: Sequence[Cost], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("tokens", "x (P + R)", "forward s", "update s"):
        table.add_column(column, justify="right")
    for c in costs:
        table.add_row(c.method, f"{c.tokens:,}", f"{c.multiple:.2f}", f"{c.forward_s:.3f}", f"{c.update_s:.3f}")
    return table


def accuracy_table(rows: Sequence[Accuracy], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("states", "mean", "sd", "- ELBO", "s.e.", "- decoder"):
        table.add_column(column, justify="right")
    for r in rows:
        numbers = (r.mean, r.deviation, r.bias, r.bias_error, r.against_decoder)
        table.add_row(r.method, f"{r.states_per_block:.1f}", *(f"{number:.3f}" for number in numbers))
    return table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m recipes.bench_likelihood", description=__doc__.splitlines()[0])
    p.add_argument("--model-path", help="checkpoint for the cost table; without one a random tiny model")
    p.add_argument("--random-weights", action="store_true", help="read the config.json of --model-path only")
    p.add_argument("--checkpoint-layers", action="store_true", help="recompute layers in backward, as training may")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    p.add_argument("--dtype", default="float32", choices=tuple(DTYPES))
    p.add_argument("--prompt", type=int, default=40, help="tokens of the prompt")
    p.add_argument("--response", type=int, default=120, help="tokens of the response; with the prompt whole blocks")
    p.add_argument("--block-size", type=int, default=32, help="without --model-path only")
    p.add_argument("--tokens-per-step", type=float, default=2.55, help="tokens revealed per denoise step")
    p.add_argument("--samples", type=int, default=4, help="sequences in the batch")
    p.add_argument("--row", type=int, default=512, help="length of the rows in 'exact, rows of ...'")
    p.add_argument("--repeats", type=int, default=3, help="timed passes, of which the fastest counts")
    p.add_argument("--draws", type=int, default=2000, help="draws of the masks per estimator")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="write both tables to this file")
    return p


def check(args: argparse.Namespace, block_size: int) -> None:
    """Refuse numbers that describe no batch.

    Raises:
        ConfigError: an argument is out of range or the sequence does not end on the grid.
    """
    for name in ("prompt", "response", "samples", "repeats", "row"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} is below 1; give a positive number")
    if args.random_weights and not args.model_path:
        raise ConfigError("--random-weights needs --model-path with the config.json of the network; add it")
    if args.draws < 2:
        raise ConfigError(f"--draws {args.draws} leaves no deviation to compute; give at least 2")
    if args.tokens_per_step < 1:
        raise ConfigError(f"--tokens-per-step {args.tokens_per_step} is below 1; a step reveals at least one token")
    if rest := (args.prompt + args.response) % block_size:
        raise ConfigError(
            f"--prompt {args.prompt} and --response {args.response} do not end on the grid of block size {block_size}; "
            f"make the response {args.response + block_size - rest}"
        )
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {args.json} lies in a directory that does not exist; create it first")


def _network(args: argparse.Namespace) -> BlockDiffusionLM:
    dtype = DTYPES[args.dtype]
    if not args.model_path:
        return in_dtype(random_model(args.seed), dtype).to(args.device)
    if args.random_weights:
        return random_weights(args.model_path, dtype, args.device, args.seed)
    return load_model(args.model_path, dtype, args.device)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        found = resolve(args.model_path) if args.model_path else None
        size, mask_id = (found.block_size, found.mask_id) if found else (args.block_size, MASK)
        check(args, size)
        model = _network(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model.checkpoint_layers = args.checkpoint_layers
    generator = np.random.default_rng(args.seed)
    shape = (args.prompt, args.response, size, args.tokens_per_step, model.shape.vocab_size, mask_id)
    traces = [random_trace(generator, *shape) for _ in range(args.samples)]
    costs = measure_cost(model, traces, mask_id, args.device, args.repeats, args.row)
    accuracy, elbo, decoder = measure_accuracy(args.draws, args.seed)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    what = f"{args.samples} sequences, P={args.prompt}, R={args.response}, B={size}, {args.tokens_per_step} a step"
    console.print(cost_table(costs, f"Cost: {what}, {args.device}, {args.dtype}"))
    truth = f"ELBO {elbo:.3f}, decoder {decoder:.3f}"
    console.print(accuracy_table(accuracy, f"Accuracy: {args.draws} draws, one response, B=8; nats; {truth}"))
    if args.json is not None:
        rows = {"cost": [asdict(c) for c in costs], "accuracy": [asdict(a) for a in accuracy]}
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
        record = {"settings": settings | {"block_size": size}, **rows, "elbo": elbo, "decoder": decoder}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
