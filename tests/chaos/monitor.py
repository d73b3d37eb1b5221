"""What the NATS server's monitoring page says: how many subscriptions each kind of process holds."""

from __future__ import annotations

import re

import httpx

from schemas.identity import is_process, process_name
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

_MONITOR = re.compile(r'^http: "127\.0\.0\.1:(\d+)"', re.MULTILINE)


async def subscriptions(up: Up) -> dict[str, int]:
    """By the name of the process, such as d1."""
    found = _MONITOR.search((up.home / "nats" / "nats-server.conf").read_text())
    assert found
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = (await client.get(f"http://127.0.0.1:{found[1]}/connz")).json()
    named = {connection["name"]: connection["subscriptions"] for connection in answer["connections"] if "name" in connection}
    return {process_name(name): count for name, count in named.items() if is_process(name)}
