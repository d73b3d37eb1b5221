"""Metric names are unique and exposed as written; a null set records nothing."""

from __future__ import annotations

import re

from services.telemetry import names
from services.telemetry.metrics import Metrics
from services.telemetry.names import Kind


def test_names_are_unique_and_in_the_field_style() -> None:
    assert len({spec.name for spec in names.ALL}) == len(names.ALL) >= 20
    for spec in names.ALL:
        assert re.fullmatch(r"headrace_[a-z0-9_]+", spec.name)
        if spec not in (names.KV_BLOCKS_TOTAL, names.KV_SWAP_BLOCKS_TOTAL):
            assert (spec.kind is Kind.COUNTER) == spec.name.endswith("_total")
        if spec not in (names.MODEL_FETCH_TIME, names.MODEL_LOAD_TIME):  # once a process
            assert (spec.kind is Kind.HISTOGRAM) == spec.name.endswith("_seconds")
        assert (spec.kind is Kind.HISTOGRAM) == bool(spec.buckets)
        assert list(spec.buckets) == sorted(spec.buckets)


def test_prometheus_text_has_the_names_as_written() -> None:
    metrics = Metrics.collecting("e1-0000000000000")
    metrics.requests.add(2, {"model": "m", "outcome": "stop"})
    metrics.time_to_first_token.record(0.03, {"model": "m"})
    used = 5
    metrics.gauge(names.KV_BLOCKS_USED, lambda: used, {"role": "decode"})
    metrics.gauge(names.KV_BLOCKS_TOTAL, lambda: 8, {"role": "decode"})
    text = metrics.prometheus_text().decode()
    assert 'headrace_requests_total{model="m",outcome="stop"} 2.0' in text
    assert 'headrace_time_to_first_token_seconds_bucket{le="0.04",model="m"} 1.0' in text
    assert 'headrace_kv_blocks_used{role="decode"} 5.0' in text
    assert 'headrace_kv_blocks_total{role="decode"} 8.0' in text
    used = 6
    assert 'headrace_kv_blocks_used{role="decode"} 6.0' in metrics.prometheus_text().decode()


def test_two_processes_in_one_interpreter_do_not_share() -> None:
    one, two = Metrics.collecting("a-0000000000000"), Metrics.collecting("b-0000000000000")
    one.retries.add(1)
    assert "headrace_retries_total 1.0" in one.prometheus_text().decode()
    assert "headrace_retries_total" not in two.prometheus_text().decode()


def test_null_records_nothing() -> None:
    metrics = Metrics.null()
    metrics.requests.add(1)
    metrics.gauge(names.REQUESTS_RUNNING, lambda: 1)
    assert metrics.prometheus_text() == b""
