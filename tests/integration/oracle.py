"""The reference decoder as an oracle for the engine, and requests on which two correct implementations must agree.

Two fp32 implementations differ in the last bits. A decision that hangs on those bits (two nearly equal
confidences, noise that falls on the edge between two tokens, two nearly equal experts) may go either way, and
everything after it differs. So the requests that are compared token for token are chosen such that in the
reference no decision is that close; about one in four is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dllm.config import BlockDiffusionConfig, resolve
from dllm.decoding import BlockBatch, Reveal, SamplingParams, make_decoder
from dllm.decoding.confidence import masked_confidence
from dllm.decoding.sampling import sampling_logprobs
from dllm.models.base import BlockDiffusionLM
from dllm.noise import uniform
from dllm.reference import block_logits, decode
from dllm.trace import RolloutTrace
from tests.support import write_tiny_model

THRESHOLD = 0.032
"""Low enough that a random model reveals several tokens at many steps."""

SHAPE: dict[str, Any] = dict(layers=3, hidden=64, heads=2, kv_heads=1, intermediate=128, expert_intermediate=32)

TOLERANCE = 1e-4
"""Log-probs and confidences, in nats and as probabilities."""

COPIES, SHAKE = 12, 1e-5
"""How often and by how much (standard deviation, in nats) logits are changed to find close decisions."""

CLOSE_DRAW, CLOSE_CONFIDENCE, CLOSE_LOGIT, CLOSE_EXPERTS = 3e-6, 3e-7, 1e-5, 2e-6


class Watched:
    """A decoder that remembers whether some decision of its was close.

    With ``analytic`` the rule of SelectThenSample is looked at; any other decoder is asked again with logits that are
    changed by as much as two implementations may differ.
    """

    def __init__(self, decoder: Any, model: BlockDiffusionLM, analytic: bool = True) -> None:
        self.decoder, self.model, self.mask_id, self.analytic = decoder, model, decoder.mask_id, analytic
        self.selection, self.greedy = getattr(decoder, "selection", None), getattr(decoder, "greedy", False)
        self.noise = torch.Generator().manual_seed(0)
        self.close = False

    def max_steps(self, block_size: int) -> int:
        return self.decoder.max_steps(block_size)

    def step(self, blocks: BlockBatch, logits: torch.Tensor) -> Reveal:
        result = self.decoder.step(blocks, logits)
        self.close |= bool(self.model.router_gap().min() < CLOSE_EXPERTS)
        if not self.analytic:
            self.close |= self._shaken(blocks, logits, result)
        elif not bool(result.done[0]):
            self.close |= self._close_positions(blocks, logits) or self._close_draw(blocks, logits, result)
        return result

    def _shaken(self, blocks: BlockBatch, logits: torch.Tensor, result: Reveal) -> bool:
        """Whether a slightly changed copy of the logits leads to another block."""
        rows = torch.zeros(COPIES, dtype=torch.int64)
        columns = {name: getattr(blocks, name)[rows] for name in ("ids", "given", "start", "step", "counter")}
        change = SHAKE * torch.randn((COPIES, *logits.shape[1:]), generator=self.noise)
        copies = BlockBatch(**columns, sampling=blocks.sampling.rows(rows))
        other = self.decoder.step(copies, logits + change)
        return bool((other.ids != result.ids).any() or (other.done != result.done).any())

    def _close_positions(self, blocks: BlockBatch, logits: torch.Tensor) -> bool:
        confidence = masked_confidence(blocks.ids, logits, self.mask_id)[0]
        best = confidence[confidence > -torch.inf].sort(descending=True).values
        at_threshold = bool((best - THRESHOLD).abs().min() < CLOSE_CONFIDENCE)
        between = len(best) > 1 and bool(best[0] <= THRESHOLD) and bool(best[0] - best[1] < CLOSE_CONFIDENCE)
        return at_threshold or between

    def _close_draw(self, blocks: BlockBatch, logits: torch.Tensor, result: Reveal) -> bool:
        columns = result.revealed[0].nonzero()[:, 0]
        sampling = blocks.sampling.rows(torch.zeros_like(columns))
        logp = sampling_logprobs(logits[0, columns], sampling, self.mask_id)
        if sampling.all_greedy:
            best = logits[0, columns].clone()
            best[:, self.mask_id] = -torch.inf
            top = best.topk(2).values
            return bool((top[:, 0] - top[:, 1]).min() < CLOSE_LOGIT)
        noise = uniform(sampling.seed, blocks.start[0] + columns, blocks.step[0].expand(len(columns)))
        edges = logp.double().exp().cumsum(-1)
        return bool((edges - noise[:, None] * edges[:, -1:]).abs().min() < CLOSE_DRAW)


@dataclass
class Case:
    """A request and what the reference makes of it."""

    prompt: list[int]
    seed: int
    sampling: SamplingParams
    trace: RolloutTrace


@dataclass
class TinyModel:
    """A random tiny model on disk, and the same network in this process."""

    path: Path
    model: BlockDiffusionLM
    config: BlockDiffusionConfig
    cases: dict[Any, Case] = field(default_factory=dict)

    def prompt(self, length: int, variant: int = 0) -> list[int]:
        """Token ids without special tokens."""
        return [6 + (7 * i + 13 * length + 29 * variant) % 240 for i in range(length)]

    def mask_share(self) -> float:
        """Mean probability of the mask token in blocks without any token yet."""
        hidden = [self.config.mask_id] * self.config.block_size
        states = [self.prompt(length, variant) + hidden for length in (32, 64) for variant in range(4)]
        logits = [block_logits(self.model, torch.tensor(ids), self.config.block_size) for ids in states]
        return float(torch.cat(logits).softmax(-1)[:, self.config.mask_id].mean())

    def reference(self, prompt: Sequence[int], algorithm: str = "SelectThenSample", **arguments: Any) -> RolloutTrace:
        """The oracle's response; see ``dllm.reference.decode``."""
        return self.watched(prompt, algorithm, **arguments)[0]

    def watched(
        self, prompt: Sequence[int], algorithm: str = "SelectThenSample", **arguments: Any
    ) -> tuple[RolloutTrace, bool]:
        """The oracle's response, and whether some decision was close; ``decoder`` wins over ``algorithm``."""
        given_decoder = arguments.pop("decoder", None)
        inner = given_decoder or make_decoder(algorithm, self.config.mask_id, {"threshold": THRESHOLD})
        decoder = Watched(inner, self.model, analytic=given_decoder is None)
        given = dict(block_size=self.config.block_size, max_new_tokens=50, eos_ids=self.config.eos_ids) | arguments
        self.model.record_router_gaps(True)
        try:
            trace = decode(self.model, list(prompt), decoder, **given)
        finally:
            self.model.record_router_gaps(False)
        trace.validate()
        return trace, decoder.close

    def case(
        self,
        length: int,
        sampling: SamplingParams | None = None,
        first: int = 0,
        seed_of: Callable[[list[int]], int] | None = None,
        also: Sequence[TinyModel] = (),
        **arguments: Any,
    ) -> Case:
        """A prompt of ``length`` tokens whose response has no close decision, here and in the models of ``also``.

        Args:
            first: variant of the prompt to begin with.
            seed_of: seed of a prompt; its variant if None.
        """
        sampling = sampling or SamplingParams()
        key = (length, sampling, first, None if seed_of is None else id(seed_of), len(also), str(arguments))
        if key not in self.cases:
            for variant in range(first, first + 20):
                prompt = self.prompt(length, variant)
                seed = variant if seed_of is None else seed_of(prompt)
                arguments |= {"sampling": sampling, "seed": seed}
                results = [model.watched(prompt, **arguments) for model in (self, *also)]
                if not any(close for _, close in results):
                    self.cases[key] = Case(prompt, seed, sampling, results[0][0])
                    break
            else:
                raise AssertionError("20 prompts with a close decision: the bounds are too wide")
        return self.cases[key]


def make(directory: Path, seed: int, head_std: float | None = None, **changes: Any) -> TinyModel:
    """A random tiny model of ``SHAPE`` with ``changes``."""
    model = write_tiny_model(directory, seed, head_std, **{**SHAPE, **changes})
    return TinyModel(directory, model.eval(), resolve(directory))


def assert_same(engine: RolloutTrace, reference: RolloutTrace) -> None:
    """Token for token, step for step, log-prob for log-prob, the terminal block included."""
    assert engine.replay_ids.tolist() == reference.replay_ids.tolist()
    assert engine.visible == reference.visible
    assert engine.reveal_step.tolist() == reference.reveal_step.tolist()
    assert engine.steps_per_block == reference.steps_per_block
    for name in ("logprob", "logprob_raw", "confidence"):
        np.testing.assert_allclose(getattr(engine, name), getattr(reference, name), atol=TOLERANCE, err_msg=name)
