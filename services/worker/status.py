"""What `hr.admin.<role>.<id>.status` answers: the state that beats say, and whether the KV ledger's books are right."""

from __future__ import annotations

import asyncio

import msgspec

from schemas.state import WorkerState
from services.kv.holders import ChoiceHolder, HandoffHolder, RunHolder
from services.kv.pool import LedgerError
from services.telemetry import names
from services.worker.worker import Worker


class KvLedger(msgspec.Struct, frozen=True, kw_only=True):
    """`swapped`: blocks of preempted runs saved outside the pool, of `swap_total`; `withheld`: kept back for their return.

    `orphaned`: blocks of runs that are not here any more; 0 unless there is a bug. `integrity`: "ok" or what is wrong.
    """

    free: int
    cached: int
    held: int
    total: int
    swapped: int
    swap_total: int
    withheld: int
    orphaned: int
    leases_lapsed: int
    integrity: str


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`writes`: the schema version of its messages. `tasks`: of the event loop, the answer itself included."""

    state: WorkerState
    runs: int
    writes: int
    tasks: int
    kv: KvLedger


def status(worker: Worker) -> WorkerStatus:
    return WorkerStatus(
        state=worker.beats.state(),
        runs=len(worker.runs),
        writes=worker.bus.dialect.writes,
        tasks=len(asyncio.all_tasks()),
        kv=_ledger(worker),
    )


def register_gauges(worker: Worker) -> None:
    """What the metrics say of the pool and the runs, read when somebody looks."""
    metrics, pool = worker.metrics, worker.engine.pool
    metrics.gauge(names.KV_BLOCKS_USED, lambda: pool.held)
    metrics.gauge(names.KV_BLOCKS_TOTAL, lambda: pool.total)
    metrics.gauge(names.KV_BLOCKS_ORPHANED, lambda: _ledger(worker).orphaned)
    metrics.gauge(names.KV_SWAP_BLOCKS_USED, lambda: pool.swap.used)
    metrics.gauge(names.KV_SWAP_BLOCKS_TOTAL, lambda: pool.swap.total)
    metrics.gauge(names.REQUESTS_SWAPPED, lambda: worker.engine.stats().swapped)
    metrics.gauge(names.REQUESTS_RUNNING, lambda: len(worker.runs))


def _ledger(worker: Worker) -> KvLedger:
    pool = worker.engine.pool
    # Reservations and loans belong to a lease, runs and handoffs to a run that must be here.
    owned = RunHolder | ChoiceHolder | HandoffHolder
    holders = (*pool.holders, *pool.swap.holders)
    live = [holder for holder in holders if not isinstance(holder, owned) or worker.runs.get(holder.run)]
    try:
        pool.check_integrity()
        integrity = "ok"
    except LedgerError as error:
        integrity = error.message
    return KvLedger(
        free=pool.free,
        cached=pool.cached,
        held=pool.held,
        total=pool.total,
        swapped=pool.swap.used,
        swap_total=pool.swap.total,
        withheld=pool.withheld,
        orphaned=len(pool.orphaned(live)) + pool.swap.orphaned(live),
        leases_lapsed=pool.leases_lapsed,
        integrity=integrity,
    )
