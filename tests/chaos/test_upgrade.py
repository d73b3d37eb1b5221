"""From one build to the next under load, process by process: no answer fails, no message is refused.

The builds speak two schema versions, and their engines have equal weights but other numerics, so KV blocks of one are of no use
to the other: an attempt stays within its pool, a resumed job may go to the other one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.codec import SCHEMA
from tests.chaos.builds import Fleet, fleet
from tests.chaos.load import steady
from tests.chaos.streams import questions, undisturbed
from tests.nats_fixture import NatsServer
from tests.text.tiny import write_tiny_model_folder
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OLD = {"HEADRACE_SCHEMA_VERSION": str(SCHEMA - 1), "HEADRACE_SCRIPTED__NUMERICS": "of the build before"}
BEFORE = ("r1", "r2", "p1", "p2", "d1", "d2", "e1", "e2")
AFTER = tuple(f"{name[0]}{int(name[1]) + 2}" for name in BEFORE)


async def test_a_rolling_upgrade(own_nats_server: NatsServer, tmp_path: Path) -> None:
    settings = {
        "HEADRACE_MODEL": str(write_tiny_model_folder(tmp_path / "tiny")),
        "HEADRACE_WORKER__ENGINE": "scripted",
        "HEADRACE_WORKER__DRAIN_TIMEOUT_S": "0.5",  # runs take longer, so they move, and often to the other pool
        "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03",
    }
    with fleet(own_nats_server.url, tmp_path, **settings) as all_of:
        for name in BEFORE:
            all_of.start(name, **OLD)
        await all_of.up(*BEFORE)
        asked = questions(16, 60)
        expected = {q.number: a.said for q, a in zip(asked, await undisturbed(all_of.urls["e1"], asked), strict=True)}
        edges = [all_of.urls["e1"], all_of.urls["e2"]]
        async with steady(edges, asked) as load:
            for router, next_router in (("r1", "r3"), ("r2", "r4")):
                await load.more(8)
                await all_of.replace(router, next_router)
            for number in (1, 2):
                await load.more(8)
                await _replace_workers(all_of, number)
            await _all_write(all_of, SCHEMA - 1)  # two old edges are left
            for edge, next_edge in (("e1", "e3"), ("e2", "e4")):
                await load.more(8)
                all_of.start(next_edge)
                await all_of.up(next_edge)
                edges[edges.index(all_of.urls[edge])] = all_of.urls[next_edge]
                await all_of.stop(edge)
            await _all_write(all_of, SCHEMA)
            await load.more(40)  # with those above more than a hundred
        load.assert_none_failed(expected)
        assert len(load.answers) > 100
        assert all_of.running.keys() == set(AFTER)
        statuses = await all_of.everybody(lambda status: not status.get("runs"), PATIENCE_S)
        for name, status in statuses.items():
            if "kv" in status:
                assert (status["kv"]["integrity"], status["kv"]["orphaned"]) == ("ok", 0), name
        refused = [name for name in (*BEFORE, *AFTER) if "unreadable" in all_of.said(name)]
        assert not refused, all_of.said(refused[0])


async def _replace_workers(all_of: Fleet, number: int) -> None:
    """One of each role; the pool of the new ones is complete before an old one goes."""
    new = (f"p{number + 2}", f"d{number + 2}")
    for name in new:
        all_of.start(name)
    await all_of.up(*new)
    for name in (f"p{number}", f"d{number}"):
        await all_of.stop(name)


async def _all_write(all_of: Fleet, version: int) -> None:
    await all_of.everybody(lambda status: status["writes"] == version, 60.0)
