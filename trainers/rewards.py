"""Verifiable rewards: 1 for the exact answer, 0 for anything else.

``compute_score`` has the signature verl calls (``reward.custom_reward_function``). It is safe in worker threads.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from dllm.config import ConfigError
from trainers.math_verifier import MathVerifier

REASONING_GYM = "reasoning_gym/"
MATH_SOURCES = frozenset(
    {
        "gsm8k",
        "openai/gsm8k",
        "math",
        "math500",
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
    }
)

_INTEGER = re.compile(r"-?[0-9]+")
_GRID = re.compile(r"[1-4](?: [1-4]){3}(?:\n[1-4](?: [1-4]){3}){3}")
_GRID_9 = re.compile(r"[1-9](?: [1-9]){8}(?:\n[1-9](?: [1-9]){8}){8}")
_EXPRESSION = re.compile(r"[0-9+\-*/() ]*[0-9][0-9+\-*/() ]*")
_ANYTHING = re.compile(r".*\S.*", re.DOTALL)
# What an answer looks like, by task of reasoning-gym; tasks not named here accept any text that is not empty.
ANSWER_FORMATS: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("chain_sum", "basic_arithmetic", "gcd", "lcm", "products", "count_bits"), _INTEGER),
    "countdown": _EXPRESSION,
    "mini_sudoku": _GRID,
    "sudoku": _GRID_9,
}
# A whole number on its own: not part of a word, a decimal or a longer expression.
_STANDALONE_INTEGER = re.compile(r"(?<![\w.,+\-*/^])-?[0-9]+(?![\w*/^+]|[.,\-][0-9])")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_verifier = MathVerifier()
_IMPORTING = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Score one response.

    Args:
        data_source: ``reasoning_gym/<task>``, or one of ``MATH_SOURCES`` (scored with ``math_verify``).
        solution_str: the response's text without special tokens.
        ground_truth: the right answer.
        extra_info: for reasoning-gym, ``metadata`` holds the entry's metadata as JSON, which some scorers need.

    Returns:
        ``score`` and ``acc``, 1.0 if the answer is exactly right and else 0.0 (never part of a point), and
        ``malformed``, 1.0 if the text is not in the task's answer format at all.

    Raises:
        ConfigError: there is no scorer for ``data_source``.
    """
    if data_source.startswith(REASONING_GYM):
        correct, formed = _score_reasoning_gym(
            data_source.removeprefix(REASONING_GYM), solution_str, str(ground_truth), extra_info or {}
        )
    elif data_source in MATH_SOURCES:
        comparison = _verifier.compare(str(ground_truth), solution_str)
        correct, formed = comparison.equal, comparison.parsed
    else:
        raise ConfigError(
            f"data_source={data_source!r} has no reward; use '{REASONING_GYM}<task>' or one of {sorted(MATH_SOURCES)}"
        )
    return {"score": float(correct), "acc": float(correct), "malformed": float(not formed)}


def extract_answer(text: str, task: str) -> tuple[str, bool]:
    """Find the answer in a response.

    In this order: the last ``<answer>`` element, the last ``\\boxed{}``, the whole text; for tasks with whole
    numbers as answers, else the last whole number that stands on its own.

    Returns:
        The answer, and whether the text was in the answer format: it is the answer, plain or marked as such.
    """
    pattern = ANSWER_FORMATS.get(task, _ANYTHING)
    tagged = _TAGGED.findall(text)
    answer = (tagged[-1] if tagged else _boxed(text) or text).strip()
    if pattern.fullmatch(answer):
        return answer, True
    numbers = _STANDALONE_INTEGER.findall(text) if pattern is _INTEGER else []
    return (numbers[-1] if numbers else answer), False


def _boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` with balanced braces, if there is one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


@cache
def _scorer(task: str) -> Any:
    # verl scores in threads, and the library registers its tasks while it is imported: a second thread would see
    # a part of them.
    with _IMPORTING:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        raise ConfigError(
            f"data_source='{REASONING_GYM}{task}' is not a task of reasoning-gym; correct the data's rows"
        )
    return get_score_answer_fn(task)


def _score_reasoning_gym(task: str, text: str, gold: str, extra_info: Mapping[str, Any]) -> tuple[bool, bool]:
    score = _scorer(task)
    answer, formed = extract_answer(text, task)
    entry = {"question": "", "answer": gold, "metadata": json.loads(extra_info.get("metadata") or "{}")}
    # The library's own score is 1 for the exact answer only; it gives parts of a point for near misses.
    return score(answer=answer, entry=entry) == 1.0, formed
