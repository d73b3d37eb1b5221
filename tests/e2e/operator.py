"""The operator's side of a running Headrace: what `nats micro ls` and `nats req hr.admin.…` would show, over nats-py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import nats
from nats.aio.client import Client
from nats.errors import NoRespondersError

from bench.admin import services
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S


@dataclass(frozen=True)
class Operator:
    client: Client

    async def services(self) -> list[dict[str, Any]]:
        """What each says of itself."""
        return await services(self.client, first_s=PATIENCE_S)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """The status of each worker by process id; of one that ended meanwhile there is none."""
        statuses = {}
        for service in await self.services():
            role = service["name"].removeprefix("headrace-")
            if role in ("prefill", "decode", "both"):
                with suppress(NoRespondersError):
                    statuses[service["id"]] = await self.ask(f"hr.admin.{role}.{service['id']}.status")
        return statuses

    async def ask(self, subject: str, **question: Any) -> dict[str, Any]:
        answer = await self.client.request(subject, json.dumps(question).encode(), timeout=PATIENCE_S)
        decoded: dict[str, Any] = json.loads(answer.data)
        return decoded

    async def one(self, service: str) -> str:
        """The process id of a `headrace-<service>`."""
        return (await self.several(service, 1))[0]

    async def several(self, service: str, count: int) -> list[str]:
        """The process ids of all of them."""
        return [str(each["id"]) for each in await self.found(service, count)]

    async def found(self, service: str, count: int) -> list[dict[str, Any]]:
        """What each of them says of itself, once so many answer in time: a busy one is easily missed."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = [each for each in await self.services() if each["name"] == f"headrace-{service}"]
                if len(found) >= count:
                    return found

    async def metrics(self, role: str) -> str:
        """Prometheus text of all processes of `role`."""
        found = await self.several(role, 1)
        answers = [await self.client.request(f"hr.admin.{role}.{one}.metrics", b"{}", timeout=PATIENCE_S) for one in found]
        return "\n".join(answer.data.decode() for answer in answers)

    async def assert_clean(self, within: float = PATIENCE_S) -> None:
        """Every pool is at its baseline, its books are right, no run is left. Raises AssertionError with what is not."""
        statuses = await self.until(lambda found: found and all(_clean(status) for status in found.values()), within)
        assert all(status["kv"]["integrity"] == "ok" for status in statuses.values()), statuses
        assert all(status["kv"]["orphaned"] == 0 for status in statuses.values()), statuses

    async def until(
        self, condition: Callable[[dict[str, dict[str, Any]]], object], within: float = PATIENCE_S
    ) -> dict[str, dict[str, Any]]:
        """The workers' statuses once they satisfy `condition`. Raises AssertionError after `within` seconds."""
        deadline = asyncio.get_running_loop().time() + within
        while True:
            statuses = await self.workers()
            if condition(statuses):
                return statuses
            assert asyncio.get_running_loop().time() < deadline, statuses


@asynccontextmanager
async def operator(up: Up) -> AsyncIterator[Operator]:
    password = json.loads((up.home / "nats" / "passwords.json").read_text())["operator"]
    client = await nats.connect(
        f"nats://127.0.0.1:{up.nats_port}", user="operator", password=password, inbox_prefix="_INBOX.operator", error_cb=_expected
    )
    try:
        yield Operator(client)
    finally:
        await client.close()


async def _expected(_: Exception) -> None:
    """A server that is away is what many of these tests are about."""


def _clean(status: dict[str, Any]) -> bool:
    kv: dict[str, int] = status["kv"]
    return not status["runs"] and kv["free"] + kv["cached"] == kv["total"]
