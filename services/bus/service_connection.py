"""How a service process connects: as the settings say, in the schema version they allow. Owns nothing."""

from __future__ import annotations

from services.bus.dialect import Dialect
from services.bus.nats_bus import Credentials, NatsBus, connect
from services.clock import Clock
from services.settings.settings import Settings
from services.telemetry.metrics import Metrics


async def connect_service(settings: Settings, process: str, role: str, clock: Clock, metrics: Metrics) -> NatsBus:
    """The bus of `process`. Raises `BusUnavailable` when no server lets it in within `nats.connect_timeout_s`."""
    nats = settings.nats
    return await connect(
        nats.servers,
        process,
        role,
        credentials=Credentials(nats.user, nats.password) if nats.user else None,
        timeout=nats.connect_timeout_s,
        clock=clock,
        metrics=metrics,
        dialect=Dialect(settings.schema_version, clock),
    )
