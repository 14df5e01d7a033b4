"""Committed blocks of an answer under way, and the states that each went through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_PREFIX = "dllm_"


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


def committed(answer: Mapping[str, Any], prompt_len: int, block_size: int) -> list[Block]:
    """Finished blocks of SGLang's answer so far, of a stream whose chunks are cumulative.

    Raises:
        NoLog: there are tokens and no log.
    """
    meta, ids = answer["meta_info"], list(answer["output_ids"])
    summaries = list(meta.get(_PREFIX + "block", []))
    if ids and not summaries:
        raise NoLog(
            "the engine logs no reveal steps; start it with this package installed and one of its decoders "
            "(--dllm-algorithm SelectThenSample)"
        )
    blocks, first = [], 0
    for end, summary in enumerate(summaries, 1):
        if summary is None:
            continue
        part, tail = slice(first, end), summary.get("tail") or {}
        given = (prompt_len + first) % block_size
        blocks.append(
            Block(
                ids[part] + list(tail.get("ids", [])),
                end - first,
                [int(v) for v in [*meta[_PREFIX + "reveal_step"][part], *tail.get("reveal_step", [])]],
                [*meta[_PREFIX + "confidence"][part], *tail.get("confidence", [])],
                int(summary["steps"]),
                [(s, c - given, old, new) for s, c, old, new in summary.get("edits", []) if c >= given],
            )
        )
        first = end
    return blocks
