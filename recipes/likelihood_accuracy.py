"""Estimators of a likelihood against the truth, on a random model whose states can all be enumerated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from dllm.decoding import make_decoder
from dllm.likelihood import Coupled, Elbo, Likelihood, OneStep
from dllm.likelihood.enumeration import estimate, score_all_states
from dllm.models.base import init_weights
from dllm.models.llada2 import LLaDA2Config, LLaDA2MoeModelLM
from dllm.reference import decode

VOCAB, MASK = 48, 47


def random_model(seed: int, hidden: int = 64, layers: int = 3) -> LLaDA2MoeModelLM:
    """A random network with every part of the real one."""
    shape = LLaDA2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden // 2,
        n_group=4,
        topk_group=2,
    )
    model = LLaDA2MoeModelLM(shape)
    init_weights(model, seed)
    return model.eval()


@dataclass
class Accuracy:
    """One row of the accuracy table, in nats."""

    method: str
    states_per_block: float
    mean: float
    deviation: float
    bias: float
    bias_error: float
    against_decoder: float


def estimators() -> dict[str, Likelihood]:
    return {
        "elbo, iid, 2": Elbo(2, "iid"),
        "elbo, stratified, 2": Elbo(2),
        "elbo, stratified, 3": Elbo(3),
        "elbo, coupled, 1": Elbo(1, "coupled"),
        "elbo, stratified, 16": Elbo(16),
        "one_step": OneStep(),
        "coupled": Coupled(),
    }


def measure_accuracy(draws: int, seed: int, block_size: int = 8) -> tuple[list[Accuracy], float, float]:
    """Estimators on one decoded response of a random model.

    Returns:
        Rows, the enumerated ELBO and the log-likelihood of the decoder.
    """
    model = random_model(seed)
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, MASK, block_size + 3).tolist()
    decoder = make_decoder("SelectThenSample", MASK, {"threshold": 0.15})
    with torch.no_grad():
        trace = decode(model, prompt, decoder, block_size=block_size, max_new_tokens=2 * block_size - 3, seed=seed)
    scores = score_all_states(model, trace, MASK)
    exact = estimate(Elbo(noise="all").states(trace, MASK), scores)
    decoded = float(trace.logprob.sum())
    rows = []
    for name, likelihood in tqdm(estimators().items(), desc="accuracy", unit="method", disable=None):
        states = [likelihood.states(trace, MASK, generator) for _ in range(draws)]
        values = np.asarray([estimate(s, scores) for s in states])
        slices = float(np.mean([len(s.sample.slices) for s in states])) / len(trace.steps_per_block)
        mean, deviation = float(values.mean()), float(values.std(ddof=1))
        error = deviation / draws**0.5
        rows.append(Accuracy(name, slices, mean, deviation, mean - exact, error, mean - decoded))
    return rows, exact, decoded
