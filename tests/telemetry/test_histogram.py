"""A histogram says what OpenTelemetry's would, whoever records."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from services.telemetry.metrics import Metrics


def lines(metrics: Metrics) -> list[str]:
    return metrics.prometheus_text().decode().splitlines()


def test_counts_are_cumulative_and_a_bound_is_inside_its_bucket() -> None:
    metrics = Metrics.collecting("e1-0000000000000")
    for seconds in (0.004, 0.005, 0.0051, 1e9):
        metrics.time_to_first_token.record(seconds, {"model": "m"})
    told = lines(metrics)
    assert "# TYPE headrace_time_to_first_token_seconds histogram" in told
    name = "headrace_time_to_first_token_seconds"
    assert f'{name}_bucket{{le="0.005",model="m"}} 2.0' in told
    assert f'{name}_bucket{{le="0.01",model="m"}} 3.0' in told
    assert f'{name}_bucket{{le="80.0",model="m"}} 3.0' in told
    assert f'{name}_bucket{{le="+Inf",model="m"}} 4.0' in told
    assert f'{name}_count{{model="m"}} 4.0' in told
    assert not any("_created" in line for line in told)
    assert any(line.startswith(f'{name}_sum{{model="m"}} 1.0000000000') for line in told)


def test_records_are_counted_by_their_labels() -> None:
    metrics = Metrics.collecting("e1-0000000000000")
    metrics.e2e_request_latency.record(1.0, {"model": "a"})
    metrics.e2e_request_latency.record(1.0, {"model": "b"})
    metrics.e2e_request_latency.record(2.0, {"model": "b"})
    told = lines(metrics)
    assert 'headrace_e2e_request_latency_seconds_sum{model="a"} 1.0' in told
    assert 'headrace_e2e_request_latency_seconds_sum{model="b"} 3.0' in told


def test_what_was_never_recorded_says_nothing() -> None:
    assert not any("e2e_request_latency" in line for line in lines(Metrics.collecting("e1-0000000000000")))


def test_threads_lose_no_record() -> None:
    metrics = Metrics.collecting("e1-0000000000000")

    def record(_: int) -> None:
        for _ in range(2_000):
            metrics.engine_step_time.record(0.002)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(record, range(8)))
    assert 'headrace_engine_step_seconds_bucket{le="0.0025"} 16000.0' in lines(metrics)
