"""Tiers through real processes: who pays more is served first, who pays nothing is served too."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.chaos.streams import lines
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.e2e.test_budgets import headrace
from tests.e2e.test_scripted import body
from tests.waiting import PATIENCE_S

FEW_SLOTS = {
    "HEADRACE_WORKER__MAX_BATCH": "4",
    "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05",
    "HEADRACE_EDGE__QUEUE_DEADLINE_S": "300",
    "HEADRACE_EDGE__FIRST_TOKEN_DEADLINE_S": "300",
}
FLOOD, AT_ONCE, ENTERPRISE = 56, 24, 3
MANY, FEW = 16, 8
"""Free requests that wait when an enterprise one comes, and that may begin before it: they had their places already."""


class Clients:
    """`began`: whose answers have begun, in this order; `refused`: 429s, by who got them."""

    def __init__(self, up: Up) -> None:
        self._up = up
        self.began: list[str] = []
        self.refused: list[str] = []

    async def ask(self, who: str, key: str) -> None:
        """One streamed answer, to its end; whoever is refused comes again."""
        async with httpx.AsyncClient(base_url=self._up.url, timeout=300, headers={"authorization": f"Bearer {key}"}) as client:
            while not await self._served(client, who):  # noqa: ASYNC110 - told in answers only
                await asyncio.sleep(0.1)

    async def _served(self, client: httpx.AsyncClient, who: str) -> bool:
        asked = body(f"of {who}", stream=True, max_tokens=30, ignore_eos=True)
        async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            if answer.status_code != 200:
                assert (answer.status_code, answer.headers["retry-after"]) in ((429, "1"), (503, "1"))
                self.refused += [who] * (answer.status_code == 429)
                return False
            seen = [line async for line in lines(answer) if self._note(line, who)]
        assert "data: [DONE]" in seen
        return True

    def _note(self, line: str, who: str) -> bool:
        if '"content":"' in line and who not in self.began and '"content":""' not in line:
            self.began.append(who)
        return line.startswith("data: ")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_free_flood_does_not_hold_up_enterprise(scripted_stack: StartScripted) -> None:
    """faults.md, gateway: free flood while enterprise trickles. Enterprise gets the next slot whoever waits; free gets 429 beyond
    its limit, and in the end every answer (no starvation)."""
    up = scripted_stack(**FEW_SLOTS)
    free = headrace(up, "keys", "create", "--tenant", "many", "--tier", "free", "--concurrent", str(AT_ONCE))
    enterprise = headrace(up, "keys", "create", "--tenant", "one", "--tier", "enterprise")
    clients = Clients(up)
    async with operator(up) as op:
        router = f"hr.admin.router.{await op.one('router')}.status"

        async def many_wait() -> bool:
            return int((await op.ask(router))["models"]["tiny"]["waiting"].get("free", 0)) >= MANY

        flood = [asyncio.create_task(clients.ask(f"free {number}", free)) for number in range(FLOOD)]
        for number in range(ENTERPRISE):
            async with asyncio.timeout(PATIENCE_S):
                while not await many_wait():  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.02)
            before = len(clients.began)
            await clients.ask(f"enterprise {number}", enterprise)
            assert clients.began.index(f"enterprise {number}") - before <= FEW
        await asyncio.gather(*flood)
        assert sum(who.startswith("free") for who in clients.began) == FLOOD
        assert {who.partition(" ")[0] for who in clients.refused} == {"free"}
        await op.assert_clean()
