"""Which processes `headrace up` runs, with which arguments and whose credentials. Pure: starts nothing, reads no file.

Invariant: a process is given the NATS password of its own role and no other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.state import Role
from services.cli.failure import CommandError
from services.cli.up.keeper import Program
from services.settings.settings import Settings

ACCOUNT = "HEADRACE"
"""Of the users in infra/nats/permissions.conf."""
STOP_S = 10.0
"""Seconds to leave in, beside what a drain may take. Only the edge has something to wait for: it stops first, and behind it
everything is idle."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Workers of each model by role, routers, edges."""

    prefill: int
    decode: int
    both: int = 0
    router: int = 1
    edge: int = 1


@dataclass(frozen=True, slots=True)
class Services:
    """The programs beside NATS; `workers` in the order p1, p2, …, d1, …, b1, …: of the first model, then of the next one."""

    edges: tuple[Program, ...]
    routers: tuple[Program, ...]
    workers: tuple[Program, ...]

    @property
    def all(self) -> tuple[Program, ...]:
        return (*self.routers, *self.workers, *self.edges)


def counts(prefill: int | None, decode: int | None, both: int, router: int = 1, edge: int = 1) -> Counts:
    """What was asked for, with the defaults: one prefill and one decode, unless there are workers that do both.

    Raises `CommandError` for a choice that can serve nothing.
    """
    default = 0 if both else 1
    asked = Counts(default if prefill is None else prefill, default if decode is None else decode, both, router, edge)
    if not both and not (asked.prefill and asked.decode):
        raise CommandError("at least one prefill and one decode worker are needed, or one that does both (--both 1)")
    if not (router and edge):
        raise CommandError("at least one router and one edge are needed")
    return asked


def plan(settings: Settings, counts: Counts, nats_url: str, passwords: Mapping[str, str], environ: Mapping[str, str]) -> Services:
    """The services of one machine. `environ` is what they inherit; `settings` what they are told on top of it.

    The first edge has the ports of `settings`, each other one those after the one before.
    """
    shared = {
        **{key: value for key, value in environ.items() if not key.startswith("HEADRACE_NATS__")},
        "HEADRACE_HOME": str(settings.home_dir),
        "HEADRACE_MODEL": settings.served[0],
        "HEADRACE_MODELS": json.dumps(settings.served),
        "HEADRACE_WORKER__ENGINE": settings.worker.engine,
        "HEADRACE_NATS__URL": nats_url,
        "HEADRACE_NATS__PREFIX": settings.nats.prefix,
        "HEADRACE_NATS__ACCOUNT": ACCOUNT,
        "PYTHONUNBUFFERED": "1",
    }

    def program(name: str, user: str, arguments: tuple[str, ...], stop_within_s: float, **told: str) -> Program:
        login = {"HEADRACE_NATS__USER": user, "HEADRACE_NATS__PASSWORD": passwords[user]}
        argv = (sys.executable, "-m", "services.cli.main", *arguments, "--name", name)
        return Program(name, argv, {**shared, **login, **told}, stop_within_s)

    each = counts.prefill + counts.decode + counts.both

    def workers(at: int, model: str, role: Role, count: int) -> list[Program]:
        """Numbered through: those of model `at` come after those of the models before it."""
        return [
            program(
                f"{role.value[0]}{number}",
                role.value,
                ("worker", "--role", role.value),
                STOP_S,
                HEADRACE_MODEL=model,
                HEADRACE_WORKER__MACHINE_WORKERS=str(each * len(settings.served)),
            )
            for number in range(at * count + 1, (at + 1) * count + 1)
        ]

    def pools(at: int, model: str) -> list[Program]:
        by_role = ((Role.PREFILL, counts.prefill), (Role.DECODE, counts.decode), (Role.BOTH, counts.both))
        return [one for role, count in by_role for one in workers(at, model, role, count)]

    def edge(number: int) -> Program:
        first, admin = settings.edge.port, settings.edge.admin_port
        return program(
            f"e{number}",
            "edge",
            ("edge",),
            settings.edge.drain_timeout_s + STOP_S,
            HEADRACE_EDGE__PORT=str(first + number - 1),
            HEADRACE_EDGE__ADMIN_PORT=str(admin and admin + number - 1),
        )

    return Services(
        edges=tuple(edge(number) for number in range(1, counts.edge + 1)),
        routers=tuple(program(f"r{number}", "router", ("router",), STOP_S) for number in range(1, counts.router + 1)),
        workers=tuple(one for at, model in enumerate(settings.served) for one in pools(at, model)),
    )
