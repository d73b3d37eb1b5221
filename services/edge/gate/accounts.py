"""What callers over NATS may do: their account's tier, models and limits, as the database says; kept up with it.

An account is the tenant `nats:<account>`. Invariants: what is changed holds at every edge within `REFRESH_S` and the time of one
query; without the database the accounts go on as they were known; nobody is let in unlimited because a limit could not be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from schemas.errors import StoreUnavailable
from schemas.job import Tier
from services.clock import Clock
from services.edge.gate.keyring import REFRESH_S
from services.edge.gate.records import ANY, AccountRecord, Caller, Unreadable
from services.edge.tenant import Tenant
from services.telemetry.logs import AtMost

_log = logging.getLogger("headrace.edge")
_UNSAID = AccountRecord(ANY, Tier.PAID)


class AccountStore(Protocol):
    async def all(self) -> Mapping[str, AccountRecord | Unreadable]:
        """By name. Raises `StoreUnavailable`."""
        ...


class Accounts:
    """`whose`: the tenant of a name."""

    def __init__(self, store: AccountStore, whose: Callable[[str], Tenant], clock: Clock) -> None:
        self._store = store
        self._whose = whose
        self._known: Mapping[str, AccountRecord | Unreadable] | None = None
        self._may_log = AtMost(clock.monotonic, 10.0)

    async def caller(self, account: str) -> Caller:
        """Raises `StoreUnavailable`."""
        if self._known is None:
            self._known = await self._store.all()
        record = self._known.get(account) or self._known.get(ANY, _UNSAID)
        if isinstance(record, Unreadable):
            raise StoreUnavailable("The limits of this account cannot be read.", retry_after=1.0)
        return Caller(self._whose(f"nats:{account}"), record.tier, models=record.models, tenant_limits=record.limits)

    async def run(self) -> None:
        """Keep up, until cancelled: no failure ends it, or no later limit would hold."""
        while True:
            try:
                self._known = await self._store.all()
            except StoreUnavailable:
                if self._may_log() is not None:
                    _log.warning("the limits of NATS accounts cannot be read; those that are known go on")
            except Exception:
                if self._may_log() is not None:
                    _log.exception("the limits of NATS accounts were not read; it is tried again")
            await asyncio.sleep(REFRESH_S)
