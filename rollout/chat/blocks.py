"""Committed blocks of a response under way, and the states that each went through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class NoLog(RuntimeError):
    """The engine's answer carries no reveal log."""


@dataclass(frozen=True)
class Block:
    """One committed block, without what the prompt put into it.

    Attributes:
        ids: tokens.
        visible: how many of them are part of the answer; the rest follows a stop.
        reveal_step: step at which each token was revealed.
        confidence: of each token at its reveal.
        steps: denoise steps of the block.
        edits: (step, index into ``ids``, token before, token after).
    """

    ids: list[int]
    visible: int
    reveal_step: list[int]
    confidence: list[float]
    steps: int
    edits: list[tuple[int, int, int, int]] = field(default_factory=list)

    def states(self) -> Iterator[list[int | None]]:
        """Tokens before the first step, and after each; None is a mask."""
        before: dict[int, list[tuple[int, int]]] = {}
        for step, index, old, _ in sorted(self.edits):
            before.setdefault(index, []).append((step, old))
        for now in range(self.steps + 1):
            shown: list[int | None] = []
            for index, (token, step) in enumerate(zip(self.ids, self.reveal_step, strict=True)):
                # A token that is replaced later is what it was until the step of its first replacement to come.
                old = next((old for at, old in before.get(index, ()) if at >= now), token)
                shown.append(None if step >= now else old)
            yield shown


def committed(fields: Mapping[str, Any], start: int, block_size: int) -> list[Block]:
    """The blocks of a stream's event (``rollout.service.Block.fields``).

    Args:
        start: position of its first token, counted from the beginning of the prompt.

    Raises:
        NoLog: there are tokens and no log.
    """
    shown = len(fields["output_ids"])
    if shown and not fields["steps_per_block"]:
        raise NoLog(
            "the engine logs no reveal steps; start it with this package installed and one of its decoders "
            "(--dllm-algorithm SelectThenSample)"
        )
    tail = fields.get("tail") or {}
    whole = {name: [*fields[name], *tail.get(name, [])] for name in ("reveal_step", "confidence")}
    ids = [*fields["output_ids"], *tail.get("ids", [])]
    blocks, first = [], 0
    for steps in fields["steps_per_block"]:
        end = min(len(ids), first + block_size - (start + first) % block_size)
        edits = [(s, at - start - first, old, new) for _, s, at, old, new in fields.get("edits", [])]
        blocks.append(
            Block(
                ids[first:end],
                max(0, min(shown, end) - first),
                [int(step) for step in whole["reveal_step"][first:end]],
                whole["confidence"][first:end],
                steps,
                [edit for edit in edits if 0 <= edit[1] < end - first],
            )
        )
        first = end
    return blocks
