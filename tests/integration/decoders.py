"""A decoder of a third party that lets the requests of one engine use many: by seed, one engine start for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dllm.decoding import BlockBatch, Decoder, Reveal, make_decoder

DECODERS: dict[str, dict[str, Any]] = {
    "SampleThenSelect": {"threshold": 0.012},
    "SampleThenSelect ": {"threshold": 0.012, "tokens_per_step": 3},
    "JointThreshold": {"threshold": 0.032, "edit_threshold": 0.034, "max_post_edit_steps": 2},
    "StaticSteps": {"tokens_per_step": 3},
    "EntropyBound": {"gamma": 9.5},
    "Margin": {"threshold": 0.008},
    "FastDLLMv2": {"threshold": 0.032, "sub_block_size": 8},
    "SelectThenSample": {"threshold": 0.032},
    "Vandal": {},
}
"""Name (a space at its end where one comes twice) and options; a request with seed s uses number s % 16."""

NAMES = tuple(DECODERS)


def inner_decoder(name: str, mask_id: int) -> Decoder:
    """One of ``DECODERS``."""
    return Vandal(mask_id) if name == "Vandal" else make_decoder(name.strip(), mask_id, DECODERS[name])


class BySeed:
    """Splits a batch among ``DECODERS`` and joins their answers.

    ``selection`` is that of the first; the log of a request that another one decoded has to be read without it
    (``as_logged``).
    """

    options: ClassVar[dict[str, Any]] = {}
    edits = True

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id
        self.inner = [inner_decoder(name, mask_id) for name in NAMES]
        self.selection = self.inner[0].selection

    def max_steps(self, block_size: int) -> int:
        return max(decoder.max_steps(block_size) for decoder in self.inner)

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        which = blocks.sampling.seed % 16
        # SGLang's health check brings no seed.
        which = torch.where(which < len(NAMES), which, NAMES.index("SelectThenSample"))
        joined: dict[str, Tensor] = {}
        for number in which.unique().tolist():
            rows = (which == number).nonzero()[:, 0]
            part = {name: getattr(blocks, name)[rows] for name in ("ids", "given", "start", "step", "counter")}
            result = self.inner[number].step(BlockBatch(**part, sampling=blocks.sampling.rows(rows)), logits[rows])
            if result.select_logprob is None:
                result = replace(result, select_logprob=torch.zeros(len(rows), device=logits.device))
            for name, value in vars(result).items():
                whole = joined.setdefault(name, value.new_empty((len(which), *value.shape[1:])))
                whole[rows] = value
        return Reveal(**joined)


class Vandal:
    """Replaces a token of the prompt, which no decoder may."""

    def __init__(self, mask_id: int) -> None:
        self.inner = make_decoder("SelectThenSample", mask_id)

    def max_steps(self, block_size: int) -> int:
        return self.inner.max_steps(block_size)

    def step(self, blocks: BlockBatch, logits: Tensor) -> Reveal:
        result = self.inner.step(blocks, logits)
        result.ids[blocks.given & ~result.done[:, None]] += 1
        return result
