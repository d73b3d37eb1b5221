"""States of an attempt: one enum, one table, one function that applies it. They only go forward."""

from __future__ import annotations

from enum import StrEnum

from schemas.errors import IllegalTransition


class State(StrEnum):
    SUBMITTED = "submitted"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"
    RETRY = "retry"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.FINISHED, State.CANCELLED, State.FAILED, State.EXPIRED, State.RETRY})
_ORDER = (State.SUBMITTED, State.QUEUED, State.PREFILLING, State.HANDING_OFF, State.DECODING)

# A state between two may be missed (its message was lost), so every later state is reachable from every earlier one.
TRANSITIONS: dict[State, frozenset[State]] = {
    state: frozenset(_ORDER[position + 1 :]) | TERMINAL for position, state in enumerate(_ORDER)
} | dict.fromkeys(TERMINAL, frozenset())


def advance(current: State, new: State) -> State:
    """`new`, when `current` may become it. Raises `IllegalTransition`."""
    if new not in TRANSITIONS[current]:
        raise IllegalTransition(f"{current} may not become {new}")
    return new
