"""One client of the edge: reads its tokens, compares each with the reference, leaves when it has had enough."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from schemas.errors import HeadraceError
from schemas.job import pack_ids
from schemas.reply import FinishReason
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.draft import Draft, Limits
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
    expected: list[int]
    reason: FinishReason
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    owned: bool = False
    """Somebody was seen to own the job while it was open."""
    cut_off: bool = False
    """Its edge's own connection was seen to be down for as long as ends a stream."""
    wrong: str = ""
    received: int = 0
    stalled: float = 0.0

    def take(self, tokens: list[int], finish: FinishReason | None) -> None:
        begin = len(self.tokens)
        self.tokens += tokens
        if self.tokens[begin:] != self.expected[begin : len(self.tokens)]:
            self.wrong = self.wrong or f"tokens {begin}.. are {tokens}, not {self.expected[begin:]}"
        if finish is not None and (len(self.tokens) != len(self.expected) or finish is not self.reason):
            self.wrong = self.wrong or f"finished {finish} after {len(self.tokens)} of {len(self.expected)} ({self.reason})"


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
    )
    handle: JobHandle = node.process.context.run(node.edge.start, draft)
    expected, reason = reference(client.prompt, client.sampling)
    now = asyncio.get_running_loop().time()
    record = Record(number, client, node, handle._job, now, expected, reason)
    node.process.spawn(_listen(record, handle), "client")
    return record


async def _listen(record: Record, handle: JobHandle) -> None:
    client = record.client
    try:
        async with asyncio.timeout(client.gives_up_s):
            await handle.admitted()
            while not handle.done:
                for delta in await handle.next(1.0):
                    record.take(delta.tokens, delta.finish)
                if client.gives_up_at is not None and len(record.tokens) >= client.gives_up_at and not handle.done:
                    raise TimeoutError
        record.outcome = "finished"
    except TimeoutError:
        record.outcome = "gave_up"
        handle.cancel()
    except HeadraceError as error:
        record.outcome = error.code or type(error).__name__
