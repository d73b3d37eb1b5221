"""What an edge tells an operator, as JSON (`hr.admin.edge.<id>.status`). Numbers only: nothing of a request's content."""

from __future__ import annotations

import asyncio

import msgspec

from services.bus.interface import Bus
from services.edge.api.gate import Traffic
from services.edge.detached.jobs import DetachedJobs
from services.edge.jobs.supervisor import Supervisor


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` are open HTTP requests, `jobs` those whose compute may not have ended, `models` what can be served now.

    `detached`: jobs of these that this edge holds; `store`: the database was reached.
    `writes`: the schema version of its messages. `tasks`: of the event loop, the answer itself included.
    """

    edge: str
    requests: int
    jobs: int
    detached: int
    store: bool
    models: list[str]
    routers: list[str]
    draining: bool
    writes: int
    tasks: int


def status(bus: Bus, traffic: Traffic, jobs: Supervisor, detached: DetachedJobs) -> Status:
    return Status(
        edge=bus.process,
        requests=traffic.running,
        jobs=len(jobs),
        detached=len(detached),
        store=detached.ready,
        models=jobs.models.models(),
        routers=jobs.models.routers(),
        draining=traffic.draining,
        writes=bus.dialect.writes,
        tasks=len(asyncio.all_tasks()),
    )
