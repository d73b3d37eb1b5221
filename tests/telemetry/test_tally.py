"""A counter of our own says what OpenTelemetry's would, whoever adds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from services.telemetry.metrics import Metrics


def test_additions_are_summed_by_their_labels() -> None:
    metrics = Metrics.collecting("e1-0000000000000")
    for amount in (1, 2, 0.5):
        metrics.cost.add(amount, {"tenant": "a", "model": "m"})
    metrics.cost.add(4, {"tenant": "b", "model": "m"})
    metrics.usage_lost.add(3)
    text = metrics.prometheus_text().decode()
    assert 'headrace_cost_total{model="m",tenant="a"} 3.5' in text
    assert 'headrace_cost_total{model="m",tenant="b"} 4.0' in text
    assert "headrace_usage_entries_lost_total 3.0" in text
    assert "# TYPE headrace_cost_total counter" in text


def test_what_was_never_added_to_says_nothing() -> None:
    assert "headrace_cost_total{" not in Metrics.collecting("e1-0000000000000").prometheus_text().decode()


def test_threads_lose_no_addition() -> None:
    metrics = Metrics.collecting("e1-0000000000000")

    def add(_: int) -> None:
        for _ in range(2_000):
            metrics.requests.add(1, {"model": "m", "outcome": "stop"})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(8)))
    assert 'headrace_requests_total{model="m",outcome="stop"} 16000.0' in metrics.prometheus_text().decode()
