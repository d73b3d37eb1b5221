"""How a client's request may end, given what went wrong around it."""

from __future__ import annotations

from schemas.errors import BusUnavailable, DeadlineExceeded, InternalError, Overloaded, QueueExpired, Unavailable
from tests.simulation.client import Record
from tests.simulation.invariants import Violation
from tests.simulation.plan import Plan

_ITS_OWN = {"finished", "gave_up", DeadlineExceeded.code}
"""Ends that need no excuse: the deadlines of some clients are short on purpose."""
_BUSY = {Overloaded.code, QueueExpired.code}


def judge(record: Record, plan: Plan) -> None:
    """Raises `Violation` for an end that nothing excuses. What was once owned is resumed, whatever fails."""
    if record.wrong:
        raise Violation(f"client {record.number}: {record.wrong}")
    allowed = set(_ITS_OWN)
    if not record.owned:
        allowed |= _BUSY
        if plan.faults or plan.storms:
            allowed |= {Unavailable.code, "bus_unavailable", "model_loading"}
    if record.cut_off:
        allowed.add(BusUnavailable.code)
    if record.job.deaths >= 3:
        allowed.add(InternalError.code)
    if record.node.stop.is_set() or not record.node.alive:
        return
    if record.outcome not in allowed:
        raise Violation(f"client {record.number} ended as {record.outcome!r}: {record.job.error}")
