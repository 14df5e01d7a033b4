"""Where a block-diffusion response stops, and the log that leaves with it.

A block commits up to ``block_size`` tokens at once. Stock SGLang checks the length limit before stop tokens and
stop strings before EOS, as if one token had been added; a response then runs past its own EOS when the limit or
a stop string lies in the same block. Here the earliest stop wins. The whole terminal block is kept for replay.
"""

from __future__ import annotations

import signal
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from rollout.params import RESUMED
from rollout.plugin import metrics
from rollout.plugin.blocklog import BlockRecord

PATTERN_SECONDS = 0.2
"""For the patterns of a request, after every block."""

PER_TOKEN = ("reveal_step", "logprob", "logprob_raw", "confidence")
INFO_PREFIX = "dllm_"
BLOCK_KEY = INFO_PREFIX + "block"


def _as_list(record: BlockRecord, name: str) -> list:
    return getattr(record, name)[record.given :].tolist()


def _append_log(req: Any, record: BlockRecord, accepted: int) -> None:
    """Extend the per-token lists of the request by one block; they stay aligned with ``output_ids``."""
    if req.customized_info is None:
        before = len(req.output_ids) - accepted
        req.customized_info = {INFO_PREFIX + name: [None] * before for name in PER_TOKEN}
        req.customized_info[BLOCK_KEY] = [None] * before
    info = req.customized_info
    for name in PER_TOKEN:
        info[INFO_PREFIX + name].extend(_as_list(record, name))
    summary: dict[str, Any] = {"steps": record.steps, "weight_version": record.weight_version}
    if record.select_logprob:
        summary["select_logprob"] = record.select_logprob
        if record.selection is not None:
            summary["selection"] = record.selection
    if record.edits:
        summary["edits"] = record.edits
    if record.routing is not None:
        summary["routing"] = _as_list(record, "routing")
    info[BLOCK_KEY].extend([None] * (accepted - 1) + [summary])


def _attach_tail(req: Any) -> None:
    """Move the block summary to the last visible token, with the tokens behind it as ``tail``."""
    info, end = req.customized_info, req.finished_len
    summary = dict(info[BLOCK_KEY][-1])
    tail = slice(end, len(req.output_ids))
    summary["tail"] = {
        "ids": list(req.output_ids[tail]),
        **{name: info[INFO_PREFIX + name][tail] for name in PER_TOKEN},
    }
    info[BLOCK_KEY][-1] = None
    info[BLOCK_KEY][end - 1] = summary


def _resumed(req: Any) -> Any:
    """Tokens of the prompt that belong to the response and may hold the beginning of a stop string."""
    count = (req.sampling_params.custom_params or {}).get(RESUMED, 0)
    count = min(count, req.sampling_params.stop_str_max_len, len(req.origin_input_ids))
    return array("q", req.origin_input_ids[len(req.origin_input_ids) - count :])


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Break off what takes longer, in the main thread; the engine of ``re`` looks for signals while it searches.

    Raises:
        TimeoutError: it did.
    """

    def late(*unused: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _string_stops(req: Any, fresh: int) -> list[tuple[int, Any]]:
    """(length, reason) of every stop string and pattern that ends the response; stock takes the first of its list.

    A pattern may need time without end for some texts, and all other requests would wait for it.
    """
    if not req.sampling_params.stop_regex_strs:
        return _matches(req, fresh)
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    try:
        with at_most(PATTERN_SECONDS):
            return _matches(req, fresh)
    except TimeoutError:
        message = (
            f"sampling_params.stop_regex: searching the response took longer than {PATTERN_SECONDS} s; use a simpler "
            "pattern"
        )
        return [(len(req.output_ids), FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError"))]


def _matches(req: Any, fresh: int) -> list[tuple[int, Any]]:
    params, stops, ids = req.sampling_params, [], req.output_ids
    strings, patterns = params.stop_strs, params.stop_regex_strs
    before = _resumed(req) if strings else ids[:0]
    try:
        if before:
            req.output_ids = before + ids
        for one in [([s], []) for s in strings] + [([], [p]) for p in patterns]:
            params.stop_strs, params.stop_regex_strs = one
            req.finished_reason, req.finished_len = None, None
            # A pattern that cannot be compiled sets a reason without a match.
            if req._check_str_based_finish(fresh) or req.finished_reason is not None:
                length = req.finished_len if req.finished_len is not None else len(req.output_ids)
                stops.append((length - len(before), req.finished_reason))
    finally:
        req.output_ids = ids
        params.stop_strs, params.stop_regex_strs = strings, patterns
    return stops


def earliest_stop(req: Any, accepted: int) -> None:
    """Set ``finished_reason`` and ``finished_len`` from the first stop among the newly accepted tokens.

    Tokens beyond ``max_new_tokens`` are hidden from the stop checks; reaching the limit is the last resort.
    """
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    limit = req.sampling_params.max_new_tokens
    beyond = req.output_ids[limit:]
    del req.output_ids[limit:]
    fresh = accepted - len(beyond)
    if not req._check_vocab_boundary_finish(req.output_ids[len(req.output_ids) - fresh :]):
        found = []
        if fresh and req._check_token_based_finish(req.output_ids[len(req.output_ids) - fresh :]):
            found.append((req.finished_len, req.finished_reason))
        found += _string_stops(req, fresh) if fresh else []
        req.finished_reason, req.finished_len = None, None
        if found:
            req.finished_len, req.finished_reason = min(found, key=lambda item: item[0])
        elif len(req.output_ids) >= limit:
            req.finished_reason, req.finished_len = FINISH_LENGTH(length=limit), limit
    req.output_ids.extend(beyond)


FAILURES = {
    "nan_logits": "the model produced NaN or infinite logits; check the weights and their dtype",
    "unlogged_edit": "the decoder replaced a visible token, which no log would show; set edits = True on its class, "
    "and leave the tokens of the prompt alone",
}
"""What breaks a block."""


def _fail(req: Any, accepted: int, failure: str) -> None:
    """End the request with one of ``FAILURES``; nothing of the broken block is shown."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT(
        f"{failure}: {FAILURES[failure]}",
        HTTPStatus.INTERNAL_SERVER_ERROR,
        failure,
    )
    req.finished_len = len(req.output_ids) - accepted


def _update_finish_state(original: Callable, req: Any, new_accepted_len: int = 1) -> None:
    if not req.is_dllm() or req.finished():
        return original(req, new_accepted_len)
    record = req.__dict__.pop("dllm_record", None)
    if record is not None and record.failure is not None:
        _fail(req, new_accepted_len, record.failure)
        return _count(req, None)
    if record is not None:
        _append_log(req, record, new_accepted_len)
    if getattr(req.to_finish, "status_code", None) is None:
        # Also in the last block of an aborted request: what lies behind its stop is not part of the response.
        earliest_stop(req, new_accepted_len)
    if req.to_finish and not req.finished():
        original(req, new_accepted_len)
    if req.finished():
        if req.finished_len is None:
            req.finished_len = len(req.output_ids)
        if record is not None and req.finished_len > 0:
            _attach_tail(req)
    return _count(req, record)


def _count(req: Any, record: BlockRecord | None) -> None:
    counters = metrics.current()
    if counters is not None:
        if record is not None:
            counters.block(req, record)
        if req.finished():
            counters.request(req)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state", _update_finish_state, HookType.AROUND
    )
