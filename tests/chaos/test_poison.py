"""A job that kills every worker it comes to: after the third it is refused; those beside it notice no more than a pause."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.chaos.streams import (
    Answer,
    Progress,
    Question,
    ask,
    ask_all,
    assert_same,
    clients,
    longest_pause,
    questions,
    ready,
    undisturbed,
)
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_EACH = ("--prefill", "2", "--decode", "2", "--router", "2", "--edge", "2")
INNOCENT = 31


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kill<n>!` kills the process that draws token n."""
    path = tmp_path_factory.mktemp("scripts") / "scripts.json"
    one = [{"prompt_contains": byte_ids(f"k{n}!"), "tokens": byte_ids("x" * 40), "kill_at": n} for n in (0, 5)]
    path.write_text(json.dumps(one))
    return path


@pytest.mark.parametrize("kills_at", [0, 5], ids=["prefill", "decode"])
async def test_the_job_is_refused_and_its_neighbours_succeed(scripted_stack: StartScripted, scripts: Path, kills_at: int) -> None:
    up = scripted_stack(*TWO_OF_EACH, HEADRACE_SCRIPTED__SCRIPTS=str(scripts), HEADRACE_SCRIPTED__DECODE_STEP_S="0.03")
    await ready(up.url)
    asked = questions(INNOCENT, 80)
    expected = await undisturbed(up.url, asked)
    for edge in (up.url, f"http://127.0.0.1:{up.port + 1}"):
        await ready(edge)
    poison = Question(0, 40, content=f"k{kills_at}!")
    fate: list[Answer] = []

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(2)
        async with clients(up.url) as client:
            fate.append(await ask(client, poison))

    answers = await ask_all(up.url, asked, fault)
    assert_same(answers, expected)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s")
    assert fate[0].status == 500 or (fate[0].error and fate[0].whole), fate
    assert fate[0].error
    assert fate[0].error["code"] == "internal_error"
    async with operator(up) as op:
        await _everybody_knows(op)
    killed = up.output.count("killed by SIGKILL")
    for edge in (up.url, f"http://127.0.0.1:{up.port + 1}"):
        async with clients(edge) as client:
            again = await ask(client, poison)
        assert again.status == 500
        assert again.error
        assert again.error["code"] == "request_quarantined"
    await asyncio.sleep(0.5)
    assert up.output.count("killed by SIGKILL") == killed, "it ran again"
    async with operator(up) as op:
        await op.assert_clean(20.0)
        edges = await _quarantines(op)
        held = [set((await op.ask(edge))["held"]) for edge in edges]
        assert held[0]
        assert held[0] == held[1]
        assert set((await op.ask(edges[0], clear="all"))["cleared"]) == held[0]
        async with asyncio.timeout(15):
            while (await op.ask(edges[1]))["total"]:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)


async def _quarantines(op: Operator) -> list[str]:
    """Where each edge tells what it refuses."""
    return [f"hr.admin.edge.{edge}.quarantine" for edge in await op.several("edge", 2)]


async def _everybody_knows(op: Operator) -> None:
    """Until each edge refuses what the one that noticed told it of."""
    for edge in await _quarantines(op):
        async with asyncio.timeout(PATIENCE_S):
            while not (await op.ask(edge))["total"]:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)
