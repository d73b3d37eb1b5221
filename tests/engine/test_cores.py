"""Engines of one host share its cores: in one process, and in several, one of which is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.engine.cores import CoreArbiter, Timing, lock_folder
from tests.waiting import PATIENCE_S, until

Open = Callable[..., CoreArbiter]
PATIENT = Timing(decode=600.0, prefill=600.0)
HASTY = Timing(decode=0.01, prefill=0.01)
HASTY_AND_BUSY = Timing(decode=0.01, prefill=0.01, linger=600.0)
RESTING = Timing(decode=600.0, prefill=600.0, linger=600.0, rest=3600.0)


@pytest.fixture
def arbiter(tmp_path: Path) -> Iterator[Open]:
    """Opens arbiters of engines that share two cores."""
    opened: list[CoreArbiter] = []

    def open_one(cores: int = 2, most: int = 0, timing: Timing = PATIENT) -> CoreArbiter:
        opened.append(CoreArbiter(tmp_path, range(cores), most, timing=timing))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


async def one_step(engine: CoreArbiter, *, decode: bool) -> int:
    async with engine.step(decode=decode) as threads:
        return threads


async def settled(engine: CoreArbiter, threads: int, *, decode: bool) -> None:
    """Returns when a step of `engine` has so many threads."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while (had := await one_step(engine, decode=decode)) != threads:
        assert loop.time() < deadline, f"{had} threads for {PATIENCE_S} s, not {threads}"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("decode", [True, False])
async def test_who_is_alone_has_every_core(arbiter: Open, decode: bool) -> None:
    assert await one_step(arbiter(), decode=decode) == 2
    assert await one_step(arbiter(cores=5, most=3), decode=decode) == 3
    assert arbiter(cores=2, most=7).most == 2


@pytest.mark.parametrize("decode", [True, False])
async def test_further_cores_go_back_with_the_step_and_the_first_soon(arbiter: Open, decode: bool) -> None:
    first, second = arbiter(), arbiter()
    assert await one_step(first, decode=decode) == 2
    assert await one_step(second, decode=decode) == 1  # the other stays with the first engine for a moment
    await settled(second, 2, decode=decode)


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (True, True), (False, False)])
async def test_nobody_keeps_a_second_core_while_somebody_wants_one(arbiter: Open, mine: bool, theirs: bool) -> None:
    first, second = arbiter(), arbiter()
    inside: set[CoreArbiter] = set()

    async def overlapping(engine: CoreArbiter, decode: bool) -> int:
        async with engine.step(decode=decode) as threads:
            inside.add(engine)
            while len(inside) < 2:
                threads = engine.reconsider()
                await asyncio.sleep(0.001)
            return min(threads, engine.reconsider())

    async with first.step(decode=mine) as threads:
        assert threads == 2
        waiting = asyncio.create_task(overlapping(second, theirs))
        await until(lambda: second._wanting is not None, what="the second engine to wait")
    async with asyncio.timeout(PATIENCE_S):
        assert await overlapping(first, mine) == await waiting == 1


async def test_a_core_that_comes_free_is_taken_in_the_midst_of_a_step(arbiter: Open) -> None:
    first, second = arbiter(), arbiter(timing=HASTY)
    async with first.step(decode=False):
        async with second.step(decode=False) as threads:
            assert (threads, len(second._held)) == (1, 0)  # without a core
            assert first.reconsider() == 1  # because the second one wants one
            assert (second.reconsider(), len(second._held)) == (1, 1)
        await until(lambda: first.reconsider() == 2, what="the second engine to have nothing to do")


async def test_a_decode_that_begins_has_a_core_with_the_next_step_of_a_prefill_that_had_all(arbiter: Open) -> None:
    prefill, decode = arbiter(), arbiter(timing=HASTY_AND_BUSY)
    async with prefill.step(decode=False) as threads:
        assert threads == 2
        assert await one_step(decode, decode=True) == 1  # without a core, after its patience
        assert len(decode._held) == 0
    beside = asyncio.create_task(one_step(prefill, decode=False))
    await until(lambda: prefill._wanting is not None, what="the prefill to stand back")
    async with decode.step(decode=True) as threads:
        assert threads == len(decode._held) == 1
        assert await beside == 1


async def test_decode_goes_first(arbiter: Open) -> None:
    """Both want the one core there is; the prefill waited longer."""
    holder, prefill, decode = arbiter(cores=1), arbiter(cores=1), arbiter(cores=1)
    order: list[str] = []

    async def want(name: str, engine: CoreArbiter) -> None:
        async with engine.step(decode=name == "decode"):
            order.append(name if engine._held else f"{name} without a core")

    async with holder.step(decode=True):
        tasks = [asyncio.create_task(want("prefill", prefill))]
        await until(lambda: prefill._wanting is not None, what="the prefill to wait")
        tasks.append(asyncio.create_task(want("decode", decode)))
        await until(lambda: decode._wanting is not None, what="the decode to wait")
    await asyncio.gather(*tasks)
    assert order[0] == "decode"


