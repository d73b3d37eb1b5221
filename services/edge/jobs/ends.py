"""What a terminal event means for the client: the end, a next attempt, or an error. A pure function.

Texts are fixed: what a worker writes is for the log, not for callers.
"""

from __future__ import annotations

from schemas.errors import DeadlineExceeded, QueueExpired, Unavailable, from_code
from schemas.lifecycle import State
from schemas.reply import Event
from services.edge.jobs.active import AttemptEnd

WAITED_TOO_LONG = "The request waited too long for a free worker."
_FAILED = "The model failed on this request."
_TEXTS = {
    "no_capacity": "No worker can begin this request in time.",
    "model_changed": "The model was replaced while this request was running.",
    "invalid_value": "The model could not keep to the 'response_format' of this request.",
}


def end_of(event: Event) -> AttemptEnd | None:
    """None: finished. A run that ended as cancelled although nobody here cancelled it is tried again, as RETRY is."""
    match event.state:
        case State.FINISHED:
            return None
        case State.FAILED:
            text = _TEXTS.get(event.error_code, _FAILED)
            error = from_code(event.error_code or "job_failed", text, retry_after=event.retry_after)
            return AttemptEnd("failed", error, final=True)
        case State.EXPIRED if event.hop == 0:
            return AttemptEnd(
                "expired", QueueExpired("The request waited too long for a free worker.", retry_after=1.0), final=True
            )
        case State.EXPIRED:
            return AttemptEnd("expired", DeadlineExceeded("The request did not finish in time."), final=True)
        case _:
            error = Unavailable("No worker could finish this request.", retry_after=event.retry_after or 1.0)
            return AttemptEnd("retry", error)
