"""Who may hold KV blocks. A holder is a small value; what it holds, and until when, is in the pool's ledger only."""

from __future__ import annotations

import msgspec


class Holder(msgspec.Struct, frozen=True, gc=False):
    """Base. Holders of different classes are different holders, also for one run. A struct: the ledger hashes it all the time."""

    run: int


class ReservationHolder(Holder, frozen=True, gc=False):
    """Decode keeps room for a run that prefill still computes; under a lease that prefill renews."""


class RunHolder(Holder, frozen=True, gc=False):
    """A run that computes here. Its blocks end with the run, not with a lease."""


class ChoiceHolder(Holder, frozen=True, gc=False):
    """One of a run's several choices; what they have in common, each of them holds. Its blocks end with it, not with a lease."""

    choice: int


class HandoffHolder(Holder, frozen=True, gc=False):
    """Prefill keeps a run's blocks until decode has fetched them; under a lease."""


class StagingHolder(Holder, frozen=True, gc=False):
    """A copy between a device's memory and the host's is under way; `run` is only its number. It ends with the copy."""


class LoanHolder(Holder, frozen=True, gc=False):
    """Decode lends cached blocks to the prefill of a run; under a lease."""


class PinnedHolder(Holder, frozen=True, gc=False):
    """An engine that moves KV itself keeps a run's blocks until decode has fetched them; under a lease, for it may not say so."""


class UntrackedHolder(Holder, frozen=True, gc=False):
    """What an engine that owns its pool uses and no run explains; `run` is only its number."""
