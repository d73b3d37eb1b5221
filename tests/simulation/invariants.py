"""What must hold at every step, seen by somebody who sees everything at once.

Owns how long each wrong has lasted already. Judges only what the design promises: the bounds are those of its sections 2 to 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.codec import decode
from schemas.reply import Digest, Reply
from schemas.state import Cause, Death, Role
from services.bus.memory import Delivery
from services.edge.jobs.timing import Timing
from services.engine.core import StepEngine
from services.engine.sequence import TRUNK
from services.kv.holders import ReservationHolder
from services.kv.pool import LedgerError
from services.worker.runs import Run
from services.worker.worker import Worker
from tests.simulation.client import Record
from tests.simulation.cluster import Cluster
from tests.simulation.network import State
from tests.simulation.nodes import BLOCK_TOKENS, Node

TICK_S = 0.05
UNWANTED_S = 0.5 + TICK_S
"""Undisturbed delivery after the edge heard of the run, beside the step in progress."""
KNOWN_S = 0.1 + TICK_S
"""The same for the run that the edge itself had adopted."""
PROVEN_S = 0.1 + TICK_S
"""From the news of a death to the end of the attempt that the dead process had."""
IN_ANY_CASE_S = 15.0 + 0.5
LEASE_S = 3.0 + 0.25 + 2 * TICK_S
BUS_RULE_S = 10.0
STALL_S = 5.0
"""A lost owner is given up after 3 s; then a submit, a placement, a prefill."""
LATE_S = 0.2
LONGEST_BLOCKS = 36
"""Of 60 prompt and 80 generated tokens, and one to grow."""
_SETTLED_S = 0.5


_Key = tuple[str, int, int | None]
"""(process, run, choice); None: the whole run."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class _Wrong:
    """A run, or a choice, that nobody wants: why, how long it went on, and how long of that undisturbed since it was heard of."""

    why: str
    heard: bool = False
    age: float = 0.0
    calm: float = 0.0
    lone: float = 0.0


