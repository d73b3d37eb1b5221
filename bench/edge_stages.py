"""Where an edge's CPU goes, stage by stage: microseconds a token (one event each) and a request of two tokens.

    .venv/bin/python -m bench.edge_stages [--rounds 3]

A whole edge in this process, 32 streams at a time; router and worker are played over a bus in memory. One stage after another is
added, and what it adds is its row: first messages are only read, in the end a load generator reads events from the HTTP server.
User and system time of all threads, the least of the rounds. Not in it: the connection to NATS (`bench.overhead` has all).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import Message, Receive

from bench.bodies import write_bodies
from bench.overhead import LONG, WORDS
from bench.stack import build_load, load_result, start_load
from bench.whole_edge import WholeEdge, whole_edge
from schemas.job import Tier
from schemas.reply import Reply
from services.edge.api.answer import Answer
from services.edge.api.body import parse
from services.edge.api.chat_form import ChatForm
from services.edge.api.exchange import Pace, Streamed
from services.edge.api.measure import Measure
from services.edge.api.messages import check_messages
from services.edge.api.request import ChatRequest, read_request
from services.edge.http_server import Bounds, HttpServer
from services.models.store import ModelStore
from services.settings.settings import Settings

STREAMS, REQUESTS = 32, 1024
STEP_S = 0.002
Figures = dict[str, float]
Stage = Callable[[int, int], Awaitable[object]]
"""Make so many requests of so many tokens each, `STREAMS` at a time, and read their answers up to this stage."""


class Stages:
    """`bodies`: files of request bodies, by the tokens that they ask for."""

    def __init__(self, edge: WholeEdge, bodies: dict[int, Path], load: Path, port: int) -> None:
        self._edge = edge
        self._bodies = bodies
        self._lines = {tokens: path.read_bytes().splitlines() for tokens, path in bodies.items()}
        self._load = load
        self._port = port

    async def jobs(self, count: int, tokens: int) -> None:
        """Nobody reads what they receive."""
        for _ in range(count):
            self._edge.start(tokens)
        while len(self._edge.jobs):  # noqa: ASYNC110 - polling costs less than it measures
            await asyncio.sleep(0.02)

    async def handles(self, count: int, tokens: int) -> None:
        async def one(_: int) -> None:
            handle = self._edge.start(tokens)
            await handle.admitted()
            while not handle.done:
                await handle.next(10.0)

        await _each(count, one)

    async def answers(self, count: int, tokens: int) -> None:
        async def one(_: int) -> None:
            answer = self._answer(tokens)
            await answer.admitted()
            while not answer.done:
                await answer.next(10.0)

        await _each(count, one)

    async def events(self, count: int, tokens: int) -> None:
        served = self._edge.served

        async def one(_: int) -> None:
            answer = self._answer(tokens)
            form = ChatForm(f"chatcmpl-{answer.id}", 0, served.text.name, Tier.PAID, usage=True)
            measure = Measure(served.metrics, served.clock)
            exchange = Streamed(answer, form, self._edge.reservation(), "req", Pace.of(served.settings), measure)
            await exchange({"type": "http", "state": {}}, _receive(b""), _send)

        await _each(count, one)

    async def application(self, count: int, tokens: int) -> None:
        async def one(at: int) -> None:
            body = self._lines[tokens][at]
            await self._edge.app(_scope(body), _receive(body), _send)

        await _each(count, one)

    async def http(self, count: int, tokens: int) -> None:
        options = ("-c", str(min(count, STREAMS)), "-n", str(count))
        await asyncio.to_thread(load_result, start_load(self._load, self._port, self._bodies[tokens], *options))

    def _answer(self, tokens: int) -> Answer:
        return Answer(self._edge.start(tokens), [self._edge.served.text.stream(())], prompt_tokens=40, token_by_token=False)


async def _each(count: int, one: Callable[[int], Awaitable[object]]) -> None:
    async def some(first: int) -> None:
        for at in range(first, count, STREAMS):
            await one(at)

    await asyncio.gather(*(some(first) for first in range(min(count, STREAMS))))


async def spent(work: Awaitable[object]) -> float:
    """µs of CPU of this process until it is done."""
    began = time.process_time()
    await work
    return 1e6 * (time.process_time() - began)


async def say(messages: Sequence[bytes], to: Callable[[bytes], object]) -> None:
    for message in messages:
        to(message)
        await asyncio.sleep(STEP_S)


async def of_a_token(edge: WholeEdge, stages: Stages) -> Figures:
    """Cumulative: what a token takes up to each stage."""
    far, count = edge.far, STREAMS * LONG

    async def up_to(stage: Stage) -> float:
        far.at_once, far.jobs = 0, []
        reading = asyncio.ensure_future(stage(STREAMS, LONG))
        while len(far.jobs) < STREAMS:  # noqa: ASYNC110 - they come within milliseconds
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

        async def all_of_it() -> None:
            await say(far.steps(far.jobs, LONG), far.say)
            await reading

        return await spent(all_of_it()) / count

    jobs = await up_to(stages.jobs)
    messages = far.steps(far.jobs, LONG)
    idle = await spent(say(messages, len)) / count
    kind: Any = Reply  # one of a union
    read = await spent(say(messages, lambda message: edge.bus.dialect.decode(message, kind))) / count
    found = {"read the message": read, "take it into its job": jobs}
    found["wake its reader"] = await up_to(stages.handles)
    found["make it text"] = await up_to(stages.answers)
    found["write an event"] = await up_to(stages.events)
    found["Gate, FastAPI"] = await up_to(stages.application)
    found["Granian, socket"] = await up_to(stages.http)
    return {name: value - idle for name, value in found.items()}


async def of_a_request(edge: WholeEdge, stages: Stages, bodies: Sequence[bytes]) -> Figures:
    """As `of_a_token`, of two tokens; without what playing the far side takes."""
    far, count = edge.far, len(bodies)

    async def up_to(stage: Stage) -> float:
        far.at_once, far.jobs, far.spent = 2, [], 0.0
        return (await spent(stage(count, 2)) - 1e6 * far.spent) / count

    async def body() -> None:
        for line in bodies:
            check_messages(read_request(ChatRequest, parse(line)).messages)

    async def prompt() -> None:
        for line in bodies:
            await edge.served.text.encode(parse(line)["messages"])

    parsed, encoded = await spent(body()) / count, await spent(prompt()) / count
    before = parsed + encoded
    return {
        "read the body": parsed,
        "template, tokens": before,
        "job, two tokens": before + await up_to(stages.handles),
        "make it text": before + await up_to(stages.answers),
        "write events": before + await up_to(stages.events),
        "Gate, FastAPI": await up_to(stages.application),
        "Granian, socket": await up_to(stages.http),
    }


async def measure(model: str, folder: Path, scratch: Path, rounds: int, count: int) -> tuple[Figures, Figures]:
    """Cumulative µs by stage: of a token, and of each of `count` requests of two."""
    bodies = {tokens: scratch / f"{tokens}.jsonl" for tokens in (2, LONG)}
    for tokens, path in bodies.items():
        write_bodies(path, model=model, max_tokens=tokens, words=WORDS, count=count)
    async with whole_edge(model, folder, scratch) as edge:
        server = HttpServer(edge.app, "127.0.0.1", 0, Bounds.of(edge.served.settings))
        await server.start()
        stages = Stages(edge, bodies, build_load(scratch), server.port)
        lines = bodies[2].read_bytes().splitlines()
        await of_a_request(edge, stages, lines)  # warm up
        of_tokens = [await of_a_token(edge, stages) for _ in range(rounds)]
        of_requests = [await of_a_request(edge, stages, lines) for _ in range(rounds)]
        await server.stop(2.0)
    return _least(of_tokens), _least(of_requests)


def _least(rounds: Sequence[Figures]) -> Figures:
    return {name: min(each[name] for each in rounds) for name in rounds[0]}


def table(title: str, upto: Figures) -> str:
    rows, before = [f"| {title} | µs |", "|---|---|"], 0.0
    for name, value in upto.items():
        rows.append(f"| {name} | {value - before:.1f} |")
        before = value
    return "\n".join([*rows, f"| all | {before:.1f} |"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--home", type=Path, default=Path(os.environ.get("HEADRACE_HOME", "~/.cache/headrace")).expanduser())
    arguments = options.parse_args()
    files = ModelStore(arguments.home).open(Settings().served[0])
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        work = measure(files.name, files.folder, Path(scratch), arguments.rounds, REQUESTS)
        a_token, a_request = runner.run(work)
    print(table("of a token", a_token), "", table("of a request of two tokens", a_request), sep="\n")


def _scope(body: bytes) -> dict[str, Any]:
    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    about = {"method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b""}
    where = {"scheme": "http", "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", **about, **where, "headers": headers}


def _receive(body: bytes) -> Receive:
    """The body, then nothing: the client stays."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}] if body else [])

    async def receive() -> Message:
        part = next(parts, None)
        return part if part is not None else await asyncio.get_running_loop().create_future()

    return receive


async def _send(message: Message) -> None:
    """A client that takes everything at once."""


if __name__ == "__main__":
    main()
