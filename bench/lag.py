"""How late the event loop of each process of a stack was: from the histogram it answers on `hr.admin.<role>.<id>.metrics`."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

import nats
from nats.aio.client import Client

from bench.stack import Stack

_ROLES = ("edge", "router", "prefill", "decode", "both")
_BUCKET = re.compile(rb'headrace_event_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')
_PORT = re.compile(r'^listen: "127\.0\.0\.1:(\d+)"', re.MULTILINE)
_SILENCE_S = 0.3
Counts = dict[float, float]
"""Samples at most that late, by seconds: cumulative, as Prometheus has them."""


@dataclass(frozen=True)
class Lag:
    """Upper bounds in ms, as fine as the histogram's buckets."""

    p50: float
    p99: float
    worst: float


def lags(before: dict[str, Counts], after: dict[str, Counts]) -> dict[str, Lag]:
    """By process: of what was sampled between two readings."""
    found = {}
    for process in before.keys() & after.keys():
        counts = {bound: count - before[process].get(bound, 0.0) for bound, count in after[process].items()}
        found[process] = Lag(*(1e3 * _quantile(counts, q) for q in (0.5, 0.99, 1.0)))
    return dict(sorted(found.items()))


def read(stack: Stack) -> dict[str, Counts]:
    return asyncio.run(_read(stack))


def _quantile(counts: Counts, q: float) -> float:
    wanted = q * max(counts.values())
    return min(bound for bound, count in counts.items() if count >= wanted)


async def _read(stack: Stack) -> dict[str, Counts]:
    """As the operator's user, who may ask every process."""
    folder = stack.home / "nats"
    password = json.loads((folder / "passwords.json").read_text())["operator"]
    found = _PORT.search((folder / "nats-server.conf").read_text())
    assert found, "no port in nats-server.conf"
    client = await nats.connect(
        f"nats://127.0.0.1:{found[1]}", user="operator", password=password, inbox_prefix="_INBOX.operator"
    )
    try:
        return {process: await _counts(client, role, process) for role, process in await _processes(client)}
    finally:
        await client.close()


async def _processes(client: Client) -> list[tuple[str, str]]:
    """Role and id of every service that answers a ping."""
    inbox = client.new_inbox()
    heard = await client.subscribe(inbox)
    await client.publish("$SRV.PING", b"", reply=inbox)
    found = []
    try:
        while True:
            said = json.loads((await heard.next_msg(timeout=_SILENCE_S)).data)
            role = said["name"].removeprefix("headrace-")
            if role in _ROLES:
                found.append((role, said["id"]))
    except nats.errors.TimeoutError:
        return found


async def _counts(client: Client, role: str, process: str) -> Counts:
    answer = await client.request(f"hr.admin.{role}.{process}.metrics", b"", timeout=2.0)
    return {float(bound): float(count) for bound, count in _BUCKET.findall(answer.data)}