class Watch:
    def __init__(self, cluster: Cluster, records: list[Record]) -> None:
        self._cluster = cluster
        self._records = records
        self._step_s = cluster.plan.engine.longest_step_s
        self._wrongs: dict[_Key, _Wrong] = {}
        self._adopted: dict[tuple[str, int], int] = {}
        self._books: dict[str, tuple[int, int, int]] = {}
        self._news: dict[tuple[str, str], float] = {}
        """When a process heard of a death: (who heard, who died)."""
        cluster.network.on_arrival = self._on_arrival

    def look(self) -> None:
        """Once each `TICK_S`. Raises `Violation`."""
        if self._cluster.failures:
            raise Violation(self._cluster.failures[0])
        seen: set[_Key] = set()
        for node in self._cluster.by_id.values():
            if node.worker is not None and node.alive:
                self._balance(node)
                for run in node.worker.runs:
                    self._judge_run(node, run, seen)
        self._wrongs = {key: wrong for key, wrong in self._wrongs.items() if key in seen}
        well = self._well()
        for record in self._records:
            if not record.outcome:
                self._judge_progress(record, well)
                self._judge_client(record)

    # ledgers

    def _balance(self, node: Node) -> None:
        assert node.worker is not None
        pool = node.worker.engine.pool
        books = (pool.free, pool.cached, len(pool.holders))
        if self._books.get(node.process.id) != books:
            self._books[node.process.id] = books
            try:
                pool.check_integrity()
            except LedgerError as error:
                raise Violation(f"{node.process.id}: {error}") from None

    # runs

    def _judge_run(self, node: Node, run: Run, seen: set[_Key]) -> None:
        edge = self._cluster.by_id[run.job.edge]
        why = self._unwanted(edge, run)
        if why:
            seen.add((node.process.id, run.id, None))
            self._judge_wrong(node, edge, run, None, why)
            return
        for choice in self._stopped(edge, run) & computing(node, run):
            seen.add((node.process.id, run.id, choice))
            self._judge_wrong(node, edge, run, choice, f"choice {choice} was stopped")

    def _judge_wrong(self, node: Node, edge: Node, run: Run, choice: int | None, why: str) -> None:
        wrong = self._wrongs.setdefault((node.process.id, run.id, choice), _Wrong(why))
        if not node.process.running:
            wrong.calm = wrong.lone = 0.0
            return
        wrong.why = why
        wrong.age += TICK_S
        told = (node.process.id, edge.process.id) in self._news
        undisturbed = self._undisturbed(node) and (told or self._undisturbed(edge)) and self._cluster.network.weather.calm
        known = choice is None and self._knows(edge, run)  # a choice is told of again only when it speaks
        wrong.heard = wrong.heard or known or told
        wrong.calm = wrong.calm + TICK_S if undisturbed and wrong.heard else 0.0
        wrong.lone = wrong.lone + TICK_S if not edge.alive and self._undisturbed(node, 3.0) else 0.0
        for spent, allowed in (
            (wrong.age, IN_ANY_CASE_S),
            (wrong.calm, KNOWN_S if known else UNWANTED_S),
            (wrong.lone, LEASE_S + (BUS_RULE_S if self._edges_away() > 1 else 0.0)),
        ):
            if spent > allowed + self._step_s:
                raise Violation(f"{node.process.id} still computes run {run.id:x} of {run.job.job} ({why}): {wrong}")

    def _unwanted(self, edge: Node, run: Run) -> str:
        if not edge.alive or edge.edge is None:
            return "its edge is dead"
        job = edge.edge._jobs.get(run.job.job)
        if job is None or job.closed:
            return "its job is over"
        if job.attempt != run.job.attempt:
            return f"attempt {run.job.attempt} of {job.attempt}"
        if job.run not in (0, run.id):
            return "another run is adopted"
        return "its attempt is over" if job.over.done() else ""

    def _stopped(self, edge: Node, run: Run) -> set[int]:
        """Choices of a wanted run that are not."""
        job = edge.edge._jobs.get(run.job.job) if edge.edge is not None else None
        return job.tokens.stopped if job is not None else set()

    def _knows(self, edge: Node, run: Run) -> bool:
        if not edge.alive or edge.edge is None:
            return False
        job = edge.edge._jobs.get(run.job.job)
        return job is not None and job.run == run.id

    def _undisturbed(self, node: Node, for_s: float = _SETTLED_S) -> bool:
        network, link = self._cluster.network, self._cluster.network.link(node.process.id)
        oldest = self._cluster.loop.time() - for_s
        return (
            node.process.running
            and node.still_until <= oldest
            and node.process.since <= oldest
            and link.state is State.OPEN
            and node.bus.connected
            and link.since <= oldest
            and network.weather_since <= self._cluster.loop.time() - _SETTLED_S
        )

    def _edges_away(self) -> int:
        """Edges that a worker may have stopped hearing; two of them may be the bus."""
        return sum(
            node.edge is not None and not (node.alive and self._undisturbed(node, 5.0)) for node in self._cluster.by_id.values()
        )

    def _on_arrival(self, delivery: Delivery) -> None:
        """Does an edge hear of an unwanted run now, or somebody of a death?"""
        if delivery.msg.subject.startswith("hr.dead."):
            death = decode(delivery.msg.data, Death)
            if death.cause is not Cause.DISCONNECTED:
                self._news.setdefault((delivery.target.bus.process, death.process), self._cluster.loop.time())
        if not self._wrongs or not delivery.msg.subject.startswith("hr.reply."):
            return
        reply = decode(delivery.msg.data, Reply)  # type: ignore[arg-type]
        runs = reply.runs if isinstance(reply, Digest) else (*reply.frames, *reply.events)
        said: list[_Key] = [(reply.process, record.run, None) for record in runs]
        said += [(reply.process, frame.run, frame.choice) for frame in getattr(reply, "frames", ())]
        for key in said:
            if key in self._wrongs:
                self._wrongs[key].heard = True

    # clients

    def _judge_progress(self, record: Record, well: int | None) -> None:
        """A job that was owned goes on when there is somebody to go on with it."""
        job = record.job
        record.owned = record.owned or (job.owned and not job.closed)
        record.cut_off = record.cut_off or record.node.bus.down_for() > Timing().cut_off_s - 2 * TICK_S
        told = self._news.get((record.node.process.id, job.in_charge), float("inf"))
        if record.node.process.running and not job.closed and not job.over.done() and self._cluster.loop.time() > told + PROVEN_S:
            raise Violation(f"client {record.number} still waits for {job.in_charge}, whose death its edge knows")
        received = job.tokens.received()
        if well is None or received != record.received or not job.owned or not self._undisturbed(record.node):
            record.received, record.stalled = received, 0.0
            return
        record.stalled += TICK_S
        # Of several choices decode itself computes what each had generated: that and the next token are steps of its own.
        # A fault in the middle of a slow handoff: what was copied before it, and all of it again after.
        copies = 2 * self._cluster.plan.engine.block_s * -(-(job.draft.prompt_tokens + received) // BLOCK_TOKENS)
        if record.stalled > STALL_S + 2 * self._step_s + copies + (BUS_RULE_S if well > 1 else 0.0):
            raise Violation(f"client {record.number} stands still with {received} tokens for {record.stalled:.1f} s")

    def _well(self) -> int | None:
        """How many processes are not well; None when what is left of the cluster cannot serve."""
        if not self._cluster.network.weather.calm:
            return None
        newest = self._cluster.nodes.values()
        well = [node for node in newest if node.alive and not node.stop.is_set() and self._undisturbed(node, 2.0)]
        routes = any(node.router is not None for node in well)
        serves = any(node.worker is not None and _has_room(node.worker) for node in well)
        return len(newest) - len(well) if routes and serves else None

    def _judge_client(self, record: Record) -> None:
        if record.wrong:
            raise Violation(f"client {record.number}: {record.wrong}")
        job = record.job
        if job.run and not job.closed:
            adopted = self._adopted.setdefault((job.id, job.attempt), job.run)
            if adopted != job.run:
                raise Violation(f"client {record.number}: attempt {job.attempt} adopted {adopted:x}, then {job.run:x}")
        process, now = record.node.process, self._cluster.loop.time()
        if record.outcome or not record.node.alive or not process.running or process.since > now - LATE_S:
            return
        if now > record.started + record.client.total_s + LATE_S:
            raise Violation(f"client {record.number} waits beyond its total deadline")


def computing(node: Node, run: Run) -> set[int]:
    """The choices of a run that its worker's engine works on now."""
    assert node.worker is not None
    assert isinstance(node.worker.engine, StepEngine)
    found: set[int] = set()
    for sequence in node.worker.engine._runs.of(run.id):
        own = {choice.index for choice in run.job.open_choices} if sequence.choice == TRUNK else {sequence.choice}
        found |= own - sequence.dropped
    return found


def _has_room(worker: Worker) -> bool:
    """It would take another run to decode, of any length there is."""
    pool, slots = worker.engine.pool, worker.engine.info.max_batch
    taken = sum(isinstance(holder, ReservationHolder) for holder in pool.holders) + sum(run.hop == 2 for run in worker.runs)
    return worker.role is not Role.PREFILL and taken < slots and pool.available >= LONGEST_BLOCKS
