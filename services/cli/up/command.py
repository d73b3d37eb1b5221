"""`headrace up`: checks, the model, then the supervisor.

Everything that a person can get wrong is found before the first process starts, and said in one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import SystemRandom
from types import FrameType
from urllib.parse import quote

from schemas.errors import BusUnavailable
from schemas.identity import process_id
from schemas.subjects import Subjects
from services.bus.dialect import Dialect
from services.bus.nats_bus import Credentials, connect
from services.cli.failure import CommandError
from services.cli.models import prepare
from services.cli.up import nats
from services.cli.up.credentials import load_or_create
from services.cli.up.development_key import development_key
from services.cli.up.keeper import Program
from services.cli.up.lock import only_one
from services.cli.up.obituary import Obituaries
from services.cli.up.output import LogFile, Output
from services.cli.up.plan import STOP_S, Services, counts, plan
from services.cli.up.ports import LAST_PORT, free_ports, port_is_free
from services.cli.up.probe import http_status, nats_answers
from services.cli.up.supervisor import Supervisor
from services.clock import SystemClock
from services.models.progress import Terminal
from services.settings.edge import EdgeSettings
from services.settings.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """The exit code: 0 after a stop that was asked for. Raises `CommandError`."""
    signal.signal(signal.SIGTERM, _interrupt)  # until the supervisor listens, also during a download
    asked = counts(arguments.prefill, arguments.decode, arguments.both, arguments.router, arguments.edge)
    settings = _with_ports(settings, asked.edge)
    edge = settings.edge
    with only_one(settings.home_dir, f"process {os.getpid()}, {_url(edge.host, edge.port)}"):
        _must_be_free(edge, asked.edge)  # not before the lock: who holds the port may be Headrace itself
        weights = settings.worker.engine != "scripted"
        models = [prepare(settings, model, Terminal(), weights=weights).name for model in settings.served]
        taken = {arguments.nats_port, *(port for _, row, _ in _ports(edge, asked.edge) for port in row)}
        own, monitor = free_ports(2, avoid=taken)
        server = nats.NatsPlan(settings.home_dir / "nats", arguments.nats_port or own, monitor, settings.nats.prefix)
        if arguments.nats_port and not port_is_free("127.0.0.1", arguments.nats_port):
            raise CommandError(f"port {arguments.nats_port} is taken: leave --nats-port out and a free one is used")
        passwords = load_or_create(server.folder)
        config = nats.write_config(server, passwords)
        nats.write_operator_context(server, passwords)
        around = nats.environment(os.environ)
        program = Program("nats", (nats.binary(), "-c", str(config)), around, STOP_S, identified=False)
        services = plan(settings, asked, server.url, passwords, os.environ)
        ready = f"""Headrace is ready: {_url(edge.host, edge.port)} (model{"s" if models[1:] else ""} {", ".join(models)})
API key, for callers that are not on this machine: {development_key(settings)}
Metrics and probes: {_url(edge.admin_host, edge.admin_port)}/metrics, /health, /ready
{_curl(edge, models[0])}"""
        asyncio.run(_supervise(settings, server, program, services, passwords, models, ready, verbose=arguments.verbose))
    return 0


async def _supervise(
    settings: Settings,
    server: nats.NatsPlan,
    program: Program,
    services: Services,
    passwords: Mapping[str, str],
    models: Sequence[str],
    ready: str,
    *,
    verbose: bool,
) -> None:
    outputs: list[Output] = []

    def output(name: str) -> Output:
        outputs.append(Output(name, LogFile(settings.home_dir / "logs" / f"{name}.log"), _say, verbose=verbose))
        return outputs[-1]

    @asynccontextmanager
    async def deaths() -> AsyncIterator[Obituaries]:
        me, login = _new_id("supervisor"), Credentials("supervisor", passwords["supervisor"])
        try:
            dialect = Dialect(clock=SystemClock())  # it hears nobody, so it writes what every build reads
            limit = settings.nats.connect_timeout_s
            bus = await connect(server.url, me, "supervisor", credentials=login, timeout=limit, dialect=dialect)
        except BusUnavailable as error:
            raise CommandError(str(error)) from None
        try:
            yield Obituaries(bus, Subjects(settings.nats.prefix))
        finally:
            await bus.close()

    async def nats_up() -> bool:
        return await nats_answers("127.0.0.1", server.port)

    async def edges_ready() -> bool:
        host, ports = _reachable(settings.edge.host), range(settings.edge.port, settings.edge.port + len(services.edges))
        paths = [f"/ready?model={quote(model, safe='')}" for model in models]
        return all([(await http_status(host, port, path))[0] == 200 for port in ports for path in paths])

    supervisor = Supervisor(
        program,
        (services.edges, services.workers, services.routers),
        output=output,
        deaths=deaths,
        nats_up=nats_up,
        ready=edges_ready,
        clock=SystemClock(),
        say=_say,
        new_id=_new_id,
    )

    def on_signal() -> None:
        again = supervisor.stop()
        _say("Stopping at once." if again else _stopping(settings.edge))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: the terminal may go
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await supervisor.run(lambda: print(ready, flush=True))
    finally:
        for one in outputs:
            one.close()


def _with_ports(settings: Settings, edges: int) -> Settings:
    """`settings` with an HTTP port and one for operators: those asked for, else some that are free now, as are those of the other
    edges after them."""
    edge = settings.edge
    port = edge.port or free_ports(edges, edge.host)[0]
    admin_port = edge.admin_port or free_ports(edges, edge.admin_host, avoid=range(port, port + edges))[0]
    return settings.model_copy(update={"edge": edge.model_copy(update={"port": port, "admin_port": admin_port})})


def _ports(edge: EdgeSettings, edges: int) -> tuple[tuple[str, range, str], ...]:
    """(address, ports in a row, how to choose others) of what edges listen on: for callers, and for operators."""
    return (
        (edge.host, range(edge.port, edge.port + edges), "with PORT=…"),
        (edge.admin_host, range(edge.admin_port, edge.admin_port + edges), "with HEADRACE_EDGE__ADMIN_PORT"),
    )


def _must_be_free(edge: EdgeSettings, edges: int) -> None:
    """Raises `CommandError` that names the first port that is not."""
    rows = _ports(edge, edges)
    if shared := set(rows[0][1]).intersection(rows[1][1]):
        raise CommandError(f"port {min(shared)} would be an edge's and another one's for operators: choose others for either")
    if max(row[-1] for _, row, _ in rows) > LAST_PORT:
        raise CommandError(f"{edges} edges need as many ports in a row, and there is none after {LAST_PORT}")
    for host, row, how in rows:
        for port in row:
            if not port_is_free(host, port):
                raise CommandError(f"port {port} of {host} is taken: stop what listens there, or choose another {how}")


def _curl(edge: EdgeSettings, model: str) -> str:
    question = [{"role": "user", "content": "What is Kubernetes?"}]
    body = {"model": model, "stream": True, "max_tokens": 300, "messages": question}
    return (
        f"  curl -N {_url(edge.host, edge.port)}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, separators=(',', ':')))}"
    )


def _stopping(edge: EdgeSettings) -> str:
    limit = f"{edge.drain_timeout_s:.0f} s"
    return f"Stopping when the open answers are through, in {limit} at most; Ctrl-C again stops at once."


def _url(host: str, port: int) -> str:
    """Where this machine reaches what listens there."""
    host = _reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reachable(host: str) -> str:
    """An address of this machine on which a process answers that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _new_id(name: str) -> str:
    return process_id(name, SystemClock().wall(), SystemRandom())


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone while we still have to stop everything
        print(line, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
