"""Who lost a worker goes on soon, although new work wants more than there is: suspects in their turn, the others ahead of it."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.plan import FIRST_S, Fault
from tests.simulation.simulate import play
from tests.simulation.stories import ENGINE, story

SMALL = replace(ENGINE, max_batch=4)
TOKENS = 60
ALONE_S = TOKENS * SMALL.decode_step_s
"""What a job takes from the first token to the last, alone or not."""
CROWD = [FIRST_S] * 8 + [FIRST_S + 0.5 + 0.25 * n for n in range(52)]
"""Eight that fill two workers, then 4 a second where 2.7 can be served."""


def test_a_resumed_job_does_not_starve_behind_new_work() -> None:
    """One death: the four that lose their worker have nowhere to go but where others leave."""
    kill = Fault(FIRST_S + 1.0, "kill", "d1", lasts=0.3, flag=True)
    result = play(story(kill, clients=60, tokens=TOKENS, engine=SMALL, at=CROWD))
    assert result.outcomes == {"finished": 60}
    assert max(result.pauses) < ALONE_S + 1.0


def test_suspects_go_on_one_after_another() -> None:
    """Their second worker dies as well. Each waits for those before it, and for the runs that must leave, and for nobody else."""
    kills = [Fault(FIRST_S + at, "kill", name, lasts=0.3, flag=True) for at, name in ((1.0, "d1"), (2.5, "d2"), (2.6, "d1"))]
    result = play(story(*kills, clients=60, tokens=TOKENS, engine=SMALL, at=CROWD))
    suspects = sum(deaths == 2 for deaths in result.deaths)
    assert result.outcomes == {"finished": 60}
    assert suspects >= 2
    assert max(result.pauses) < suspects * ALONE_S + 1.0
