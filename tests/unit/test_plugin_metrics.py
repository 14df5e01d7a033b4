"""Prometheus metrics of finished blocks and requests, without an engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import REGISTRY

from rollout.plugin import version
from rollout.plugin.blocklog import BlockRecord
from rollout.plugin.metrics import PREFIX, GroupDiversity, Metrics


def test_diversity_of_groups():
    groups = GroupDiversity(prompts=2, responses=3)
    assert groups.mean() is None
    groups.add([1], [5])
    assert groups.mean() is None, "one response says nothing"
    groups.add([1], [5])
    assert groups.mean() == 0.5
    for response in ([6], [7], [8]):
        groups.add([2], response)
    assert groups.mean() == 0.75
    for response in ([5], [9]):
        groups.add([1], response)
    assert groups.mean() == pytest.approx((2 / 3 + 1) / 2), "the last three responses to a prompt"
    groups.add([3], [1])
    assert list(groups.groups) == [hash((1,)), hash((3,))], "the two prompts answered last"


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return Metrics()


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(PREFIX + name, labels) or 0.0


def request(reason: dict, first_version: str = "3") -> SimpleNamespace:
    now = time.perf_counter()
    return SimpleNamespace(
        finished_reason=SimpleNamespace(to_json=lambda: reason),
        finished_len=2,
        origin_input_ids=[1, 2],
        output_ids=[7, 8, 9],
        time_stats=SimpleNamespace(wait_queue_entry_time=now - 5, forward_entry_time=now - 3),
        dllm_first_version=first_version,
    )


def test_a_block(metrics):
    confidence = np.asarray([0.0, 0.2, 0.96, 0.97], np.float32)
    record = BlockRecord(1, 2, np.zeros(4, int), confidence, confidence, confidence, "3", edits=[(0, 1, 2, 3)])
    req = SimpleNamespace()
    metrics.block(req, record)
    assert req.dllm_first_version == "3" and value("mixed_requests_total") == 0
    assert (value("tokens_total"), value("denoise_steps_total"), value("edits_total")) == (3, 2, 1)
    assert value("tokens_per_forward_sum") == 1.5 and value("steps_per_block_bucket", le="2.0") == 1
    assert value("confidence_bucket", le="0.95") == 1 and value("confidence_count") == 3


def test_a_request_of_two_versions(metrics):
    """Counted once, however many of its blocks follow; and so are weights that are a mixture themselves."""
    nothing = np.zeros(0, np.float32)
    req, torn = SimpleNamespace(), SimpleNamespace()
    for weights in ("3", "3", "4", "4", "3"):
        metrics.block(req, BlockRecord(0, 1, np.zeros(0, int), nothing, nothing, nothing, weights))
    assert value("mixed_requests_total") == 1
    metrics.block(torn, BlockRecord(0, 1, np.zeros(0, int), nothing, nothing, nothing, "torn:3->4"))
    assert value("mixed_requests_total") == 2


def test_requests(metrics, monkeypatch):
    monkeypatch.setattr(version, "_current", "5")
    metrics.request(request({"type": "stop"}))
    metrics.request(request({"type": "stop"}))
    metrics.request(request({"type": "abort", "err_type": "nan_logits"}))
    metrics.dropped(2)
    assert value("requests_total", reason="stop") == 2 and value("requests_total", reason="abort") == 3
    assert value("aborted_total", reason="nan_logits") == 1 and value("aborted_total", reason="abort") == 2
    assert value("queue_time_seconds_sum") == pytest.approx(6, abs=0.1)
    assert value("run_time_seconds_sum") == pytest.approx(9, abs=0.5)
    assert value("group_diversity") == 0.5 and value("weight_version") == 5
    assert value("weight_version_lag_sum") == 6 and value("weight_version_lag_count") == 3
