"""Services started one by one, as an orchestrator does: nobody restarts them, nobody tells of their deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats

from schemas.identity import process_name
from tests.chaos.streams import ready, until
from tests.ports import free_port
from tests.waiting import PATIENCE_S

KINDS = {"r": "router", "e": "edge", "p": "prefill", "d": "decode"}


@dataclass
class Fleet:
    """`settings` of all. A process is called r1, e1, p1, d1 …, and is what the letter says."""

    nats_url: str
    folder: Path
    settings: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, **settings: str) -> None:
        kind = KINDS[name[0]]
        words = ["worker", "--role", kind] if kind in ("prefill", "decode") else [kind]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        env |= {"HEADRACE_HOME": str(self.folder / "home"), "HEADRACE_NATS__URL": self.nats_url, **self.settings, **settings}
        if kind == "edge":
            port = free_port()
            self.urls[name], env["HEADRACE_EDGE__PORT"] = f"http://127.0.0.1:{port}", str(port)
        with (self.folder / f"{name}.log").open("wb") as log:
            argv = [sys.executable, "-m", "services.cli.main", *words, "--name", name]
            self.running[name] = subprocess.Popen(argv, env=env, stdout=log, stderr=log)

    async def stop(self, name: str, within: float = 60.0) -> None:
        """SIGTERM; its exit code must be 0."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None, within, lambda: f"{name} did not end: {self.said(name)}")
        assert process.returncode == 0, self.said(name)

    async def replace(self, old: str, new: str, **settings: str) -> None:
        """`new` takes over from `old`."""
        self.start(new, **settings)
        await self.up(new)
        await self.stop(old)

    async def up(self, *names: str, within: float = 120.0) -> None:
        """Until these answer an operator, and the edges among them are ready."""
        async with asyncio.timeout(within):
            while not set(names) <= (await self.statuses()).keys():  # noqa: ASYNC110 - other processes' state
                await asyncio.sleep(0.05)
        for name in names:
            if name in self.urls:
                await ready(self.urls[name])

    async def everybody(self, condition: Callable[[dict[str, Any]], bool], within: float) -> dict[str, dict[str, Any]]:
        """The statuses of those that run, once nobody is missing and each satisfies `condition`. Raises AssertionError."""
        deadline = time.monotonic() + within
        while True:
            found = await self.statuses()
            if found.keys() == self.running.keys() and all(map(condition, found.values())):
                return found
            assert time.monotonic() < deadline, found

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """What each process that answers in time says of itself, by name: one that is busy may be missed."""
        client = await nats.connect(self.nats_url)
        try:
            inbox, found = client.new_inbox(), {}
            heard = await client.subscribe(inbox)
            await client.publish("$SRV.PING", b"", reply=inbox)
            while True:
                try:
                    said = (await heard.next_msg(timeout=0.3)).data
                except nats.errors.TimeoutError:
                    return found
                ping = json.loads(said) if said else {}  # empty: nobody is there
                role = ping.get("name", "").removeprefix("headrace-")
                if role in ROLES:
                    subject = f"hr.admin.{role}.{ping['id']}.status"
                    with suppress(nats.errors.NoRespondersError):  # it left after it had spoken
                        answer = await client.request(subject, b"{}", timeout=PATIENCE_S)
                        found[process_name(ping["id"])] = json.loads(answer.data)
        finally:
            await client.close()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


ROLES = ("edge", "router", "prefill", "decode", "both")


@contextmanager
def fleet(nats_url: str, folder: Path, **settings: str) -> Iterator[Fleet]:
    """Nothing runs yet; everything is killed at the end."""
    made = Fleet(nats_url, folder, settings)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.kill()
            process.wait()
