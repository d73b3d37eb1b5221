"""How a worker process ends when its engine does: broken, it takes nothing more and says so; worn, it finishes what it has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.lifecycle import State
from schemas.state import Role, WorkerState
from services.bus.typed import Refusals, listen
from services.engine.protocol import EngineWorn
from services.worker import service as module
from tests.engine.trtllm_engine.double import EngineFault, World
from tests.engine.trtllm_engine.rig import answer
from tests.waiting import PATIENCE_S
from tests.worker.rig import Rig, until
from tests.worker.test_pipeline_opaque import PROMPT, pair


class _Quiet:
    """A registry and a micro service that nobody asks."""

    async def ensure(self) -> None: ...

    async def put(self, process: str, state: object) -> None: ...

    def endpoint(self, *_: object) -> None: ...

    async def start(self) -> None: ...

    async def drain(self, within: float) -> None: ...


async def serve(r: Rig) -> asyncio.Task[Any]:
    """The decode worker, which the rig has started, as a process would be."""
    quiet: Any = _Quiet()
    r.decode.engine.start = lambda on_step: None  # type: ignore[method-assign]
    return asyncio.create_task(module.run(r.decode, [], Refusals(), quiet, quiet, asyncio.Event(), PATIENCE_S))


async def test_a_broken_engine_is_deregistered_shut_down_and_ends_the_process() -> None:
    world = World()
    async with pair(world) as r:
        said: list[WorkerState] = []
        subject = r.subjects.worker_state(Role.DECODE, "m", r.decode.bus.process)
        await listen(r.router, subject, WorkerState, lambda state, _: said.append(state), refusals=Refusals())
        serving = await serve(r)
        await until(lambda: said)
        run, _ = await r.submit(r.job(max_tokens=200))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        world.engines[1].fault = EngineFault("a rank died")
        async with asyncio.timeout(20.0):
            with pytest.raises(EngineFault):
                await serving
        await until(lambda: said[-1].draining)
        assert world.engines[1].ended
        assert r.edge.ended(run) is None, "its edge hears of the death, which counts against the job"


async def test_a_worn_engine_finishes_what_runs_and_ends_the_process() -> None:
    world = World(step_s=0.02)
    async with pair(world) as r:
        serving = await serve(r)
        run, _ = await r.submit(r.job(PROMPT, max_tokens=40))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        r.decode.engine._fate.wear(EngineWorn("leaks"))  # type: ignore[attr-defined]
        async with asyncio.timeout(20.0):
            with pytest.raises(EngineWorn):
                await serving
        assert r.edge.ended(run) is State.FINISHED
        assert r.edge.tokens(run) == answer(PROMPT, 40)
