"""The order of start and stop, with fake programs: nothing runs afterwards, whatever went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.failure import CommandError
from services.cli.up import supervisor as supervisor_module
from services.cli.up.keeper import Program
from services.cli.up.output import LogFile, Output
from services.cli.up.supervisor import Supervisor
from services.clock import SystemClock
from tests.cli.programs import CRASHES, GOOD, STUBBORN, alive, program
from tests.waiting import until

NOTES_ITS_END = GOOD + "open({file!r}, 'a').write({name!r} + ' ')"


class Deaths:
    """Remembers what was announced."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.finished = False

    def announce(self, process: str, code: int) -> None:
        self.told.append((process, code))

    async def finish(self, timeout: float) -> None:
        self.finished = True


class Machine:
    """A supervisor over fake programs, and what it said."""

    def __init__(self, folder: Path, *stages: tuple[Program, ...], nats: str = GOOD) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.lines: dict[str, list[str]] = {}
        self.deaths = Deaths()
        self.order = folder / "order"
        self.pids: set[int] = set()
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(
            replace(program("nats", nats), identified=False),
            stages,
            output=self._output,
            deaths=self._deaths,
            nats_up=self._after("nats"),
            ready=self._after(*(one.name for stage in stages for one in stage)),
            clock=SystemClock(),
            say=self.said.append,
            new_id=lambda name: f"{name}-id",
        )

    async def run(self) -> None:
        await self.supervisor.run(self._announce)

    def none_is_left(self) -> bool:
        return bool(self.pids) and not any(alive(pid) for pid in self.pids)

    def _announce(self) -> None:
        self.pids |= {keeper.pid for keeper in self.supervisor.keepers if keeper.pid}
        self.ready.set()

    def _output(self, name: str) -> Output:
        lines = self.lines[name] = []
        return Output(name, LogFile(self.folder / f"{name}.log"), lines.append, verbose=True)

    def _after(self, *names: str) -> Callable[[], Awaitable[bool]]:
        async def all_spoke() -> bool:
            self.pids |= {keeper.pid for keeper in self.supervisor.keepers if keeper.pid}
            return all(f"{name}: up" in self.lines[name] for name in names)

        return all_spoke

    @asynccontextmanager
    async def _deaths(self) -> AsyncIterator[Deaths]:
        yield self.deaths


def notes(folder: Path, name: str) -> Program:
    return program(name, NOTES_ITS_END.format(file=str(folder / "order"), name=name))


async def test_everything_stops_in_order_and_is_announced(tmp_path: Path) -> None:
    edge, workers, router = notes(tmp_path, "e1"), (notes(tmp_path, "p1"), notes(tmp_path, "d1")), notes(tmp_path, "r1")
    nats = NOTES_ITS_END.format(file=str(tmp_path / "order"), name="nats")
    machine = Machine(tmp_path, (edge,), workers, (router,), nats=nats)
    running = asyncio.create_task(machine.run())
    await asyncio.wait_for(machine.ready.wait(), 20)
    machine.supervisor.stop()
    await asyncio.wait_for(running, 20)
    first, *middle, router_end, last = machine.order.read_text().split()
    assert (first, set(middle), router_end, last) == ("e1", {"p1", "d1"}, "r1", "nats")
    assert {process for process, code in machine.deaths.told if code == 0} == {"e1-id", "p1-id", "d1-id", "r1-id"}
    assert machine.deaths.finished
    assert machine.none_is_left()


async def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (program("e1", STUBBORN, stop_within_s=600),), (program("d1", STUBBORN, stop_within_s=600),))
    running = asyncio.create_task(machine.run())
    await asyncio.wait_for(machine.ready.wait(), 20)
    machine.supervisor.stop()
    machine.supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert machine.none_is_left()


async def test_a_service_that_cannot_start_ends_all_with_one_line(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (program("e1", GOOD),), (program("d1", "import sys; sys.exit(3)"),))
    with pytest.raises(CommandError, match="d1 does not start"):
        await asyncio.wait_for(machine.run(), 20)
    assert machine.none_is_left()


async def test_nats_that_cannot_start_ends_all_with_one_line(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (program("e1", GOOD),), nats="import sys; sys.exit('no room')")
    with pytest.raises(CommandError, match=r"nats does not start .*no room"):
        await asyncio.wait_for(machine.run(), 20)
    assert not machine.lines["e1"]


async def test_one_that_never_gets_ready_ends_all_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "READY_S", 0.5)
    machine = Machine(tmp_path, (program("e1", "import time; time.sleep(600)"),))
    with pytest.raises(CommandError, match="does not get ready"):
        await asyncio.wait_for(machine.run(), 20)
    assert machine.none_is_left()


async def test_stop_before_it_is_ready(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (program("e1", "import time; time.sleep(600)"),))
    running = asyncio.create_task(machine.run())
    await until(lambda: machine.supervisor.keepers[1].pid)
    machine.supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert not machine.ready.is_set()
    assert machine.none_is_left()


async def test_a_service_that_dies_later_comes_back_and_is_announced(tmp_path: Path) -> None:
    trigger = tmp_path / "die"
    dies_when_told = (
        f"import os, sys, time\nprint('up', flush=True)\nwhile not os.path.exists('{trigger}'): time.sleep(0.01)\nsys.exit(7)"
    )
    machine = Machine(tmp_path, (program("e1", GOOD),), (program("d1", dies_when_told),))
    running = asyncio.create_task(machine.run())
    await asyncio.wait_for(machine.ready.wait(), 20)
    trigger.touch()
    await until(lambda: machine.deaths.told)
    trigger.unlink()
    await until(lambda: len(machine.lines["d1"]) == 2)
    assert machine.deaths.told == [("d1-id", 7)]
    assert machine.said == ["d1: exit code 7: up; starting it again in 0.25 s"]
    machine.supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert machine.none_is_left()


async def test_nats_that_dies_comes_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (program("e1", GOOD),))
    running = asyncio.create_task(machine.run())
    await asyncio.wait_for(machine.ready.wait(), 20)
    nats = machine.supervisor.keepers[0]
    first = nats.pid
    nats._child.kill()  # type: ignore[union-attr]
    await until(lambda: nats.pid not in (None, first))
    machine.supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert machine.deaths.told == [("e1-id", 0)]


async def test_crashing_before_ready_and_stop_leave_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (program("e1", "import time; time.sleep(600)"),), (program("d1", CRASHES),))
    running = asyncio.create_task(machine.run())
    await until(lambda: machine.said)
    machine.supervisor.stop()
    await asyncio.wait_for(running, 20)
    assert machine.none_is_left()
