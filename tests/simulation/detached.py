"""Detached jobs under faults: seeds of their own, in which every client asks for one and reads it wherever an edge lives.

Beside what `invariants` wants: one edge at most answers for a job; each token is read once, whichever edge says it; what no edge
holds is computed for 30 s at most; every job ends while there is an edge.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

from schemas.errors import HeadraceError, StoreUnavailable
from schemas.job import pack_ids
from schemas.reply import FinishReason
from services.edge.jobs.draft import Delta, Draft, Limits
from services.edge.store.records import JobState
from services.worker.runs import UNATTENDED_S, Run
from tests.simulation.cluster import Cluster
from tests.simulation.errors import errors_noticed
from tests.simulation.invariants import TICK_S, Violation, Watch
from tests.simulation.leftovers import Leftovers
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import CALM
from tests.simulation.nodes import MODEL, Node
from tests.simulation.plan import Client, Fault, Plan, plan
from tests.simulation.reference import reference
from tests.simulation.store import Row

TENANT = "t"
TOTAL_S = 90.0
LATE_S = 20.0
"""A job that nobody holds at its deadline ends when it was adopted: a lease, a look."""
_WARM_S = 1.4


@dataclass(eq=False)
class Record:
    """`job` "" = not submitted yet. `reader`: the node that reads for this client now, `reading` its task there."""

    number: int
    client: Client
    expected: list[tuple[list[int], FinishReason]]
    tokens: list[list[int]]
    started: float
    job: str = ""
    outcome: str = ""
    wrong: str = ""
    reader: Node | None = None
    reading: asyncio.Task[None] | None = None
    finished: set[int] = field(default_factory=set)

    def take(self, news: Delta) -> None:
        have, (expected, reason) = self.tokens[news.choice], self.expected[news.choice]
        have += news.tokens
        if have != expected[: len(have)] or news.choice in self.finished:
            self.wrong = f"choice {news.choice} reads {have}, not {expected}"
        if news.finish is not None:
            self.finished.add(news.choice)
            if len(have) != len(expected) or news.finish is not reason:
                self.wrong = f"choice {news.choice} finished {news.finish} after {len(have)} of {len(expected)}"


def detached_plan(seed: int) -> Plan:
    """That of the seed, with two edges at least, detached jobs, and faults of the database."""
    random = Random(f"detached {seed}")
    base = plan(seed)
    edges = max(2, base.edges)
    clients = tuple(
        replace(client, edge=random.randrange(edges), queue_s=30.0, first_token_s=60.0, total_s=TOTAL_S)
        for client in base.clients[:10]
    )
    kills = [
        Fault(random.uniform(2.0, 8.0), "kill", f"e{random.randint(1, edges)}", random.choice((0.0, 4.0, 25.0)), flag)
        for flag in (True, False)
        if random.random() < 0.5
    ]
    store = [
        Fault(random.uniform(1.5, 8.0), "store_down", lasts=random.choice((1.0, 6.0, 20.0)))
        for _ in range(2)
        if random.random() < 0.3
    ]
    faults = tuple(sorted((*base.faults, *kills, *store), key=lambda fault: fault.at))
    more = edges - base.edges
    return replace(
        base,
        edges=edges,
        clients=clients,
        faults=faults,
        wall_offsets=(*base.wall_offsets, *[0.0] * more),
        wall_drifts=(*base.wall_drifts, *[0.0] * more),
        forgetful=random.choice((0.0, 0.0, 0.1)),
    )


class DetachedWatch(Watch):
    """Judges runs by the rows, not by the edge they began at."""

    def __init__(self, cluster: Cluster, records: list[Record]) -> None:
        super().__init__(cluster, [])
        self._clients = records
        self._alone: dict[tuple[str, int], float] = {}

    def look(self) -> None:
        super().look()
        for record in self._clients:
            if record.wrong:
                raise Violation(f"client {record.number}: {record.wrong}")
            holders = [
                node.process.id
                for node in self._edges()
                if record.job and node.detached and node.detached._keeper.live(record.job)
            ]
            if len(holders) > 1:
                raise Violation(f"job {record.job} of client {record.number} is held by {holders}")

    def _edges(self) -> list[Node]:
        return [node for node in self._cluster.by_id.values() if node.alive and node.detached is not None]

    def _judge_run(self, node: Node, run: Run, seen: object) -> None:
        key = (node.process.id, run.id)
        if self._wanted(run) or not node.process.running:
            self._alone.pop(key, None)
            return
        if self._undisturbed(node, 3.0):
            self._alone[key] = self._alone.get(key, 0.0) + TICK_S
        if self._alone.get(key, 0.0) > UNATTENDED_S + 1.0 + self._step_s:
            raise Violation(f"{node.process.id} computes run {run.id:x} of {run.job.job}, which no edge holds")

    def _wanted(self, run: Run) -> bool:
        for node in self._edges():
            assert node.detached is not None
            job = node.detached._keeper.live(run.job.job)
            if job is not None and not job.closed and job.attempt == run.job.attempt and job.run in (0, run.id):
                return True
        return False


class Story:
    """One seed."""

    def __init__(self, loop: VirtualLoop, plan: Plan, log: bool) -> None:
        self._loop = loop
        self._plan = plan
        self.cluster = Cluster(loop, plan)
        self.cluster.network.log = [] if log else None
        self.records: list[Record] = []
        self._watch = DetachedWatch(self.cluster, self.records)
        self._leftovers = Leftovers(self.cluster)
        self._random = Random(f"readers {plan.seed}")

    async def run(self) -> None:
        loop, cluster, plan = self._loop, self.cluster, self._plan
        cluster.start_all()
        for number, client in enumerate(plan.clients):
            loop.call_at(client.at, self._begin, number, client)
        for begins, ends, weather in plan.storms:
            loop.call_at(begins, cluster.network.change, weather)
            loop.call_at(ends, cluster.network.change, CALM)
        for fault in plan.faults:
            loop.call_at(fault.at, cluster.strike, fault)
        loop.call_at(_WARM_S, self._leftovers.take_baseline)
        over = max(
            (
                *(fault.at + fault.lasts for fault in plan.faults),
                *(ends for _, ends, _ in plan.storms),
                *(c.at for c in plan.clients),
            )
        )
        while loop.time() < over or self._waiting():
            await asyncio.sleep(TICK_S)
            self._watch.look()
            self._read_on()
        await self._until_clean()

    def _begin(self, number: int, client: Client) -> None:
        node = self.cluster.nodes[f"e{client.edge + 1}"]
        if self._serves(node):
            expected = [reference(client.prompt, client.sampling, choice) for choice in range(client.n)]
            record = Record(number, client, expected, [[] for _ in expected], self._loop.time())
            self.records.append(record)
            record.reader, record.reading = node, node.process.spawn(self._submit(record, node), "client")

    async def _submit(self, record: Record, node: Node) -> None:
        client = record.client
        draft = Draft(
            MODEL,
            pack_ids(client.prompt),
            client.sampling,
            Limits(client.queue_s, client.first_token_s, client.total_s),
            client.lane,
            b"s",
            client.tier,
            client.n,
        )
        assert node.detached is not None
        try:
            record.job = await node.detached.submit(draft, TENANT)
        except HeadraceError as error:
            record.outcome = f"refused: {error.code}"
        record.reader = None

    def _waiting(self) -> bool:
        """For clients whose job is known, as long as an edge lives that could end it."""
        if not self._serving():
            return False
        open_ones = [record for record in self.records if record.job and not record.outcome]
        for record in open_ones:
            if self._loop.time() > record.started + TOTAL_S + LATE_S:
                row = self.cluster.rows.rows[record.job]
                raise Violation(f"client {record.number} waits beyond its total deadline; {row.state}, held by {row.edge}")
        return bool(open_ones)

    def _read_on(self) -> None:
        """Each client reads at some edge; when that one dies or stands still, at another."""
        serving = self._serving()
        for record in self.records:
            if record.reading is not None and record.reader is not None and record.reader.stop.is_set():
                record.reading.cancel()
        for record in self.records:
            if not record.job or record.outcome or not serving or (record.reader is not None and self._serves(record.reader)):
                continue
            if record.reading is not None:
                record.reading.cancel()
            record.reader = self._random.choice(serving)
            record.reading = record.reader.process.spawn(self._read(record, record.reader), "reader")

    async def _read(self, record: Record, node: Node) -> None:
        assert node.detached is not None
        begin = {choice: len(tokens) for choice, tokens in enumerate(record.tokens)}
        try:
            reader = await node.detached.attach(record.job, TENANT, begin)
            for choice in record.finished:
                reader.stop(choice)
            while not reader.done:
                news = await reader.next(1.0)
                if record.reader is not node:
                    return
                for delta in news:
                    record.take(delta)
            record.outcome = "finished"
        except StoreUnavailable:
            record.reader = None
        except HeadraceError as error:
            record.outcome = error.code or type(error).__name__

    def _serving(self) -> list[Node]:
        return [node for node in self.cluster.nodes.values() if self._serves(node)]

    def _serves(self, node: Node) -> bool:
        return node.alive and node.process.running and node.detached is not None and not node.stop.is_set()

    async def _until_clean(self) -> None:
        """Runs that no edge holds, and what they hold, go by themselves; rows are ended by whoever adopts them."""
        deadline = self._loop.time() + TOTAL_S + LATE_S
        while left := [*self._leftovers.find(), *self._unfinished()]:
            await asyncio.sleep(TICK_S)
            self._watch.look()
            if self._loop.time() > deadline:
                raise Violation(f"left over: {left[:5]}")

    def _unfinished(self) -> list[str]:
        rows = self.cluster.rows.rows.items() if self._serving() else ()
        return [f"row {job}" for job, row in rows if row.state is JobState.RUNNING]


def judge(story: Story) -> None:
    """Raises `Violation` for an end that nothing excuses: an accepted job finishes, or its total deadline passed."""
    rows = story.cluster.rows.rows
    for record in story.records:
        allowed = {"finished", "deadline_exceeded", "queue_expired", "internal_error"}
        if record.job and record.outcome and record.outcome not in allowed:
            raise Violation(f"client {record.number} ended as {record.outcome!r}: {rows[record.job].error}")
        # An edge that dies with the last tokens not in the database leaves the job running; nobody goes on after its deadline.
        if record.outcome == "finished" and not _may_follow(rows[record.job]):
            raise Violation(f"client {record.number} finished, its row is {rows[record.job].state}")


def _may_follow(row: Row) -> bool:
    return row.state in (JobState.FINISHED, JobState.RUNNING) or row.error[0] in ("deadline_exceeded", "queue_expired")


def tell(seed: int, *, log: bool = False) -> list[str]:
    """The outcomes of one seed. Raises AssertionError, with the seed in it."""
    loop = VirtualLoop()
    story = Story(loop, detached_plan(seed), log)
    try:
        with errors_noticed(story.cluster.failures):
            loop.run_until_complete(story.run())
            judge(story)
        return [record.outcome or "edge_died" for record in story.records]
    except AssertionError as error:
        print("\n".join(story.cluster.network.log or []))
        raise AssertionError(f"detached seed {seed}: at {loop.time():.3f} s: {error}") from error
    finally:
        with errors_noticed([]):
            loop.run_until_complete(story.cluster.close())
        loop.close()
