"""Prometheus metrics of block diffusion on the server's ``/metrics``, with prefix ``dllm_rollout:``.

Filled in the scheduler process of the first tensor-parallel rank, with ``--enable-metrics``; SGLang's multiprocess mode
of Prometheus carries them to the HTTP process. Table: docs/metrics.md.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import Any

from dllm.trace import is_mixed
from rollout.plugin import version
from rollout.plugin.blocklog import BlockRecord

PREFIX = "dllm_rollout:"
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 33)
TOKENS_PER_FORWARD = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONFIDENCE = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
LAG = (0, 1, 2, 3, 4, 8, 16)


class GroupDiversity:
    """Share of distinct responses among those to one prompt, mean over the prompts answered last.

    Args:
        prompts: how many prompts are remembered.
        responses: how many of the last responses to each.
    """

    def __init__(self, prompts: int = 64, responses: int = 32) -> None:
        self.prompts, self.responses = prompts, responses
        self.groups: OrderedDict[int, deque[int]] = OrderedDict()

    def add(self, prompt: Any, response: Any) -> None:
        """Note a response; both are sequences of token ids."""
        key = hash(tuple(prompt))
        self.groups.setdefault(key, deque(maxlen=self.responses)).append(hash(tuple(response)))
        self.groups.move_to_end(key)
        while len(self.groups) > self.prompts:
            self.groups.popitem(last=False)

    def mean(self) -> float | None:
        """1 where all responses differ, 1 / n where n are equal; None before a prompt has two."""
        shares = [len(set(group)) / len(group) for group in self.groups.values() if len(group) > 1]
        return sum(shares) / len(shares) if shares else None


class Metrics:
    """The collectors; one set per process."""

    def __init__(self) -> None:
        # Prometheus reads its multiprocess directory when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        counter = lambda name, text, *labels: Counter(PREFIX + name, text, labels)
        histogram = lambda name, text, buckets: Histogram(PREFIX + name, text, buckets=buckets)
        gauge = lambda name, text: Gauge(PREFIX + name, text, multiprocess_mode="mostrecent")
        self.tokens = counter("tokens", "Tokens of finished blocks, hidden ones behind a stop included.")
        self.steps = counter("denoise_steps", "Denoise steps of finished blocks.")
        self.edits = counter("edits", "Visible tokens that a decoder replaced.")
        self.tokens_per_forward = histogram(
            "tokens_per_forward", "Tokens per denoise step of a block.", TOKENS_PER_FORWARD
        )
        self.steps_per_block = histogram("steps_per_block", "Denoise steps of a block.", STEPS)
        self.confidence = histogram("confidence", "Confidence of tokens at their reveal.", CONFIDENCE)
        self.queue = histogram("queue_time_seconds", "From arrival to the first forward pass.", SECONDS)
        self.run = histogram("run_time_seconds", "From the first forward pass to the end.", SECONDS)
        self.finished = counter("requests", "Requests that ended.", "reason")
        self.aborted = counter("aborted", "Requests that were aborted or failed.", "reason")
        self.prompt_tokens = counter("prefill_tokens", "Prompt tokens that ran in chunks of several blocks.")
        self.prompt_passes = counter("prefill_passes", "Forward passes of such chunks.")
        self.diversity = gauge("group_diversity", "Share of distinct responses per prompt, over the last prompts.")
        self.version = gauge("weight_version", "Version of the weights, if it is a number.")
        self.lag = histogram("weight_version_lag", "Versions between a response's first block and its end.", LAG)
        self.mixed = counter("mixed_requests", "Requests that weights of several versions have decoded.")
        self.groups = GroupDiversity()

    def block(self, req: Any, record: BlockRecord) -> None:
        """A finished block."""
        count = len(record.reveal_step) - record.given
        self.tokens.inc(count)
        self.steps.inc(record.steps)
        self.edits.inc(len(record.edits))
        self.steps_per_block.observe(record.steps)
        self.tokens_per_forward.observe(count / max(1, record.steps))
        for value in record.confidence[record.given :].tolist():
            self.confidence.observe(value)
        if not hasattr(req, "dllm_first_version"):
            req.dllm_first_version, req.dllm_mixed = record.weight_version, False
        if is_mixed((req.dllm_first_version, record.weight_version)) and not req.dllm_mixed:
            req.dllm_mixed = True
            self.mixed.inc()

    def request(self, req: Any) -> None:
        """A request that just ended."""
        reason = req.finished_reason.to_json()
        kind = str(reason["type"])
        self.finished.labels(kind).inc()
        if kind == "abort":
            self.aborted.labels(str(reason.get("err_type") or "abort")).inc()
        now, stats = time.perf_counter(), req.time_stats
        if stats.forward_entry_time:
            self.queue.observe(max(0.0, stats.forward_entry_time - stats.wait_queue_entry_time))
            self.run.observe(now - stats.forward_entry_time)
        if kind != "abort":
            self.groups.add(req.origin_input_ids, req.output_ids[: req.finished_len])
            if (mean := self.groups.mean()) is not None:
                self.diversity.set(mean)
        first, current = getattr(req, "dllm_first_version", None), version.current()
        if current.isdigit():
            self.version.set(int(current))
            if first is not None and first.isdigit():
                self.lag.observe(int(current) - int(first))

    def dropped(self, count: int) -> None:
        """Requests that left a queue without running."""
        if count:
            self.finished.labels("abort").inc(count)
            self.aborted.labels("abort").inc(count)

    def prefill(self, tokens: int) -> None:
        """A pass of prompt chunks."""
        self.prompt_tokens.inc(tokens)
        self.prompt_passes.inc()


_metrics: Metrics | None = None


def current() -> Metrics | None:
    """The collectors of this process; None without ``--enable-metrics``."""
    return _metrics


def _after_scheduler_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _metrics
    args_ = scheduler.server_args
    if args_.enable_metrics and args_.dllm_algorithm is not None and scheduler.ps.tp_rank == 0 and _metrics is None:
        _metrics = Metrics()


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_diffusion_llm", _after_scheduler_init, HookType.AFTER
    )
