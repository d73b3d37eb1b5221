"""A steady load from clients that go to another edge when one sends them away, as a balancer does it for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.chaos.streams import BROKE_OFF, Answer, Question, ask, clients, until


@dataclass
class Load:
    """`edges`: where clients go, in this order or the opposite; may change meanwhile. `answers`: all that began, or was refused
    for good."""

    edges: list[str]
    answers: list[tuple[Question, Answer]] = field(default_factory=list)

    async def more(self, count: int, within: float = 60.0) -> None:
        """Until there are so many more answers."""
        target = len(self.answers) + count
        await until(lambda: len(self.answers) >= target, within)

    def assert_none_failed(self, expected: Mapping[int, tuple[str, int, str]]) -> None:
        """Every answer reads as the one that nothing disturbed. Raises AssertionError."""
        wrong = [(question.number, answer) for question, answer in self.answers if answer.said != expected[question.number]]
        assert not wrong, f"{len(wrong)} of {len(self.answers)}: {wrong[:2]}"

    async def ask_over_and_over(self, question: Question, over: asyncio.Event) -> None:
        while not over.is_set():
            for url in self.edges if question.number % 2 else self.edges[::-1]:
                async with clients(url) as client:
                    answer = await ask(client, question)
                sent_away = not answer.pieces and answer.status in (BROKE_OFF, 503)
                if not sent_away:
                    self.answers.append((question, answer))
                    break
            else:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def steady(edges: list[str], asked: Sequence[Question]) -> AsyncIterator[Load]:
    """Each of `asked` again and again, all at the same time, until the block ends."""
    load, over = Load(edges), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for question in asked:
            group.create_task(load.ask_over_and_over(question, over))
        try:
            yield load
        finally:
            over.set()
