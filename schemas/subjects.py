"""Every NATS subject, stream and bucket Headrace uses; the table of docs/architecture.md in code.

The only place where a name that somebody chose (a model's, a tenant's) becomes a subject token.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

_PLAIN = frozenset(string.ascii_letters + string.digits + "-_")

JOBS_STREAM = "HR_JOBS"
WORKERS_BUCKET = "HR_WORKERS"
QUARANTINE_BUCKET = "HR_QUARANTINE"
COUNTERS_STREAM = "HR_COUNTERS"


def name_token(name: str) -> str:
    """`name` as one subject token: what is not a letter, digit, `-` or `_` becomes `=XX` (UTF-8, hex). Injective."""
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"={byte:02X}" for byte in name.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subject names under one prefix."""

    prefix: str = "hr"

    # work
    def submit(self, model: str) -> str:
        return f"{self.prefix}.submit.{name_token(model)}"

    def submit_any(self) -> str:
        return f"{self.prefix}.submit.*"

    def router_submit(self, router: str) -> str:
        return f"{self.prefix}.router.{router}.submit"

    def job(self, model: str, tier: str, lane: int, job: str) -> str:
        return f"{self.lane(model, tier, lane)}.{job}"

    def lane(self, model: str, tier: str, lane: int) -> str:
        return f"{self.prefix}.jobs.{name_token(model)}.{tier}.{lane}"

    def jobs(self) -> str:
        return f"{self.prefix}.jobs.>"

    def jobs_of(self, model: str) -> str:
        return f"{self.prefix}.jobs.{name_token(model)}.>"

    def queue(self, model: str) -> str:
        return f"{self.prefix}.queue.{name_token(model)}"

    def queue_any(self) -> str:
        return f"{self.prefix}.queue.*"

    def cancel(self) -> str:
        return f"{self.prefix}.cancel"

    # workers
    def prefill_submit(self, worker: str) -> str:
        return f"{self.prefix}.prefill.{worker}.submit"

    def decode_submit(self, worker: str) -> str:
        return f"{self.prefix}.decode.{worker}.submit"

    def decode_lease(self, worker: str) -> str:
        return f"{self.prefix}.decode.{worker}.lease"

    def decode_handoff(self, worker: str) -> str:
        return f"{self.prefix}.decode.{worker}.handoff"

    def decode_offer(self, worker: str) -> str:
        return f"{self.prefix}.decode.{worker}.offer"

    # prefix caches
    def kv_events(self, worker: str) -> str:
        return f"{self.prefix}.kvevents.{worker}"

    def kv_events_any(self) -> str:
        return f"{self.prefix}.kvevents.*"

    def kv_snapshot(self, worker: str) -> str:
        return f"{self.prefix}.kvevents.{worker}.snapshot"

    # replies, control, life
    def reply(self, edge: str) -> str:
        return f"{self.prefix}.reply.{edge}"

    def control(self, process: str) -> str:
        return f"{self.prefix}.ctl.{process}"

    def attach(self, job: str) -> str:
        return f"{self.prefix}.job.{job}"

    def dead(self, process: str) -> str:
        return f"{self.prefix}.dead.{process}"

    def dead_any(self) -> str:
        return f"{self.prefix}.dead.*"

    def worker_state(self, role: str, model: str, worker: str) -> str:
        return f"{self.prefix}.state.{role}.{name_token(model)}.{worker}"

    def worker_state_any(self) -> str:
        return f"{self.prefix}.state.*.*.*"

    def edge_state(self, edge: str) -> str:
        return f"{self.prefix}.state.edge.{edge}"

    def edge_state_any(self) -> str:
        return f"{self.prefix}.state.edge.*"

    # operators
    def admin(self, service: str, process: str, verb: str) -> str:
        return f"{self.prefix}.admin.{service}.{process}.{verb}"

    # limits
    def counter(self, kind: str, owner: str, window: str) -> str:
        """Kind, owner and window, or `*`."""
        return f"{self.prefix}.counters.{kind}.{owner if owner == '*' else name_token(owner)}.{window}"

    # callers that speak NATS
    def chat(self) -> str:
        return f"{self.prefix}.v1.chat.completions"

    def chat_cancel(self, secret: str) -> str:
        return f"{self.prefix}.v1.cancel.{secret}"

    def chat_cancel_any(self) -> str:
        return f"{self.prefix}.v1.cancel.*"
