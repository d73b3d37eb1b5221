"""The service layer as the CLI sees it: answers that its JSON schemas accept, requests side by side, an orderly end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.errors import HeadraceError, InvalidRequest, NotFound, UnreadableMessage
from services.bus.interface import Bus, Msg
from services.bus.micro import MAX_RUNNING, Service
from services.bus.micro_endpoint import Answer
from tests.bus.conftest import NewBus
from tests.waiting import PATIENCE_S, until

SEMVER = re.compile(r"^\d+\.\d+\.\d+([-+].*)?$")


class Fixture:
    """A service with three endpoints: one echoes, one waits for `go`, one fails."""

    def __init__(self, bus: Bus, caller: Bus) -> None:
        self.bus, self.caller = bus, caller
        self.go = asyncio.Event()
        self.started = 0
        self.finished = 0
        self.service = Service(bus, "headrace-worker", "0.1.0", "runs jobs", {"role": "decode"})
        self.service.endpoint("status", "t.status", self._echo)
        self.service.endpoint("slow", "t.slow", self._slow, queue="mine", metadata={"timeout": "5"})
        self.service.endpoint("fail", "t.fail", self._fail)

    async def ask(self, subject: str, data: bytes = b"{}", timeout: float = PATIENCE_S) -> Msg:
        return await self.caller.request(subject, data, timeout=timeout)

    async def json(self, subject: str) -> Any:
        return json.loads((await self.ask(subject)).data)

    async def _echo(self, msg: Msg) -> Answer:
        return {"heard": msg.data.decode()}

    async def _slow(self, msg: Msg) -> Answer:
        self.started += 1
        await self.go.wait()
        self.finished += 1
        return b"done"

    async def _fail(self, msg: Msg) -> Answer:
        if msg.data == b"known":
            raise NotFound("no such\nworker")
        if msg.data == b"huge":
            raise InvalidRequest("no " + "x" * 5_000_000, param="y" * 5_000_000)
        if msg.data == b"unreadable":
            raise UnreadableMessage("not a question")
        raise RuntimeError("secret detail")


@pytest.fixture
async def it(new_bus: NewBus) -> AsyncIterator[Fixture]:
    it = Fixture(await new_bus("worker"), await new_bus("caller"))
    await it.service.start()
    await it.bus.flush(PATIENCE_S)
    yield it
    await it.service.drain(0.0)


def _strings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())


def _check_identity(answer: dict[str, Any], kind: str, process: str) -> None:
    assert answer["type"] == f"io.nats.micro.v1.{kind}_response"
    assert re.fullmatch(r"[a-zA-Z0-9_-]+", answer["name"])
    assert answer["id"] == process
    assert SEMVER.match(answer["version"])
    assert _strings(answer["metadata"])


async def test_ping_info_and_stats_are_what_the_schemas_want(it: Fixture) -> None:
    await it.ask("t.status")
    for suffix in ("", ".headrace-worker", f".headrace-worker.{it.bus.process}"):
        ping, info, stats = [await it.json(f"$SRV.{verb}{suffix}") for verb in ("PING", "INFO", "STATS")]
        _check_identity(ping, "ping", it.bus.process)
        _check_identity(info, "info", it.bus.process)
        _check_identity(stats, "stats", it.bus.process)
        assert info["description"] == "runs jobs"
        assert [endpoint["subject"] for endpoint in info["endpoints"]] == ["t.status", "t.slow", "t.fail"]
        assert info["endpoints"][1] == {
            "name": "slow",
            "subject": "t.slow",
            "queue_group": "mine",
            "metadata": {"timeout": "5"},
        }
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", stats["started"])
        for endpoint in stats["endpoints"]:
            numbers = ("num_requests", "num_errors", "processing_time", "average_processing_time")
            assert all(isinstance(endpoint[key], int) for key in numbers)
            assert all(isinstance(endpoint[key], str) for key in ("name", "subject", "queue_group", "last_error"))
        assert stats["endpoints"][0]["num_requests"] == 1


async def test_requests_run_side_by_side_and_ping_is_answered_meanwhile(it: Fixture) -> None:
    asking = [asyncio.create_task(it.ask("t.slow")) for _ in range(3)]
    await until(lambda: it.started == 3, what="all three at once")
    assert (await it.json("$SRV.PING"))["id"] == it.bus.process
    it.go.set()
    assert [answer.data for answer in await asyncio.gather(*asking)] == [b"done"] * 3


async def test_errors_are_answered_and_counted(it: Fixture) -> None:
    known, unknown = await it.ask("t.fail", b"known"), await it.ask("t.fail", b"bug")
    assert known.headers["Nats-Service-Error"] == "no such worker"
    assert known.headers["Nats-Service-Error-Code"] == "404"
    assert json.loads(known.data)["error"]["code"] == "not_found"
    assert unknown.headers["Nats-Service-Error-Code"] == "500"
    assert b"secret" not in unknown.data
    stats = it.service.stats()["endpoints"][2]
    assert (stats["num_requests"], stats["num_errors"]) == (2, 2)
    assert stats["last_error"].startswith("500:")


async def test_a_question_that_cannot_be_read_is_the_askers_mistake(it: Fixture) -> None:
    answer = await it.ask("t.fail", b"unreadable")
    assert answer.headers["Nats-Service-Error-Code"] == "400"
    assert json.loads(answer.data)["error"]["message"] == "not a question"


async def test_too_many_at_once_are_refused_not_queued(it: Fixture) -> None:
    asking = [asyncio.create_task(it.ask("t.slow")) for _ in range(MAX_RUNNING)]
    await until(lambda: it.started == MAX_RUNNING)
    assert (await it.ask("t.slow")).headers["Nats-Service-Error-Code"] == "503"
    it.go.set()
    await asyncio.gather(*asking)
    assert it.service.stats()["endpoints"][1]["num_requests"] == MAX_RUNNING + 1


async def test_drain_lets_running_requests_finish(it: Fixture) -> None:
    asking = [asyncio.create_task(it.ask("t.slow")) for _ in range(3)]
    await until(lambda: it.started == 3)
    draining = asyncio.create_task(it.service.drain(PATIENCE_S))
    await asyncio.sleep(0)
    assert not draining.done()
    it.go.set()
    assert await draining == 0
    assert [answer.data for answer in await asyncio.gather(*asking)] == [b"done"] * 3


async def test_drain_has_a_deadline_and_tells_the_caller(it: Fixture) -> None:
    asking = asyncio.create_task(it.ask("t.slow"))
    await until(lambda: it.started == 1)
    assert await it.service.drain(0.05) == 1
    assert it.finished == 0
    assert (await asking).headers["Nats-Service-Error-Code"] == "500"


@pytest.mark.parametrize(
    ("name", "version"),
    [("llama-3.1", "1.0.0"), ("", "1.0.0"), ("ok", "1.0"), ("ok", "v1.0.0"), ("ok", "01.0.0"), ("ok", "1.0.0-")],
)
async def test_what_would_make_us_invisible_is_refused(new_bus: NewBus, name: str, version: str) -> None:
    bus = await new_bus("worker")
    with pytest.raises(ValueError):
        Service(bus, name, version, "d")


async def test_endpoints_are_literal_subjects(new_bus: NewBus) -> None:
    it = Fixture(await new_bus("worker"), await new_bus("caller"))
    with pytest.raises(ValueError):
        it.service.endpoint("a", "t.*", it._echo)
    with pytest.raises(ValueError):
        it.service.endpoint("a.b", "t.a", it._echo)


async def test_an_error_that_repeats_a_huge_question_is_told_all_the_same(it: Fixture) -> None:
    answer = await it.ask("t.fail", b"huge", timeout=PATIENCE_S)
    assert len(answer.data) < 10_000
    assert json.loads(answer.data)["error"]["message"].startswith("no xxx")
    assert it.service.stats()["endpoints"][2]["num_errors"] == 1


async def test_who_is_refused_because_too_many_run_is_counted(new_bus: NewBus) -> None:
    bus, caller = await new_bus("worker"), await new_bus("caller")
    service, full, go = Service(bus, "headrace-worker", "0.1.0", "x"), list[HeadraceError](), asyncio.Event()

    async def wait(_: Msg) -> Answer:
        await go.wait()
        return b"done"

    service.endpoint("one", "t.one", wait, most=1, on_full=full.append)
    await service.start()
    await bus.flush(PATIENCE_S)
    first = asyncio.create_task(caller.request("t.one", b"", timeout=PATIENCE_S))
    await until(lambda: service._endpoints[0].running)
    assert json.loads((await caller.request("t.one", b"", timeout=PATIENCE_S)).data)["error"]["code"] == "overloaded"
    assert [error.code for error in full] == ["overloaded"]
    go.set()
    assert (await first).data == b"done"
    await service.drain(PATIENCE_S)
