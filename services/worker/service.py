"""The life of a worker process: subscribe, register, beat, serve until told to stop, drain.

Knows neither engine kinds nor roles: those come from the composition (`services.cli.worker`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from schemas.codec import encode_json
from schemas.errors import BusError
from services.bus.kv_registry import Registry
from services.bus.micro import Service
from services.bus.typed import Refusals
from services.worker.digests import send_digests
from services.worker.draining import drain
from services.worker.worker import Worker

_log = logging.getLogger(__name__)
REGISTER_S = 3.0

Phase = Callable[[Refusals], Awaitable[None]]


async def run(
    worker: Worker,
    phases: list[Phase],
    refusals: Refusals,
    registry: Registry,
    service: Service,
    stop: asyncio.Event,
    drain_s: float,
) -> None:
    """Serve `phases` until `stop`, then drain for at most `drain_s` seconds."""
    worker.engine.start(worker.on_step)
    await worker.listen(refusals)
    for start in phases:
        await start(refusals)
    worker.spawn(worker.sweep(), "sweep")
    worker.spawn(send_digests(worker.bus, worker.subjects, worker.runs), "digests")
    worker.spawn(_register(worker, registry), "register")
    worker.spawn(worker.beats.run(), "beats")
    await _serve_admin(worker, service)
    await stop.wait()
    await drain(worker, drain_s)
    await service.drain(1.0)
    await worker.close()


async def _register(worker: Worker, registry: Registry) -> None:
    """An entry in HR_WORKERS for `nats kv ls`; a worker serves without it when JetStream is away."""
    while True:
        try:
            await registry.put(worker.bus.process, encode_json(worker.beats.state()))
        except BusError as error:
            _log.info("not registered: %s", error)
        await asyncio.sleep(REGISTER_S)


async def _serve_admin(worker: Worker, service: Service) -> None:
    async def status(_: object) -> bytes:
        return encode_json(worker.beats.state())

    async def set_draining(draining: bool) -> bytes:
        worker.beats.draining = draining
        worker.beats.say()
        return encode_json(worker.beats.state())

    subject = lambda verb: worker.subjects.admin(worker.role, worker.bus.process, verb)  # noqa: E731
    service.endpoint("status", subject("status"), status)
    service.endpoint("drain", subject("drain"), lambda _: set_draining(True))
    service.endpoint("undrain", subject("undrain"), lambda _: set_draining(False))
    await service.start()
