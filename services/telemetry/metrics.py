"""The instruments of one process, made once and passed in. No global meter provider.

`Metrics.null()` records nothing. Of `Metrics.collecting(...)` the OpenTelemetry SDK reads gauges and counters, prometheus_client
keeps the histograms; the text needs the `edge` extra, which is imported only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeterProvider, Observation

from services.telemetry import names
from services.telemetry.histogram import Histogram
from services.telemetry.names import Spec
from services.telemetry.tally import Tally

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Labels = Mapping[str, str]
_SCOPE = "headrace"


class Metrics:
    """One attribute per counter and histogram: `metrics.requests.add(1, {"model": m})`, `.record(seconds)`.

    Gauges are read when somebody looks: `metrics.gauge(names.KV_BLOCKS_USED, lambda: pool.used)`.
    """

    def __init__(self, meter: Meter, registry: CollectorRegistry | None = None) -> None:
        self._meter = meter
        self._registry = registry
        self.time_to_first_token = self._histogram(names.TIME_TO_FIRST_TOKEN)
        self.time_per_output_token = self._histogram(names.TIME_PER_OUTPUT_TOKEN)
        self.e2e_request_latency = self._histogram(names.E2E_REQUEST_LATENCY)
        self.requests = self._counter(names.REQUESTS)
        self.background_responses = self._counter(names.BACKGROUND_RESPONSES)
        self.requests_cancelled = self._counter(names.REQUESTS_CANCELLED)
        self.preemptions = self._counter(names.PREEMPTIONS)
        self.retries = self._counter(names.RETRIES)
        self.model_fallbacks = self._counter(names.MODEL_FALLBACKS)
        self.prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.generation_tokens = self._counter(names.GENERATION_TOKENS)
        self.handoffs = self._counter(names.HANDOFFS)
        self.handoffs_unfetched = self._counter(names.HANDOFFS_UNFETCHED)
        self.handoff_time = self._histogram(names.HANDOFF_TIME)
        self.kv_fetches = self._counter(names.KV_FETCHES)
        self.kv_blocks_fetched = self._counter(names.KV_BLOCKS_FETCHED)
        self.engine_step_time = self._histogram(names.ENGINE_STEP_TIME)
        self.draft_tokens = self._counter(names.DRAFT_TOKENS)
        self.accepted_tokens = self._counter(names.ACCEPTED_TOKENS)
        self.event_loop_lag = self._histogram(names.EVENT_LOOP_LAG)
        self.detached_adopted = self._counter(names.DETACHED_ADOPTED)
        self.store_checkpoint_time = self._histogram(names.STORE_CHECKPOINT_TIME)
        self.store_failures = self._counter(names.STORE_FAILURES)
        self.cost = self._counter(names.COST)
        self.compute = self._counter(names.COMPUTE)
        self.counter_failures = self._counter(names.COUNTER_FAILURES)
        self.usage_lost = self._counter(names.USAGE_LOST)
        self.bus_refused = self._counter(names.BUS_REFUSED)
        self.bus_reconnects = self._counter(names.BUS_RECONNECTS)
        self.bus_errors = self._counter(names.BUS_ERRORS)
        self.bus_unheard = self._counter(names.BUS_UNHEARD)

    @classmethod
    def null(cls) -> Metrics:
        """Records nothing; for tests and tools."""
        return cls(NoOpMeterProvider().get_meter(_SCOPE))

    @classmethod
    def collecting(cls, process: str) -> Metrics:
        """Records for `prometheus_text`. Without the exporter, which the `edge` extra brings, nothing is recorded."""
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        try:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import CollectorRegistry, disable_created_metrics
        except ImportError:
            return cls.null()

        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second time series for each, which nobody reads
        registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
        resource = Resource({"service.name": "headrace", "service.instance.id": process})
        provider = MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
        return cls(provider.get_meter(_SCOPE), registry)

    def gauge(self, spec: Spec, read: Callable[[], float], labels: Labels | None = None) -> None:
        """`read()` is called whenever the metrics are collected; possibly from another thread."""
        attributes = dict(labels or {})

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            yield Observation(read(), attributes)

        self._meter.create_observable_gauge(spec.name, callbacks=[observe], description=spec.description)

    def prometheus_text(self) -> bytes:
        """The Prometheus text exposition format (version 0.0.4); empty when nothing is recorded."""
        if self._registry is None:
            return b""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def _counter(self, spec: Spec) -> Tally:
        return Tally(self._meter, spec)

    def _histogram(self, spec: Spec) -> Histogram:
        return Histogram(spec, self._registry)
