"""A detached job read token by token, so that what is made of it does not depend on when it is read, where, or how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from schemas.reply import Logprob
from services.edge.jobs.draft import Delta, Draft


class Reader(Protocol):
    """See `services.edge.detached.reader`."""

    id: str
    cached_tokens: int
    compute_s: float
    draft: Draft

    @property
    def done(self) -> bool: ...

    async def next(self, timeout: float) -> list[Delta]: ...

    def cancel(self) -> None: ...

    def stop(self, choice: int) -> None: ...


class OneByOne:
    """A `services.edge.api.ports.Handle`: each delta is one token, or the finish."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def id(self) -> str:
        return self._reader.id

    @property
    def explanation(self) -> None:
        """Nobody waits for where it was placed."""

    @property
    def began(self) -> bool:
        """Whoever reads it to its end reads what was computed."""
        return True

    @property
    def cached_tokens(self) -> int:
        return self._reader.cached_tokens

    @property
    def compute_s(self) -> float:
        return self._reader.compute_s

    @property
    def done(self) -> bool:
        return self._reader.done

    @property
    def prompt_logprobs(self) -> Sequence[Logprob]:
        return ()

    async def admitted(self) -> None:
        """It was."""

    async def next(self, timeout: float) -> list[Delta]:
        return [one for delta in await self._reader.next(timeout) for one in delta.one_by_one()]

    def cancel(self) -> None:
        """Ends the reading, not the job."""
        self._reader.cancel()

    def stop(self, choice: int) -> None:
        self._reader.stop(choice)
