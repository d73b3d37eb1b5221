"""Everything of one machine, from the first start to the last stop.

Owns the order: NATS, then all services at once; at the end the edge, the workers, the router, NATS. Knows programs, not what
they do. Invariant: when `run` is over, however it ends, nothing it started runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from services.cli.failure import CommandError
from services.cli.up.keeper import Keeper, Program, Watch
from services.cli.up.output import Output, Say
from services.cli.up.probe import POLL_S
from services.clock import Clock

NATS_START_S = 20.0
READY_S = 300.0
"""A slow disk may take a minute to load torch; nothing useful takes five."""

Probe = Callable[[], Awaitable[bool]]


class Deaths(Protocol):
    """Where ends of programs are announced."""

    def announce(self, process: str, code: int) -> None: ...

    async def finish(self, timeout: float) -> None: ...


class Supervisor:
    """`stages` stop one after another; the programs of one stage stop together. All of them start together."""

    def __init__(
        self,
        nats: Program,
        stages: Sequence[Sequence[Program]],
        *,
        output: Callable[[str], Output],
        deaths: Callable[[], AbstractAsyncContextManager[Deaths]],
        nats_up: Probe,
        ready: Probe,
        clock: Clock,
        say: Say,
        new_id: Callable[[str], str],
    ) -> None:
        self._deaths: Deaths | None = None
        self._open_deaths = deaths
        self._nats_up = nats_up
        self._ready = ready
        self._say = say
        watch = Watch(clock, say, new_id, self._exited)
        self._nats = Keeper(nats, output(nats.name), watch)
        self._stages = [[Keeper(program, output(program.name), watch) for program in stage] for stage in stages]
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def keepers(self) -> list[Keeper]:
        return [self._nats, *(keeper for stage in self._stages for keeper in stage)]

    def stop(self) -> bool:
        """Asked once: drain in order. Asked again: at once, and the answer is True."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()
        return self._hurry.is_set()

    async def run(self, announce_ready: Callable[[], None]) -> None:
        """Start, say when ready, keep running until `stop`. Raises `CommandError` when the start does not succeed."""
        tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._nats.run())]
        try:
            if not await self._until(self._nats_up, tasks, NATS_START_S, "NATS does not answer"):
                return
            async with self._open_deaths() as self._deaths:
                try:
                    tasks += [asyncio.create_task(keeper.run()) for stage in self._stages for keeper in stage]
                    if await self._until(self._ready, tasks, READY_S, "the edge does not get ready"):
                        for keeper in self.keepers:
                            keeper.settled = True
                        announce_ready()
                        await self._watch(tasks)
                finally:
                    await self._stop_services()
                    await self._deaths.finish(1.0)
        finally:
            await self._nats.stop()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until(self, probe: Probe, tasks: Sequence[asyncio.Task[None]], limit: float, trouble: str) -> bool:
        """True when `probe` says yes, False when we are asked to stop. Raises `CommandError` for anything else."""
        polling = asyncio.create_task(_poll(probe))
        try:
            await self._watch([polling, *tasks], limit)
        except TimeoutError:
            raise CommandError(f"{trouble} for {limit:g} s; the logs tell why") from None
        finally:
            polling.cancel()
        return polling.done() and not self._stop.is_set()

    async def _watch(self, tasks: Sequence[asyncio.Task[None]], limit: float | None = None) -> None:
        """Until we are asked to stop or one of `tasks` ends; its error is ours. Raises TimeoutError after `limit` seconds."""
        asked = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({asked, *tasks}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if not done:
            raise TimeoutError
        for task in done - {asked}:
            task.result()

    async def _stop_services(self) -> None:
        stopping = asyncio.create_task(self._stop_in_order())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            for stage in self._stages:
                for keeper in stage:
                    keeper.kill()
        await stopping

    async def _stop_in_order(self) -> None:
        for stage in self._stages:
            await asyncio.gather(*(keeper.stop() for keeper in stage))

    def _exited(self, process: str, code: int) -> None:
        if self._deaths is not None:
            self._deaths.announce(process, code)


async def _poll(probe: Probe) -> None:
    while True:
        if await probe():
            return
        await asyncio.sleep(POLL_S)
