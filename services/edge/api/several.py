"""The answers to several prompts, read as one. Invariant: when one fails all are given up, for the client gets one error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from schemas.explanation import Explanation
from services.edge.api.answer import Answer, Piece
from services.edge.api.usage import Usage


class Several:
    """Choice k of answer i is choice i * `n` + k."""

    def __init__(self, answers: Sequence[Answer], n: int) -> None:
        self._answers = answers
        self._n = n

    @property
    def id(self) -> str:
        return self._answers[0].id

    @property
    def usage(self) -> Usage:
        each = [answer.usage for answer in self._answers]
        return Usage(
            sum(usage.prompt_tokens for usage in each),
            sum(usage.completion_tokens for usage in each),
            sum(usage.cached_tokens for usage in each),
            sum(usage.compute_s for usage in each),
            each[0].price,
        )

    @property
    def done(self) -> bool:
        return all(answer.done for answer in self._answers)

    @property
    def explanation(self) -> Explanation | None:
        """Of the first prompt's."""
        return self._answers[0].explanation

    async def admitted(self) -> None:
        """Raises the first refusal."""
        await asyncio.gather(*(answer.admitted() for answer in self._answers))

    async def next(self, timeout: float) -> list[Piece] | None:
        """Pieces of whichever answers have some; None after `timeout` seconds of silence of all."""
        running = [at for at, answer in enumerate(self._answers) if not answer.done]
        if len(running) == 1:
            pieces = await self._answers[running[0]].next(timeout)
            return None if pieces is None else self._numbered(running[0], pieces)
        tasks = {at: asyncio.ensure_future(self._answers[at].next(timeout)) for at in running}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks.values():
                task.cancel()  # one that has its pieces keeps them, one that has none took nothing
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        read = [(at, task.result()) for at, task in tasks.items() if not task.cancelled()]
        if all(pieces is None for _, pieces in read):
            return None
        return [piece for at, pieces in read for piece in self._numbered(at, pieces or [])]

    def _numbered(self, at: int, pieces: list[Piece]) -> list[Piece]:
        return [replace(piece, choice=at * self._n + piece.choice) for piece in pieces]

    def cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()
