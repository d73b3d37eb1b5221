"""Every metric name, once. Names and units are the field's (Prometheus style: seconds, `_total`).

Labels are bounded: a model, a role, a reason of a fixed set; never a job or a client's text. A tenant, of which an operator makes
as many as they want, is a label of cost and compute only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. `buckets` (upper bounds, in the unit) matter to histograms only."""

    name: str
    kind: Kind
    description: str
    buckets: tuple[float, ...] = ()


_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_LAG = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def _counter(name: str, description: str) -> Spec:
    return Spec(name, Kind.COUNTER, description)


def _gauge(name: str, description: str) -> Spec:
    return Spec(name, Kind.GAUGE, description)


def _histogram(name: str, description: str, buckets: tuple[float, ...]) -> Spec:
    return Spec(name, Kind.HISTOGRAM, description, buckets)


TIME_TO_FIRST_TOKEN = _histogram(
    "headrace_time_to_first_token_seconds", "From the request's arrival to its first token.", _FIRST_TOKEN
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "headrace_request_time_per_output_token_seconds",
    "From first to last text of a request, per token.",
    _TOKEN,
)
E2E_REQUEST_LATENCY = _histogram("headrace_e2e_request_latency_seconds", "From the request's arrival to its end.", _REQUEST)
REQUESTS = _counter("headrace_requests_total", "Requests that were answered, by model, finish reason or error code, and status.")
BACKGROUND_RESPONSES = _counter("headrace_background_responses_total", "Background responses that ended, by model and status.")
REQUESTS_CANCELLED = _counter("headrace_requests_cancelled_total", "Requests whose client went away or cancelled.")
REQUESTS_RUNNING = _gauge("headrace_num_requests_running", "Requests being computed now.")
REQUESTS_SWAPPED = _gauge("headrace_num_requests_swapped", "Requests whose KV waits outside the pool now.")
REQUESTS_WAITING = _gauge("headrace_num_requests_waiting", "Requests waiting for credit now.")
PREEMPTIONS = _counter("headrace_preemptions_total", "Times a request gave up its KV blocks to others.")
RETRIES = _counter("headrace_retries_total", "Attempts after the first, by reason.")
MODEL_FALLBACKS = _counter("headrace_model_fallbacks_total", "Models passed over for another that answered, by both and reason.")
PROMPT_TOKENS = _counter("headrace_prompt_tokens_total", "Prompt tokens of requests that began.")
GENERATION_TOKENS = _counter("headrace_generation_tokens_total", "Tokens generated.")

KV_BLOCKS_USED = _gauge("headrace_kv_blocks_used", "KV blocks held by runs and handoffs.")
KV_BLOCKS_TOTAL = _gauge("headrace_kv_blocks_total", "KV blocks of the pool.")
KV_BLOCKS_ORPHANED = _gauge("headrace_kv_blocks_orphaned", "KV blocks that nobody owns; 0 unless there is a bug.")
KV_SWAP_BLOCKS_USED = _gauge("headrace_kv_swap_blocks_used", "KV blocks of preempted runs, saved outside the pool.")
KV_SWAP_BLOCKS_TOTAL = _gauge("headrace_kv_swap_blocks_total", "KV blocks that can be saved outside the pool.")
HANDOFFS = _counter("headrace_handoffs_total", "Handoffs that ended, by outcome.")
HANDOFFS_UNFETCHED = _counter(
    "headrace_handoffs_unfetched_total", "Handoffs that nobody fetched within the engine's timeout: it kept their blocks so long."
)
HANDOFF_TIME = _histogram("headrace_handoff_seconds", "From the offer of KV blocks to their release.", _FAST)
KV_FETCHES = _counter("headrace_kv_fetches_total", "Times prefill asked a decode worker for cached KV blocks, by outcome.")
KV_BLOCKS_FETCHED = _counter("headrace_kv_blocks_fetched_total", "Cached KV blocks that prefill fetched from decode.")

MODEL_FETCH_TIME = _gauge("headrace_model_fetch_seconds", "Seconds this process took to fetch and check its model.")
MODEL_LOAD_TIME = _gauge("headrace_model_load_seconds", "Seconds this worker took from the files to its engine.")
ENGINE_STEP_TIME = _histogram("headrace_engine_step_seconds", "One engine step.", _TOKEN)
DRAFT_TOKENS = _counter("headrace_spec_decode_draft_tokens_total", "Tokens guessed ahead by speculative decoding.")
ACCEPTED_TOKENS = _counter("headrace_spec_decode_accepted_tokens_total", "Guessed tokens that were right.")
EVENT_LOOP_LAG = _histogram("headrace_event_loop_lag_seconds", "How late a timer of this process's event loop fired.", _LAG)

DETACHED_JOBS = _gauge("headrace_detached_jobs", "Detached jobs that this edge holds.")
DETACHED_ADOPTED = _counter("headrace_detached_adopted_total", "Detached jobs taken over from another edge.")
STORE_CHECKPOINT_TIME = _histogram("headrace_store_checkpoint_seconds", "One checkpoint of all detached jobs.", _FAST)
STORE_FAILURES = _counter("headrace_store_failures_total", "Times the database could not be used, by operation.")
STORE_BEHIND = _gauge("headrace_store_tokens_behind", "Tokens of detached jobs that are not in the database yet.")

COST = _counter("headrace_cost_total", "What requests that ended cost, by tenant and model.")
COMPUTE = _counter("headrace_compute_seconds_total", "Seconds of compute of requests that ended, by tenant and model.")
COUNTER_FAILURES = _counter(
    "headrace_counter_failures_total", "Times the counters of limits a minute could not be used, by kind."
)
USAGE_BEHIND = _gauge("headrace_usage_entries_behind", "Entries of the usage ledger that are not in the database yet.")
USAGE_LOST = _counter(
    "headrace_usage_entries_lost_total", "Entries of the usage ledger given up: the database was away too long."
)

BUS_REFUSED = _counter("headrace_bus_refused_total", "Messages refused whole, by subject family and reason.")
BUS_RECONNECTS = _counter("headrace_bus_reconnects_total", "Times the NATS connection came back.")
BUS_ERRORS = _counter("headrace_bus_errors_total", "Errors the NATS server reported to this connection, by kind.")
BUS_UNHEARD = _counter("headrace_bus_unheard_total", "Notices that nobody listened to a message, by subject family.")

ALL: tuple[Spec, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Spec))
