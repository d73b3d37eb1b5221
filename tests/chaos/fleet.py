"""Headrace processes on a NATS cluster of three: nobody starts them again or says when one dies, as on several machines."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
from nats.aio.client import Client

from services.cli.up.credentials import load_or_create
from services.cli.up.nats import NatsPlan, violations, write_config
from services.cli.up.plan import Counts, plan
from services.settings.edge import EdgeSettings
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings
from tests.e2e.operator import Operator
from tests.nats_fixture import NatsCluster
from tests.ports import free_port
from tests.text.tiny import write_tiny_model_folder

STOP_S = 20.0


@dataclass(slots=True)
class Fleet:
    cluster: NatsCluster
    url: str
    passwords: Mapping[str, str]
    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kill(self, name: str) -> None:
        """kill -9 of a Headrace process. Nobody announces it."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(STOP_S)

    @property
    def said(self) -> str:
        """The end of what each process logged."""
        return "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(self.folder.glob("*.log")))

    @asynccontextmanager
    async def client(self, user: str) -> AsyncIterator[Client]:
        servers = self.cluster.url.split(",")
        client = await nats.connect(servers, user=user, password=self.passwords[user], inbox_prefix=f"_INBOX.{user}")
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        async with self.client("operator") as client:
            yield Operator(client)


@contextmanager
def fleet(folder: Path, counts: Counts, **environment: str) -> Iterator[Fleet]:
    """Scripted engines over the tiny model. Nothing of it is left at the end; no process did what its role may not."""
    (folder / "nats").mkdir()
    passwords = load_or_create(folder / "nats")
    write_config(NatsPlan(folder / "nats", 0, 0), passwords)
    cluster = NatsCluster(folder / "nats", (folder / "nats" / "permissions.conf").read_text())
    model = folder / "tiny"
    write_tiny_model_folder(model)
    settings = Settings(
        home=folder, model=str(model), edge=EdgeSettings(port=free_port()), worker=WorkerSettings(engine="scripted")
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    made = Fleet(cluster, f"http://127.0.0.1:{settings.edge.port}", passwords, folder)
    try:
        cluster.start()
        for program in plan(settings, counts, cluster.url, passwords, {**clean, **environment}).all:
            env = {**program.env, "HEADRACE_NATS__REPLICAS": "3"}
            with (folder / f"{program.name}.log").open("wb") as log:
                made.running[program.name] = subprocess.Popen(program.argv, env=env, stdout=log, stderr=log)
        yield made
        assert not violations(cluster.log), violations(cluster.log)
    finally:
        for process in made.running.values():
            process.kill()
        for process in made.running.values():
            process.wait(STOP_S)
        cluster.kill()