async def resting(decode: CoreArbiter, rest: float) -> asyncio.Task[int]:
    """Its second step, after a first one of 10 ms or more."""
    async with decode.step(decode=True, rest=rest):
        await asyncio.sleep(0.01)
    return asyncio.create_task(one_step(decode, decode=True))


async def test_a_decode_of_few_rows_rests_beside_a_prefill_that_goes_on(arbiter: Open) -> None:
    prefill, decode, full = (arbiter(most=1, timing=RESTING) for _ in range(3))
    async with prefill.step(decode=False, more=True):
        second = await resting(decode, rest=100_000.0)
        await until(lambda: not decode._held, what="its core to be free")
        assert await asyncio.wait_for(await resting(full, rest=0.0), PATIENCE_S) == 1
        assert not second.done()
        second.cancel()
        await asyncio.wait([second])


async def test_a_decode_rests_only_while_prompts_go_on(arbiter: Open) -> None:
    prefill, decode = arbiter(most=1, timing=RESTING), arbiter(most=1, timing=RESTING)
    async with prefill.step(decode=False, more=True):
        pass
    async with prefill.step(decode=False, more=False):
        assert await asyncio.wait_for(await resting(decode, rest=100_000.0), PATIENCE_S) == 1
    async with prefill.step(decode=True, more=True):  # it has tokens of its own to compute
        assert await asyncio.wait_for(await resting(decode, rest=100_000.0), PATIENCE_S) == 1


async def test_the_longest_rest_is_set(arbiter: Open) -> None:
    prefill, decode = arbiter(most=1, timing=RESTING), arbiter(most=1, timing=Timing(rest=0.001))
    async with prefill.step(decode=False, more=True):
        assert await asyncio.wait_for(await resting(decode, rest=100_000.0), PATIENCE_S) == 1


async def test_two_decodes_take_turns_on_one_core(arbiter: Open) -> None:
    first, second = arbiter(cores=1), arbiter(cores=1)
    with_core = {first: 0, second: 0}

    async def steps(engine: CoreArbiter) -> None:
        while min(with_core.values()) < 5:
            async with engine.step(decode=True):
                with_core[engine] += len(engine._held)
                await asyncio.sleep(0.002)

    await asyncio.wait_for(asyncio.gather(steps(first), steps(second)), 30)


async def test_a_wish_ends_with_the_engine_s_work(arbiter: Open) -> None:
    """An engine that computed without a core and then had nothing to do keeps nobody from anything."""
    holder, idle = arbiter(), arbiter(timing=HASTY)
    async with holder.step(decode=True) as threads:
        assert threads == 2
        assert await one_step(idle, decode=True) == 1
    await settled(holder, 2, decode=True)


async def test_a_cancelled_wait_leaves_nothing_behind(arbiter: Open) -> None:
    holder, waiter = arbiter(), arbiter()
    async with holder.step(decode=True):
        waiting = asyncio.create_task(one_step(waiter, decode=False))
        await until(lambda: waiter._wanting is not None, what="the wait")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await settled(holder, 2, decode=True)


@pytest.mark.parametrize("decode", [True, False])
async def test_nobody_waits_longer_than_its_patience(arbiter: Open, decode: bool) -> None:
    holder, waiter = arbiter(), arbiter(timing=HASTY)
    async with holder.step(decode=True):
        assert await asyncio.wait_for(one_step(waiter, decode=decode), PATIENCE_S) == 1


HOLD = """
import asyncio, sys
from pathlib import Path
from services.engine.cores import CoreArbiter

async def hold():
    async with CoreArbiter(Path(sys.argv[1]), range(2)).step(decode=True) as threads:
        print(threads, flush=True)
        await asyncio.sleep(600)

asyncio.run(hold())
"""


async def test_the_cores_of_a_killed_process_are_free_at_once(arbiter: Open, tmp_path: Path) -> None:
    mine = arbiter(timing=HASTY)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, str(tmp_path), stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"2\n"
        async with mine.step(decode=False) as threads:
            assert (threads, mine._held) == (1, [])
    finally:
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(process.wait(), 60)
    async with mine.step(decode=False) as threads:
        assert (threads, len(mine._held)) == (2, 2)


def test_the_folder_is_this_user_s_own() -> None:
    folder = lock_folder()
    assert lock_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_somebody_else_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.cores._SHARED_MEMORY", tmp_path)
    lock_folder().rename(tmp_path / "elsewhere")
    lock = tmp_path / f"headrace-cores-{os.getuid()}"
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        lock_folder()
