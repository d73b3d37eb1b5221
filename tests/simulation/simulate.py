"""One seed from its first process to its last: run the plan, watch every step, look for what is left over."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from tests.simulation.client import Record, ask
from tests.simulation.cluster import Cluster
from tests.simulation.errors import errors_noticed
from tests.simulation.invariants import IN_ANY_CASE_S, TICK_S, Violation, Watch
from tests.simulation.leftovers import Leftovers
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import CALM
from tests.simulation.outcomes import judge
from tests.simulation.plan import Client, Plan, plan

_WARM_S = 1.4
"""By then every process of a cluster has started, and none has failed yet."""


@dataclass(frozen=True, slots=True)
class Result:
    """`trace` is a hash of every message that arrived; `seconds` virtual ones. `pauses`: of each client the longest time from its
    first token on without a new one; `attempts` it took, `deaths` of its owners."""

    seed: int
    trace: int
    arrived: int
    seconds: float
    outcomes: Counter[str]
    pauses: tuple[float, ...]
    attempts: tuple[int, ...]
    deaths: tuple[int, ...]


class Failed(AssertionError):
    """A seed that found something. `log` is what happened, when it was asked for."""

    def __init__(self, seed: int, why: str, log: list[str]) -> None:
        super().__init__(f"seed {seed}: {why}\n  replay: python -m tests.simulation --first {seed} --seeds 1 --log")
        self.seed = seed
        self.log = log


def simulate(seed: int, *, kinds: tuple[str, ...] = (), log: bool = False) -> Result:
    """The story of one seed. Raises `Failed`."""
    return play(plan(seed, kinds), log=log)


def play(plan: Plan, *, log: bool = False) -> Result:
    """Raises `Failed`."""
    seed, loop = plan.seed, VirtualLoop()
    simulation = _Simulation(loop, plan, log)
    try:
        with errors_noticed(simulation.cluster.failures):
            return loop.run_until_complete(simulation.run())
    except AssertionError as error:
        raise Failed(seed, f"at {loop.time():.3f} s: {error}", simulation.cluster.network.log or []) from error
    finally:
        with errors_noticed([]):  # what a dead process's remains say on their way out is nobody's business
            loop.run_until_complete(simulation.cluster.close())
        loop.close()


class _Simulation:
    def __init__(self, loop: VirtualLoop, plan: Plan, log: bool) -> None:
        self._loop = loop
        self._plan = plan
        self.cluster = Cluster(loop, plan)
        self.cluster.network.log = [] if log else None
        self._records: list[Record] = []
        self._watch = Watch(self.cluster, self._records)
        self._leftovers = Leftovers(self.cluster)

    async def run(self) -> Result:
        loop, cluster = self._loop, self.cluster
        cluster.start_all()
        for number, client in enumerate(self._plan.clients):
            loop.call_at(client.at, self._begin, number, client)
        for begins, ends, weather in self._plan.storms:
            loop.call_at(begins, cluster.network.change, weather)
            loop.call_at(ends, cluster.network.change, CALM)
        for fault in self._plan.faults:
            loop.call_at(fault.at, cluster.strike, fault)
        loop.call_at(_WARM_S, self._leftovers.take_baseline)
        await self._until_over()
        await self._until_clean()
        result = Result(
            self._plan.seed,
            cluster.network.trace,
            cluster.network.arrived,
            loop.time(),
            Counter(r.outcome or "edge_died" for r in self._records),
            tuple(record.pause for record in self._records),
            tuple(record.job.attempt for record in self._records),
            tuple(record.job.deaths for record in self._records),
        )
        for record in self._records:
            judge(record, self._plan)
        return result

    def _begin(self, number: int, client: Client) -> None:
        node = self.cluster.nodes[f"e{client.edge + 1}"]
        if node.alive and node.process.running and node.edge is not None and not node.stop.is_set():
            self._records.append(ask(number, client, node))

    async def _until_over(self) -> None:
        faults = max((fault.at + fault.lasts for fault in self._plan.faults), default=0.0)
        clients = max(client.at for client in self._plan.clients)
        storms = max((ends for _, ends, _ in self._plan.storms), default=0.0)
        while True:
            await asyncio.sleep(TICK_S)
            self._watch.look()
            waiting = any(not record.outcome and record.node.alive for record in self._records)
            if not waiting and self._loop.time() > max(faults, clients, storms):
                return

    async def _until_clean(self) -> None:
        """What is still held is let go by itself, in time."""
        deadline = self._loop.time() + IN_ANY_CASE_S
        while left := self._leftovers.find():
            await asyncio.sleep(TICK_S)
            self._watch.look()
            if self._loop.time() > deadline:
                raise Violation(f"left over: {left[:5]}")
