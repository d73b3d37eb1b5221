"""Keys as they are kept, and who asks once a key was shown. Times are Unix seconds by the database's clock."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.job import Tier
from services.edge.gate.limits import NONE, Limits
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

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


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
