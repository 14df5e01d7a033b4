"""From rollout files to one HTML file with everything in it: data, style and script."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from dllm.trace import TraceError
from rollout.viewer.samples import view
from rollout.viewer.source import Rollouts, parse_line, texts_of
from rollout.viewer.tokens import TokenTexts

BUDGET_BYTES = 9_500_000
"""Size of all samples together, unless the user asks for a number of them."""

SCRIPTS = ("replay.js", "paint.js", "list.js", "sample.js", "viewer.js")


@dataclass(frozen=True)
class Page:
    """A finished page.

    Attributes:
        html: the file, UTF-8.
        shown: rollouts in it.
        left_out: rollouts of the chosen files that did not fit.
        warnings: one sentence for each sample or line that could not be shown.
    """

    html: bytes
    shown: int
    left_out: int
    warnings: list[str]


class Taken:
    """A sample on its way into the page, with its number of bytes there."""

    def __init__(self, sample: dict[str, Any], line: Mapping[str, Any], groups: dict[Any, int]) -> None:
        self.prompt = tuple(line["input_ids"])
        key = line.get("uid") or self.prompt
        shared = key in groups
        self.group = groups.setdefault(key, len(groups) + 1)
        self.ids = {*self.prompt, *sample["ids"], *(token for edit in sample.get("edits", ()) for token in edit[3:])}
        self.json = compact(sample | {"group": self.group} | ({"uid": line["uid"]} if line.get("uid") else {}))
        self.size = len(self.json) + (0 if shared else len(compact(self.prompt)))


@dataclass
class Collected:
    """What the page embeds, as it is collected. Prompts are shared, because a group's samples have the same one.

    Attributes:
        samples: JSON of each sample.
        prompts: token ids -> index.
        ids: every token id that the page shows.
        left_out: samples that did not fit.
        warnings: see ``Page``.
    """

    samples: list[str] = field(default_factory=list)
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)
    left_out: int = 0
    warnings: list[str] = field(default_factory=list)

    def add(self, one: Taken) -> None:
        index = self.prompts.setdefault(one.prompt, len(self.prompts))
        self.samples.append(f'{{"prompt":{index},{one.json[1:]}')
        self.ids |= one.ids


def compact(value: Any) -> str:
    """JSON without spaces that is safe inside a script element: no ``<``, so no tag can end or begin in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def collect_file(
    made: Collected, step: int | None, path: Path, limit: int | None, budget: int, with_text: bool
) -> None:
    """Add the samples of one file: ``limit`` of them, or without one, whole groups until ``budget`` bytes are full.

    At least one group or, if it alone is too large, one sample is taken.

    Raises:
        TraceError: the file is malformed.
    """
    taken: list[Taken] = []
    groups: dict[Any, int] = {}
    size = 0
    file = texts_of(path)
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        if limit is not None and len(taken) == limit:
            made.left_out += 1 + sum(1 for rest in file if rest.strip())
            break
        line = parse_line(path, number, text)
        if line is None:
            made.warnings.append(f"{path}: the last line was cut when its writer ended, and is not shown")
            break
        try:
            sample = view(line, step, with_text)
        except (TypeError, ValueError) as error:  # TraceError among them
            made.warnings.append(f"{path} line {number} is not shown: {error}")
            continue
        one = Taken(sample, line, groups)
        size += one.size
        if limit is None and taken and size > budget:
            made.left_out += 1 + sum(1 for rest in file if rest.strip())
            whole = [other for other in taken if other.group != one.group]  # leave no group in half
            made.left_out += len(taken) - len(whole) if whole else 0
            taken = whole or taken
            break
        taken.append(one)
    for one in taken:
        made.add(one)


def build_page(rollouts: Rollouts, texts: TokenTexts | None, limit: int | None = None) -> Page:
    """Collect the samples of ``rollouts`` and put them into the page.

    Args:
        texts: texts of tokens; None shows ids.
        limit: samples per file; None for what fits into ``BUDGET_BYTES``.

    Raises:
        TraceError: a file is malformed or has no rollout that can be shown.
    """
    made = Collected()
    for step, path in rollouts.files:
        collect_file(made, step, path, limit, BUDGET_BYTES // len(rollouts.files), texts is None)
    if not made.samples:
        reason = made.warnings[0] if made.warnings else f"{rollouts.files[0][1]} is empty"
        raise TraceError(f"nothing to show: {reason}")
    head: Mapping[str, Any] = {
        "name": rollouts.name,
        "left_out": made.left_out,
        "prompts": [list(ids) for ids in made.prompts],
        "texts": texts.texts(made.ids) if texts else None,
        "special": texts.special(made.ids) if texts else [],
    }
    data = compact(head)[:-1] + ',"samples":[' + ",\n".join(made.samples) + "]}"
    return Page(render(rollouts.name, data), len(made.samples), made.left_out, made.warnings)


def render(title: str, data: str) -> bytes:
    """The template with title, style, scripts and data in their places."""
    package = files("rollout.viewer")
    parts = {
        "title": html.escape(title),
        "style": (package / "viewer.css").read_text(encoding="utf-8"),
        "script": "\n".join((package / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "data": data,
    }
    template = (package / "template.html").read_text(encoding="utf-8")
    # One pass: text of a rollout may look like a placeholder.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    return page.encode("utf-8", "replace")
