"""A program that dies comes back, later each time; one that never worked is given up; `stop` leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from services.cli.failure import CommandError
from services.cli.up.keeper import LAST_DELAY_S, Keeper, Program, Watch, backoff
from services.cli.up.output import LogFile, Output
from services.clock import ManualClock
from tests.cli.programs import CRASHES, GOOD, STUBBORN, alive, program
from tests.waiting import PATIENCE_S, until

DIES_TWICE = (
    "import os, pathlib, signal, sys\n"
    "starts = pathlib.Path('{folder}/starts'); starts.open('a').write(sys.argv[-1] + chr(10))\n"
    "if len(starts.read_text().split()) <= 2: os.kill(os.getpid(), signal.SIGKILL)\n" + GOOD
)


class World:
    """Records what a keeper says and announces; a clock that stands still."""

    def __init__(self, folder: Path, name: str = "d1") -> None:
        self.said: list[str] = []
        self.ends: list[tuple[str, int]] = []
        self.lines: list[str] = []
        self.clock = ManualClock()
        self._ids = 0
        self.output = Output(name, LogFile(folder / f"{name}.log"), self.lines.append, verbose=True)
        self.watch = Watch(self.clock, self.said.append, self._new_id, lambda process, code: self.ends.append((process, code)))

    def _new_id(self, name: str) -> str:
        self._ids += 1
        return f"{name}-{self._ids}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_it_is_started_again_with_a_new_id_and_one_line(world: World, tmp_path: Path) -> None:
    keeper = Keeper(program("d1", DIES_TWICE.format(folder=tmp_path)), world.output, world.watch)
    running = asyncio.create_task(keeper.run())
    await until(lambda: world.lines)
    await keeper.stop()
    await running
    assert world.ends == [("d1-1", -9), ("d1-2", -9), ("d1-3", 0)]
    assert (tmp_path / "starts").read_text().split() == ["d1-1", "d1-2", "d1-3"]
    assert world.said == [
        "d1: killed by SIGKILL; starting it again in 0.25 s",
        "d1: killed by SIGKILL; starting it again in 0.5 s",
    ]


async def test_one_that_never_works_is_given_up_with_its_last_words(world: World) -> None:
    keeper = Keeper(program("d1", CRASHES), world.output, world.watch)
    with pytest.raises(CommandError, match=re.escape("d1 does not start (exit code 3): out of luck (log: ")):
        await asyncio.wait_for(keeper.run(), 20)
    assert len(world.ends) == 3


async def test_wrong_settings_are_given_up_at_once(world: World) -> None:
    keeper = Keeper(program("d1", "import sys; sys.exit(2)"), world.output, world.watch)
    with pytest.raises(CommandError, match="exit code 2"):
        await asyncio.wait_for(keeper.run(), 20)
    assert len(world.ends) == 1


async def test_one_that_worked_is_started_for_ever(world: World) -> None:
    keeper = Keeper(program("d1", CRASHES), world.output, world.watch)
    keeper.settled = True
    running = asyncio.create_task(keeper.run())
    await until(lambda: len(world.ends) >= 4)
    await keeper.stop()
    await running


async def test_one_that_worked_is_tried_again_when_it_cannot_be_run(world: World, tmp_path: Path) -> None:
    """No memory for it, no descriptor, or an installation that replaces it just now."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    keeper = Keeper(Program("d1", (str(link), "-S", "-c", GOOD), os.environ, 10.0), world.output, world.watch)
    keeper.settled = True
    running = asyncio.create_task(keeper.run())
    await until(lambda: world.lines)
    link.unlink()
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    await until(lambda: len(world.said) >= 2)
    assert "exit code 127: [Errno 2]" in world.said[1]
    link.symlink_to(sys.executable)
    await until(lambda: len(world.lines) >= 2)
    await keeper.stop()
    await running
    assert [code for _, code in world.ends] == [-9, 0]


async def test_a_stable_run_starts_the_delays_anew(world: World, tmp_path: Path) -> None:
    go = tmp_path / "go"
    source = f"import os, sys, time\nwhile not os.path.exists('{go}'): time.sleep(0.01)\nsys.exit(1)"
    keeper = Keeper(program("d1", source), world.output, world.watch)
    keeper.settled = True
    running = asyncio.create_task(keeper.run())
    for _ in range(2):
        await until(lambda: keeper.pid is not None)
        pid = keeper.pid
        world.clock.advance(60)
        go.touch()
        await until(lambda pid=pid: keeper.pid != pid)
        go.unlink()
    await keeper.stop()
    await running
    assert [line.rpartition("in ")[2] for line in world.said] == ["0.25 s"] * len(world.said)


async def test_one_that_ignores_sigterm_is_killed(world: World) -> None:
    keeper = Keeper(program("d1", STUBBORN, stop_within_s=0.2), world.output, world.watch)
    running = asyncio.create_task(keeper.run())
    await until(lambda: world.lines)
    pid = keeper.pid
    assert pid is not None
    await keeper.stop()
    await running
    assert not alive(pid)
    assert world.ends == [("d1-1", -9)]
    assert world.said == ["d1 did not stop in 0.2 s: killed"]


async def test_stop_while_it_waits_to_start_again(world: World) -> None:
    keeper = Keeper(program("d1", CRASHES), world.output, world.watch)
    running = asyncio.create_task(keeper.run())
    await until(lambda: world.said)
    await asyncio.wait_for(keeper.stop(), PATIENCE_S)
    await asyncio.wait_for(running, PATIENCE_S)


async def test_stop_during_the_start(world: World) -> None:
    keeper = Keeper(program("d1", GOOD), world.output, world.watch)
    running = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)  # the child is being started
    await asyncio.wait_for(keeper.stop(), 15)
    await asyncio.wait_for(running, PATIENCE_S)
    assert keeper.pid is None


async def test_stop_before_and_after_it_ran(world: World) -> None:
    keeper = Keeper(program("d1", GOOD), world.output, world.watch)
    await asyncio.wait_for(keeper.stop(), PATIENCE_S)
    await asyncio.wait_for(keeper.run(), PATIENCE_S)
    await asyncio.wait_for(keeper.stop(), PATIENCE_S)
    assert world.ends == []


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff(failures) for failures in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert backoff(1000) == LAST_DELAY_S
