"""All trajectories of a decoder over one block, on tables of logits instead of a model.

The decoder itself is run, with every combination of draws in the place of its random ones. Each trajectory becomes a
trace; the trainer's path (slices, packing, head) scores it again from the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from dllm.decoding import BlockBatch, Decoder, Reveal, SamplingBatch, SamplingParams
from dllm.decoding.sampling import sampling_logprobs
from dllm.likelihood.exact import TargetValues, action_logprobs, target_head
from dllm.replay import CLEAN, PackedBatch, build_slices, pack
from dllm.trace import RolloutTrace
from tests.support import sampling_batch

TOKENS, MASK = 3, 3
LOW = -1e4
State = tuple[int, ...]
Table = Callable[[State], Tensor]
"""State of a block (``MASK`` where hidden) -> logits [B, TOKENS + 1]."""


def table_of(parameters: dict[State, Tensor], size: int, seed: int, scale: float = 1.5) -> Table:
    """A random table that fills itself in, so that a test can differentiate the entries that were used."""

    def logits(state: State) -> Tensor:
        if state not in parameters:
            generator = torch.Generator().manual_seed(hash((seed, state)) & 0xFFFFFFFF)
            parameters[state] = (torch.randn(size, TOKENS, generator=generator) * scale).requires_grad_()
        return torch.cat([parameters[state], torch.full((size, 1), LOW)], 1)

    return logits


def fixed(probabilities: list[list[float]]) -> Table:
    """The same distributions in every state."""
    rows = torch.tensor(probabilities).log()
    return lambda state: torch.cat([rows, torch.full((len(rows), 1), LOW)], 1)


def block(
    states: Sequence[State], step: int, params: SamplingParams, seeds: Sequence[int] | None = None, counter: int = 0
) -> BlockBatch:
    """Blocks of equal age, one per state."""
    rows = len(states)
    nothing = torch.zeros(rows, dtype=torch.int64)
    sampling = sampling_batch(params, rows)
    if seeds is not None:
        sampling.seed = torch.tensor(list(seeds))
    ids = torch.tensor(states)
    return BlockBatch(
        ids, torch.zeros_like(ids, dtype=torch.bool), nothing, nothing + step, nothing + counter, sampling
    )


def step_with_draws(decoder: Decoder, blocks: BlockBatch, logits: Tensor, draws: Tensor) -> Reveal:
    """``decoder.step`` where row i draws ``draws[i, column]`` (int64 [n, B])."""

    def forced(logp: Tensor, sampling: SamplingBatch, position: Tensor, step: Tensor) -> Tensor:
        return draws[sampling.seed, position]

    blocks = replace(blocks, sampling=replace(blocks.sampling, seed=torch.arange(len(draws))))
    with patch("dllm.decoding.base.draw", forced), torch.no_grad():
        return decoder.step(blocks, logits)


@dataclass
class Action:
    """One outcome of a denoise step.

    Attributes:
        revealed: positions and the tokens drawn there.
        after: the block after the step, edits included.
        logged: row of the decoder's own answer.
        brute_force: sum over all combinations of draws that lead here of the product of their probabilities.
    """

    revealed: tuple[tuple[int, int], ...]
    after: State
    logged: dict[str, Any]
    brute_force: float

    @property
    def logprob(self) -> float:
        """What the log says about the action."""
        return sum(self.logged["logprob"]) + (self.logged["select_logprob"] or 0.0)


def actions(decoder: Decoder, table: Table, state: State, step: int, params: SamplingParams, counter: int = 0):
    """Every outcome of one step (a list of ``Action``), or None if the block is done."""
    hidden = [i for i, token in enumerate(state) if token == MASK]
    combinations = list(itertools.product(range(TOKENS), repeat=len(hidden)))
    draws = torch.zeros(len(combinations), len(state), dtype=torch.int64)
    draws[:, hidden] = torch.tensor(combinations, dtype=torch.int64).view(len(combinations), len(hidden))
    logits = table(state).detach()
    blocks = block([state] * len(draws), step, params, counter=counter)
    result = step_with_draws(decoder, blocks, logits.expand(len(draws), -1, -1), draws)
    if bool(result.done[0]):
        return None
    logp = sampling_logprobs(logits, sampling_batch(params, len(state)), MASK).double()
    found: dict[tuple, Action] = {}
    for row, combination in enumerate(combinations):
        probability = float(sum((logp[i, t] for i, t in zip(hidden, combination, strict=True)), torch.zeros(())).exp())
        if probability == 0:
            continue
        columns = result.revealed[row].nonzero()[:, 0].tolist()
        revealed = tuple((i, int(draws[row, i])) for i in columns)
        if revealed in found:
            found[revealed].brute_force += probability
            continue
        select = None if result.select_logprob is None else float(result.select_logprob[row])
        logged = {
            "logprob": result.logprob[row, columns].tolist(),
            "select_logprob": select,
            "counter": int(result.counter[row]),
        }
        found[revealed] = Action(revealed, tuple(result.ids[row].tolist()), logged, probability)
    return list(found.values())


@dataclass
class _Node:
    state: State
    step: int = 0
    counter: int = 0
    reveal_step: dict[int, int] = field(default_factory=dict)
    logprob: dict[int, float] = field(default_factory=dict)
    selects: list[float] = field(default_factory=list)
    edits: list[tuple[int, int, int, int, int]] = field(default_factory=list)


def trajectories(decoder: Decoder, table: Table, size: int, params: SamplingParams | None = None) -> list[RolloutTrace]:
    """Every trajectory of a block without prompt, as a trace that validates."""
    params = params or SamplingParams()
    return [_trace(node, size, decoder, params) for node in _walk(decoder, table, _Node((MASK,) * size), params)]


def _walk(decoder: Decoder, table: Table, node: _Node, params: SamplingParams) -> Iterator[_Node]:
    assert node.step <= decoder.max_steps(len(node.state))
    outcomes = actions(decoder, table, node.state, node.step, params, node.counter)
    if outcomes is None:
        yield node
        return
    for action in outcomes:
        changed = [
            (0, node.step, i, old, new)
            for i, (old, new) in enumerate(zip(node.state, action.after, strict=True))
            if old not in (new, MASK)
        ]
        columns = [i for i, _ in action.revealed]
        select = action.logged["select_logprob"]
        following = _Node(
            action.after,
            node.step + 1,
            action.logged["counter"],
            node.reveal_step | dict.fromkeys(columns, node.step),
            node.logprob | dict(zip(columns, action.logged["logprob"], strict=True)),
            node.selects if select is None else [*node.selects, select],
            node.edits + changed,
        )
        yield from _walk(decoder, table, following, params)


def _trace(node: _Node, size: int, decoder: Decoder, params: SamplingParams) -> RolloutTrace:
    logprob = np.asarray([node.logprob[i] for i in range(size)], np.float32)
    trace = RolloutTrace(
        prompt_ids=np.zeros(0, np.int32),
        replay_ids=np.asarray(node.state, np.int32),
        visible=size,
        reveal_step=np.asarray([node.reveal_step[i] for i in range(size)], np.int16),
        logprob=logprob,
        logprob_raw=logprob,
        confidence=np.ones(size, np.float32),
        steps_per_block=[node.step],
        weight_versions=["0"],
        block_size=size,
        sampling=params,
        select_logprobs=[node.selects] if node.selects else None,
        edits=node.edits,
        selection=getattr(decoder, "selection", None),
    )
    trace.validate()
    return trace


def logged(traces: Sequence[RolloutTrace]) -> np.ndarray:
    """Log-probs of trajectories as the decoder logged them: float64 [n]."""
    return np.asarray([trace.action_logprob.astype(np.float64).sum() for trace in traces])


def target_values(traces: Sequence[RolloutTrace], table: Table) -> tuple[PackedBatch, TargetValues]:
    """The trainer's path with the table in the place of the network: slices, packed rows, head."""
    size = traces[0].block_size
    batch = pack([build_slices(trace, MASK) for trace in traces], size)
    assert bool((batch.slice_id != CLEAN)[batch.doc >= 0].all()), "a block without prompt has no clean tokens"
    blocks = batch.input_ids.view(-1, size).tolist()
    hidden = torch.stack([table(tuple(state)) for state in blocks]).view(*batch.input_ids.shape, TOKENS + 1)
    head = nn.Linear(TOKENS + 1, TOKENS + 1, bias=False)
    head.weight = nn.Parameter(torch.eye(TOKENS + 1), requires_grad=False)
    sampling = sampling_batch([trace.sampling for trace in traces])
    return batch, target_head(batch, sampling, MASK)(hidden, head)


def replayed(traces: Sequence[RolloutTrace], table: Table, tokens_only: bool = False) -> Tensor:
    """Log-probs of trajectories as the trainer computes them: float32 [n], differentiable.

    Args:
        tokens_only: leave out the choice of positions (the surrogate that is not a log-probability).
    """
    batch, values = target_values(traces, table)
    per_target = values.logprob if tokens_only else action_logprobs(batch, values)
    return torch.zeros(len(traces)).index_add(0, batch.target_sample, per_target)
