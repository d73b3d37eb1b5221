"""An engine that stands still in a process that beats and answers: its streams go on elsewhere, nobody is counted dead."""

from __future__ import annotations

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
    undisturbed,
)
from tests.chaos.tap import tap
from tests.e2e.conftest import StartScripted
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STALL_S = 8.0


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`stuck!` has each decode worker stand still once, when it draws token 5."""
    path = tmp_path_factory.mktemp("scripts") / "scripts.json"
    one = {"prompt_contains": byte_ids("stuck!"), "tokens": byte_ids("x" * 40), "stall_at": 5, "stall_s": STALL_S}
    path.write_text(json.dumps([one]))
    return path


async def test_its_streams_go_on_elsewhere(scripted_stack: StartScripted, scripts: Path) -> None:
    """What made the first one stand still does it to the second as well: both wait for that one, and nobody fails."""
    up = scripted_stack(
        "--prefill", "2", "--decode", "3", HEADRACE_SCRIPTED__SCRIPTS=str(scripts), HEADRACE_SCRIPTED__DECODE_STEP_S="0.03"
    )
    asked = questions(18, 120)
    expected = await undisturbed(up.url, asked)
    fate: list[Answer] = []
    async with tap(up) as bus:
        dead = await bus.all_of("hr.dead.*")

        async def fault(progress: Progress) -> None:
            await progress.everybody_has(3)
            async with clients(up.url) as client:
                fate.append(await ask(client, Question(0, 40, content="stuck!")))

        answers = await ask_all(up.url, asked, fault)
        assert_same(answers, expected)
        print(f"\nlongest pause: {longest_pause(answers):.3f} s, of the one that stalls {fate[0].pause:.3f} s")
        assert fate[0].text == "x" * 40
        assert not dead
        await bus.operator.assert_clean(STALL_S + PATIENCE_S)
    async with clients(up.admin_url) as client:
        assert 'reason="stalled"' in (await client.get("/metrics")).text
