"""Who may hold KV blocks. A holder is a small value; what it holds, and until when, is in the pool's ledger only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """Base. Holders of different classes are different holders, also for one run."""

    run: int


class ReservationHolder(Holder):
    """Decode keeps room for a run that prefill still computes; under a lease that prefill renews."""

    __slots__ = ()


class RunHolder(Holder):
    """A run that computes here. Its blocks end with the run, not with a lease."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ChoiceHolder(Holder):
    """One of a run's several choices; what they have in common, each of them holds. Its blocks end with it, not with a lease."""

    choice: int


class HandoffHolder(Holder):
    """Prefill keeps a run's blocks until decode has fetched them; under a lease."""

    __slots__ = ()


class StagingHolder(Holder):
    """A copy between a device's memory and the host's is under way; `run` is only its number. It ends with the copy."""

    __slots__ = ()


class LoanHolder(Holder):
    """Decode lends cached blocks to the prefill of a run; under a lease."""

    __slots__ = ()


class PinnedHolder(Holder):
    """An engine that moves KV itself keeps a run's blocks until decode has fetched them; under a lease, for it may not say so."""

    __slots__ = ()


class UntrackedHolder(Holder):
    """What an engine that owns its pool uses and no run explains; `run` is only its number."""

    __slots__ = ()
