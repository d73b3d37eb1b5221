"""Keys as they are kept, and who asks once a key was shown. Times are Unix seconds by the database's clock."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from schemas.job import Tier
from services.edge.gate.limits import NONE, Limits, longest_answer
from services.edge.jobs.explained import Explain
from services.edge.tenant import Tenant


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """`models` None = all. `expires`, `revoked`: None = never. `changed` grows with every change of the key and of its tenant."""

    id: str
    digest: bytes
    tenant: str
    name: str
    tier: Tier
    models: frozenset[str] | None
    created: float
    expires: float | None = None
    revoked: float | None = None
    changed: float = 0.0
    limits: Limits = NONE
    tenant_limits: Limits = NONE

    def valid(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row of `id` that another build wrote and this one cannot read: what it allows is not known here."""

    id: str
    changed: float = 0.0


@dataclass(frozen=True, slots=True)
class AccountRecord:
    """What callers of one NATS account may do; `name` `ANY` = of every account that has no record of its own."""

    name: str
    tier: Tier
    models: frozenset[str] | None = None
    limits: Limits = NONE


ANY = "*"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `key` is an id, "" = nobody showed one, which is allowed on this machine's own loopback.

    `explain`: what it asked to be told of the placement, as far as it may be.
    """

    tenant: Tenant
    tier: Tier
    key: str = ""
    models: frozenset[str] | None = None
    limits: Limits = NONE
    tenant_limits: Limits = NONE
    explain: Explain = Explain.NOTHING

    def longest_answer(self, prompt_tokens: int) -> int | None:
        """As `limits.longest_answer`, by the limits of the key and of its tenant."""
        each = (longest_answer(limits, prompt_tokens) for limits in (self.limits, self.tenant_limits))
        return min((most for most in each if most is not None), default=None)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


_DIGITS = 10


def cost(compute_s: float, price: float | None) -> float | None:
    """Of so many seconds of compute, at `price` a second; None = no price is set."""
    return None if price is None else round(compute_s * price, _DIGITS)


@dataclass(frozen=True, slots=True)
class Used:
    """What one request used, once it has ended. `job`: its first job's id. `cost` None = no price was set."""

    job: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    compute_s: float = 0.0
    cost: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger. `key` as in `Caller`."""

    tenant: str
    key: str
    used: Used


class Bill(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the row of a job that outlives its edge says of its payer, so that whichever edge ends the job can book it.

    `key` as in `Caller`; `price`: of a second of compute; `budgets`: (owner, window) of each that the job's tokens count in.
    """

    model: str
    prompt_tokens: int
    key: str = ""
    price: float | None = None
    budgets: tuple[tuple[str, str], ...] = ()

    def used(self, job: str, completion_tokens: int, cached_tokens: int, compute_s: float) -> Used:
        """What the job comes to."""
        price = cost(compute_s, self.price)
        return Used(job, self.model, self.prompt_tokens, completion_tokens, cached_tokens, compute_s, price)
