"""A bench as the operator of a stack: what every process answers on `hr.admin.<role>.<id>.metrics`, as Prometheus' text."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import nats
from nats.aio.client import Client

from bench.stack import Stack

_ROLES = ("edge", "router", "prefill", "decode", "both")
_PORT = re.compile(r'^listen: "127\.0\.0\.1:(\d+)"', re.MULTILINE)
_SILENCE_S = 0.3


def metrics(stack: Stack) -> dict[str, bytes]:
    """By process."""
    return asyncio.run(_metrics(stack))


async def _metrics(stack: Stack) -> dict[str, bytes]:
    """As the operator's user, who may ask every process."""
    folder = stack.home / "nats"
    password = json.loads((folder / "passwords.json").read_text())["operator"]
    found = _PORT.search((folder / "nats-server.conf").read_text())
    assert found, "no port in nats-server.conf"
    client = await nats.connect(
        f"nats://127.0.0.1:{found[1]}", user="operator", password=password, inbox_prefix="_INBOX.operator"
    )
    try:
        return {process: await _answer(client, role, process) for role, process in await _processes(client)}
    finally:
        await client.close()


async def services(client: Client, *, first_s: float = _SILENCE_S) -> list[dict[str, Any]]:
    """Every answer to `$SRV.PING`: until 300 ms pass without one, as the `nats` CLI waits. `first_s`: for the first."""
    inbox = client.new_inbox()
    heard = await client.subscribe(inbox)
    await client.publish("$SRV.PING", b"", reply=inbox)
    found: list[dict[str, Any]] = []
    try:
        while True:
            msg = await heard.next_msg(timeout=_SILENCE_S if found else first_s)
            if msg.data:  # else the server's word that nobody listens
                found.append(json.loads(msg.data))
    except nats.errors.TimeoutError:
        return found
    finally:
        await heard.unsubscribe()


async def _processes(client: Client) -> list[tuple[str, str]]:
    """Role and id of each that has metrics."""
    named = [(said["name"].removeprefix("headrace-"), said["id"]) for said in await services(client)]
    return [(role, process) for role, process in named if role in _ROLES]


async def _answer(client: Client, role: str, process: str) -> bytes:
    return (await client.request(f"hr.admin.{role}.{process}.metrics", b"", timeout=2.0)).data
