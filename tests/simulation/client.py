"""One client of the edge: reads its tokens, compares each with the reference, leaves when it has had enough."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from schemas.errors import HeadraceError
from schemas.job import pack_ids
from schemas.reply import FinishReason
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.draft import Delta, Draft, Limits
from services.edge.jobs.handle import JobHandle
from tests.simulation.nodes import MODEL, Node
from tests.simulation.plan import Client
from tests.simulation.reference import reference


@dataclass(eq=False)
class Record:
    """What became of one client. `outcome`: finished, gave_up or an error code; "" while it waits."""

    number: int
    client: Client
    node: Node
    job: ActiveJob
    started: float
    expected: list[tuple[list[int], FinishReason]]
    """Of each choice: its tokens, and why it ends."""
    tokens: list[list[int]]
    outcome: str = ""
    owned: bool = False
    """Somebody was seen to own the job while it was open."""
    cut_off: bool = False
    """Its edge's own connection was seen to be down for as long as ends a stream."""
    wrong: str = ""
    pause: float = 0.0
    """The longest time between two arrivals of tokens."""
    last: float | None = None
    received: int = 0
    stalled: float = 0.0

    finished: set[int] = field(default_factory=set)
    """Choices that ended, or that the client has enough of: nothing of them may come any more."""

    def take(self, news: Delta) -> None:
        now = asyncio.get_running_loop().time()
        self.pause = max(self.pause, now - (now if self.last is None else self.last))
        self.last = now
        have, (expected, reason) = self.tokens[news.choice], self.expected[news.choice]
        begin = len(have)
        have += news.tokens
        if news.choice in self.finished:
            self._is_wrong(f"choice {news.choice} goes on after its end")
        if have[begin:] != expected[begin : len(have)]:
            self._is_wrong(f"tokens {begin}.. of choice {news.choice} are {news.tokens}, not {expected[begin:]}")
        if news.finish is not None:
            self.finished.add(news.choice)
            if len(have) != len(expected) or news.finish is not reason:
                self._is_wrong(f"choice {news.choice} finished {news.finish} after {len(have)} of {len(expected)} ({reason})")

    def _is_wrong(self, what: str) -> None:
        self.wrong = self.wrong or what


def ask(number: int, client: Client, node: Node) -> Record:
    """Start the request at its edge."""
    assert node.edge is not None
    draft = Draft(
        model=MODEL,
        prompt=pack_ids(client.prompt),
        sampling=client.sampling,
        limits=Limits(client.queue_s, client.first_token_s, client.total_s),
        lane=client.lane,
        salt=b"s",
        tier=client.tier,
        n=client.n,
    )
    handle: JobHandle = node.process.context.run(node.edge.start, draft)
    expected = [reference(client.prompt, client.sampling, choice) for choice in range(client.n)]
    now = asyncio.get_running_loop().time()
    record = Record(number, client, node, handle._job, now, expected, [[] for _ in expected])
    node.process.spawn(_listen(record, handle), "client")
    return record


async def _listen(record: Record, handle: JobHandle) -> None:
    client = record.client
    try:
        async with asyncio.timeout(client.gives_up_s):
            await handle.admitted()
            while not handle.done:
                for delta in await handle.next(1.0):
                    record.take(delta)
                _stop_some(record, handle)
                if client.gives_up_at is not None and sum(map(len, record.tokens)) >= client.gives_up_at and not handle.done:
                    raise TimeoutError
        record.outcome = "finished"
    except TimeoutError:
        record.outcome = "gave_up"
        handle.cancel()
    except HeadraceError as error:
        record.outcome = error.code or type(error).__name__


def _stop_some(record: Record, handle: JobHandle) -> None:
    for choice, enough in record.client.stops:
        if choice not in record.finished and len(record.tokens[choice]) >= enough:
            record.finished.add(choice)
            handle.stop(choice)
