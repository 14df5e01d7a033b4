"""Prometheus metrics of a server's weight refreshes, beside the engine's on ``/metrics``. Table: docs/metrics.md."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from weight_sync.session import Session, State

PREFIX = "dllm_rollout:weight_sync_"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class RefreshMetrics:
    """What happens to one engine's weights.

    Args:
        enabled: by ``--enable-metrics``; otherwise nothing is counted.
        registry: of Prometheus; None takes that of the process.
    """

    def __init__(self, enabled: bool = False, registry: Any = None) -> None:
        self.enabled, self.registry = enabled, registry

    @cached_property
    def _collectors(self) -> dict[str, Any]:
        # Prometheus reads its multiprocess directory when it is imported, and SGLang names it at its start.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        where: dict[str, Any] = {"registry": self.registry or REGISTRY}
        counter = lambda name, text, *labels: Counter(PREFIX + name, text, labels, **where)
        histogram = lambda name, text: Histogram(PREFIX + name, text, buckets=SECONDS, **where)
        gauge = lambda name, text, *labels: Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent", **where)
        return {
            "state": gauge("engine_weight_state", "1 for the state that it is in.", "state"),
            "refreshes": counter("refreshes", "Updates that are served.", "mode"),
            "bytes": counter("bytes", "Bytes of these updates."),
            "closed": histogram("closed_seconds", "From the closed gate to the open one."),
            "failures": counter("failures", "Steps of updates that were refused or failed.", "stage", "reason"),
            "retries": counter("retries", "Messages to be sent again, and updates applied again."),
        }

    def shown(self, state: State) -> None:
        """Somebody reads the metrics, and the engine is in this state."""
        if self.enabled:
            for each in State:
                self._collectors["state"].labels(each.value).set(each is state)

    def served(self, session: Session, nbytes: int, now: float) -> None:
        """An update has ended well."""
        if self.enabled:
            self._collectors["refreshes"].labels(session.mode).inc()
            self._collectors["bytes"].inc(nbytes)
            self._collectors["closed"].observe(now - session.fenced_at)

    def failed(self, stage: str, reason: str) -> None:
        """A step of an update has failed.

        Args:
            stage: which one; the last part of its address.
            reason: class of the error.
        """
        if self.enabled:
            self._collectors["failures"].labels(stage, reason).inc()

    def retried(self) -> None:
        """Something is sent or applied once more."""
        if self.enabled:
            self._collectors["retries"].inc()
