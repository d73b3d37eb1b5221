"""A cluster on the virtual loop: starts processes, and does to them what a plan says.

Owns every node that ever ran. Each kind of `Fault` is the method of that name. A host process plays the supervisor that sees
deaths.
"""

from __future__ import annotations

import asyncio
from random import Random

from schemas.codec import SCHEMA, encode_json
from schemas.errors import Disconnected
from schemas.identity import process_id
from schemas.state import Cause, Death, Role
from schemas.subjects import Subjects
from services.bus import advisories
from services.bus.dialect import Dialect
from services.bus.memory import MemoryBus
from services.bus.memory_queue import MemoryWorkQueue
from services.bus.typed import send
from services.clock import LoopClock
from services.worker.stalls import FEW_STEPS
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, State
from tests.simulation.nodes import ACCOUNT, Node, serve_edge, serve_router, serve_worker
from tests.simulation.plan import Fault, Plan
from tests.simulation.queue import Reached
from tests.simulation.store import Rows
from tests.simulation.transfer import Wires

_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
_APART_S = 0.1
_START_S = 1.0


class Cluster:
    def __init__(self, loop: VirtualLoop, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        self._random = Random(f"cluster {plan.seed}")
        self.network = Network(loop, Random(f"network {plan.seed}"))
        self.wires = Wires(self.network, Random(f"wires {plan.seed}"), plan.engine.block_s)
        self.queue = MemoryWorkQueue(clock=LoopClock(loop))
        self.rows = Rows(loop.time, Random(f"store {plan.seed}"))
        self.rows.forgetful = plan.forgetful or 0.0
        self.nodes: dict[str, Node] = {}
        """The newest start of each name."""
        self.by_id: dict[str, Node] = {}
        self.failures: list[str] = []
        """Services that ended by an exception of their own."""
        self._host = Process(loop, "host", process_id("host", 1.0, self._random))
        clock = LoopClock(loop)
        self._host_bus = MemoryBus(self.network.broker, self._host.id, clock=clock, dialect=Dialect(clock=clock))
        self.network.join(self._host, self._host_bus)

    # processes

    def start_all(self) -> None:
        for name in self.plan.names:
            self.start(name)

    def start(self, name: str) -> Node:
        number = self.plan.names.index(name)
        random = Random(f"{self.plan.seed} {name} {len(self.by_id)}")
        clock = LoopClock(self.loop, 1_700_000_000.0 + self.plan.wall_offsets[number], self.plan.wall_drifts[number])
        process = Process(self.loop, name, process_id(name, clock.wall(), random))
        old = name in self.plan.old_builds and name not in self.nodes
        dialect = Dialect(SCHEMA - old, clock)
        bus = MemoryBus(self.network.broker, process.id, role=name[0], clock=clock, dialect=dialect)
        self.network.join(process, bus)
        node = Node(process, bus, clock, Reached(self.queue, self.network, process.id), random, asyncio.Event(), self.loop.time())
        self.nodes[name] = self.by_id[process.id] = node
        self.network.note(f"start {process.id}")
        process.spawn(self._run(node), "main")
        return node

    async def _run(self, node: Node) -> None:
        try:
            match node.name[0]:
                case "e":
                    await serve_edge(node, self.rows if self.plan.forgetful is not None else None)
                case "r":
                    await serve_router(node)
                case role:
                    await serve_worker(node, _ROLES[role], self.plan.engine, self.wires)
        except Disconnected:
            self._failed_to_start(node)
            return
        except Exception as error:
            self.failures.append(f"{node.process.id} failed: {error!r}")
        node.exited = True
        await node.bus.close()
        self._host.spawn(self._tell_death(node.process.id, Cause.LEFT), "obituary")
        self.loop.call_later(_APART_S, self._look_for_tasks, node, context=self._host.context)

    def _failed_to_start(self, node: Node) -> None:
        """The bus went away meanwhile: the process ends, and its supervisor starts another. Later no service may end so."""
        if self.loop.time() > node.started + _START_S:
            self.failures.append(f"{node.process.id} ended because the bus was away")
        fault = Fault(self.loop.time(), "kill", node.name, lasts=_START_S, flag=True)
        self.loop.call_soon(self.strike, fault, context=self._host.context)

    def _look_for_tasks(self, node: Node) -> None:
        left = [task.get_name() for task in node.process.tasks()]
        if left:
            self.failures.append(f"{node.process.id} left tasks behind: {left}")

    async def _tell_death(self, process: str, cause: Cause) -> None:
        for _ in range(3):
            if self._host_bus.connected:
                send(self._host_bus, Subjects().dead(process), Death(process=process, cause=cause))
            await asyncio.sleep(_APART_S)

    # faults

    def strike(self, fault: Fault) -> None:
        self.network.note(f"{fault.kind} {fault.victim} {fault.lasts} {fault.flag}")
        getattr(self, fault.kind)(fault)

    def kill(self, fault: Fault) -> None:
        node = self.nodes[fault.victim]
        if not node.alive:
            return
        node.process.kill()
        self.network.heal(node.process.id)
        self._drop(node.process.id)
        self.wires.servers.pop(node.process.id, None)
        self.wires.killed(node.process)
        if fault.flag:
            self.loop.call_later(0.01, self._host.spawn, self._tell_death(node.process.id, Cause.KILLED), "obituary")
        if fault.lasts:
            self.loop.call_later(fault.lasts, self.start, fault.victim)

    def drain(self, fault: Fault) -> None:
        node = self.nodes[fault.victim]
        node.process.context.run(node.stop.set)
        if fault.lasts:
            self.loop.call_later(fault.lasts + 5.0, self._start_again, node)

    def pause(self, fault: Fault) -> None:
        node = self.nodes[fault.victim]
        if node.alive and node.process.running:
            node.process.pause()
            self.loop.call_later(fault.lasts, node.process.resume)

    def partition(self, fault: Fault) -> None:
        process = self.nodes[fault.victim].process.id
        self.network.cut(process, State.HELD if fault.flag else State.CUT)
        self.loop.call_later(fault.lasts, self._heal, process, not fault.flag and fault.lasts > 1.0)

    def _heal(self, process: str, anew: bool) -> None:
        """`anew`: the connection did not survive; the client sees that now, and connects again."""
        if anew:
            self._drop(process)
            self.loop.call_later(0.1, self._restore, process)
        self.network.heal(process)

    def disconnect(self, fault: Fault) -> None:
        process = self.nodes[fault.victim].process.id
        self._drop(process)
        self.loop.call_later(fault.lasts, self._restore, process)

    def nats_down(self, fault: Fault) -> None:
        for node in self.nodes.values():
            self.network.drop(node.process.id)
            jitter = self._random.uniform(0.0, 0.15)
            self.loop.call_later(fault.lasts + jitter, self.network.restore, node.process.id)
        self.queue_down(fault)

    def queue_down(self, fault: Fault) -> None:
        self.queue.down = True
        self.loop.call_later(fault.lasts, setattr, self.queue, "down", False)

    def store_down(self, fault: Fault) -> None:
        self.rows.down = True
        self.loop.call_later(fault.lasts, setattr, self.rows, "down", False)

    def break_transfers(self, fault: Fault) -> None:
        self.wires.break_some(0.5)

    def _drop(self, process: str) -> None:
        """The connection of one process ends, and the server says so."""
        self.network.drop(process)
        self._advise(advisories.disconnected(ACCOUNT), process)

    def _restore(self, process: str) -> None:
        self.network.restore(process)
        if self.network.link(process).bus.connected:
            self._advise(advisories.connected(ACCOUNT), process)

    def _advise(self, subject: str, process: str) -> None:
        if self.plan.advice:
            self.network.advise(subject, encode_json({"client": {"name": process}}))

    def stall(self, fault: Fault) -> None:
        """The next step takes so long. Not of an engine that does not know yet how long its steps take."""
        node = self.nodes[fault.victim]
        if node.alive and node.worker is not None and node.worker.engine.stats().steps >= FEW_STEPS:
            node.runner.stall_s = fault.lasts

    def _start_again(self, node: Node) -> None:
        if node.exited and self.nodes[node.name] is node:
            self.start(node.name)

    # the end

    async def close(self) -> None:
        """Stop what lives, take apart what does not."""
        for node in self.nodes.values():
            node.process.context.run(node.stop.set)
        await asyncio.sleep(3 * 2.0 + 1.0)
        for node in self.by_id.values():
            await node.process.reap()
        await self._host.reap()
