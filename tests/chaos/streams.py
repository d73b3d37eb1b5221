"""Clients whose answers are compared with those of an undisturbed run: streamed chats, many at once.

The scripted engine's tokens are a pure function of the request, so two runs of a `Question` must read alike, token by token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

PATIENCE_S = 90.0
BROKE_OFF = 0
"""The status of an answer whose connection was not there, or ended before it did."""


@dataclass(frozen=True, slots=True)
class Question:
    """One chat. Odd ones are drawn with a seed, even ones greedily."""

    number: int
    max_tokens: int
    content: str = ""
    model: str = "tiny"

    @property
    def body(self) -> dict[str, Any]:
        how = {"temperature": 1.0, "seed": self.number} if self.number % 2 else {"temperature": 0}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.content or f"question {self.number} " + "?" * (self.number % 23)}],
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **how,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw. `pieces` are the texts of its chunks and when each came (monotonic seconds)."""

    status: int
    pieces: tuple[tuple[float, str], ...] = ()
    tokens: int = 0
    finish: str = ""
    error: dict[str, Any] | None = None
    retry_after: str | None = None
    whole: bool = False
    """`data: [DONE]` came."""

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)

    @property
    def said(self) -> tuple[str, int, str]:
        """What must not depend on what happened meanwhile."""
        return self.text, self.tokens, self.finish

    @property
    def pause(self) -> float:
        """The longest time between two chunks, in seconds."""
        times = [at for at, _ in self.pieces]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def questions(count: int, max_tokens: int, *, first: int = 0) -> list[Question]:
    return [Question(number, max_tokens) for number in range(first, first + count)]


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        yield client


def nothing() -> None:
    """Who does not want to be told."""


async def ask(
    client: httpx.AsyncClient, question: Question, heard: Callable[[], object] = nothing, begun: Callable[[], object] = nothing
) -> Answer:
    """One streamed chat; `begun` is called when it was admitted, or refused, `heard` for each piece."""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=question.body) as response:
            begun()
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                return Answer(response.status_code, error=error, retry_after=response.headers.get("retry-after"))
            return await _read(response, heard)
    except httpx.TransportError:
        return Answer(BROKE_OFF)


async def ask_all(
    url: str, asked: Sequence[Question], during: Callable[[Progress], Awaitable[None]] | None = None
) -> list[Answer]:
    """All at once; meanwhile `during`, which may wait for how far they have come."""
    progress = Progress(len(asked))
    async with clients(url) as client, asyncio.TaskGroup() as group:
        answers = [
            group.create_task(ask(client, question, progress.one(at), progress.begin)) for at, question in enumerate(asked)
        ]
        if during is not None:
            await during(progress)
    return [answer.result() for answer in answers]


async def undisturbed(url: str, asked: Sequence[Question]) -> list[Answer]:
    """What they are when nothing fails. Raises AssertionError when something does all the same."""
    answers = await ask_all(url, asked)
    assert_same(answers, answers)
    assert [answer.tokens for answer in answers] == [question.max_tokens for question in asked]
    return answers


async def ready(url: str, within: float = 60.0) -> None:
    """Until the edge there says that it is ready."""
    await _until_ready(url, True, within)


async def not_ready(url: str, within: float = 60.0) -> None:
    """Until it says that it is not, or nothing at all."""
    await _until_ready(url, False, within)


class Progress:
    """How many pieces each stream has, and how many have begun: they run, or wait in the queue."""

    def __init__(self, streams: int) -> None:
        self.pieces = [0] * streams
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def one(self, stream: int) -> Callable[[], None]:
        def heard() -> None:
            self.pieces[stream] += 1

        return heard

    async def everybody_has_begun(self, within: float = 60.0) -> None:
        """A fault before that has some refused: there was nobody to take them."""
        await until(lambda: self.begun == len(self.pieces), within, lambda: f"begun so far: {self.begun}")

    async def everybody_has(self, pieces: int, within: float = 60.0) -> None:
        await until(lambda: min(self.pieces) >= pieces, within, lambda: f"pieces so far: {self.pieces}")


def assert_same(answers: Sequence[Answer], undisturbed: Sequence[Answer]) -> None:
    """None failed, and each reads as the one that nothing disturbed. Raises AssertionError with the first that do not."""
    failed = [answer for answer in answers if answer.status != 200 or answer.error or not answer.whole]
    assert not failed, f"{len(failed)} failed: {failed[:2]}"
    pairs = zip(answers, undisturbed, strict=True)
    different = [(answer.said, other.said) for answer, other in pairs if answer.said != other.said]
    assert not different, f"{len(different)} differ: {different[:2]}"


def longest_pause(answers: Sequence[Answer]) -> float:
    """Seconds between two chunks of one answer."""
    return max(answer.pause for answer in answers)


async def until(condition: Callable[[], bool], within: float, what: Callable[[], str] = lambda: "") -> float:
    """Seconds until `condition` held. Raises AssertionError after `within` seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within, f"not within {within} s. {what()}"
        await asyncio.sleep(0.005)
    return time.monotonic() - started


async def _until_ready(url: str, wanted: bool, within: float) -> None:
    async with asyncio.timeout(within), clients(url) as client:
        while await _is_ready(client) is not wanted:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def _read(response: httpx.Response, heard: Callable[[], object]) -> Answer:
    pieces: list[tuple[float, str]] = []
    tokens, finish, error, whole = 0, "", None, False
    status = response.status_code
    try:
        async for line in lines(response):
            if line == "data: [DONE]":
                assert not whole, "[DONE] came twice"
                whole = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                error = chunk.get("error", error)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                    if piece := choice["delta"].get("content"):
                        pieces.append((time.monotonic(), piece))
                        heard()
    except httpx.TransportError:
        status = BROKE_OFF
    return Answer(status, tuple(pieces), tokens, finish, error, whole=whole)


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    """As server-sent events have them; httpx's own lines also end at characters such as U+0085, which a token may be."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
