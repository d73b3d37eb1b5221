"""A NATS cluster of three loses a server, the one that leads JetStream, its quorum, its data: interactive jobs go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import nats
import pytest

from schemas.subjects import JOBS_STREAM
from services.cli.up.plan import Counts
from tests.chaos.fleet import Fleet, fleet
from tests.chaos.streams import (
    Answer,
    Progress,
    Question,
    ask,
    ask_all,
    assert_same,
    clients,
    longest_pause,
    questions,
    ready,
    undisturbed,
    until,
)
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = questions(24, 100)
FEW = questions(12, 100)
"""No more than one decode worker takes."""
MANY = questions(60, 40)
"""More than two decode workers take at once: the rest waits in JetStream."""
LASTING = questions(24, 420)
LATE = questions(60, 40, first=200)
"""As many others."""
LONG = questions(60, 420)
"""More at once, for longer than a queue that cannot be reached is waited for."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for all: each test leaves it whole, as an operator would."""
    counts = Counts(prefill=2, decode=2, router=2)
    paced = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03", "HEADRACE_WORKER__MAX_BATCH": "16"}
    with fleet(tmp_path_factory.mktemp("fleet"), counts, **paced) as made:
        yield made
        for name in made.running:
            assert made.running[name].poll() is None, f"{name} ended: {made.said}"


async def queue_info(made: Fleet) -> dict[str, Any]:
    """Of the work queue's stream, once somebody leads it."""
    async with made.operator() as op, asyncio.timeout(30.0):
        while True:
            with suppress(nats.errors.Error):
                answer = await op.client.request(f"$JS.API.STREAM.INFO.{JOBS_STREAM}", b"", timeout=1.0)
                info: dict[str, Any] = json.loads(answer.data)
                if info.get("cluster", {}).get("leader"):
                    return info
            await asyncio.sleep(0.1)


async def leader(made: Fleet) -> NatsServer:
    """The server that leads the work queue's stream."""
    return made.cluster.nodes[(await queue_info(made))["cluster"]["leader"]]


async def healthy(made: Fleet) -> None:
    """Until each server has its streams and consumers again: what an operator, or Kubernetes, waits for before the next one."""
    async with made.client("system") as client, asyncio.timeout(60.0):
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        while True:
            await client.publish("$SYS.REQ.SERVER.PING.HEALTHZ", b"", reply=inbox)
            well: set[str] = set()
            with suppress(nats.errors.TimeoutError):
                while len(well) < len(made.cluster.nodes):
                    answer = json.loads((await answers.next_msg(timeout=1.0)).data)
                    if answer["data"]["status"] == "ok":
                        well.add(answer["server"]["name"])
                return


async def whole(made: Fleet) -> None:
    """Until the cluster serves as before: jobs go through the queue again, and nothing of the past is left anywhere."""
    made.cluster.start()
    await ready(made.url)
    async with asyncio.timeout(90.0):
        while any(answer.status != 200 for answer in await ask_all(made.url, questions(40, 5))):
            await ready(made.url)
    async with made.operator() as op:
        await op.assert_clean()


async def test_a_server(cluster: Fleet) -> None:
    await ready(cluster.url, 60.0)
    expected = await undisturbed(cluster.url, STREAMS)
    leads = await leader(cluster)
    victim = next(node for node in cluster.cluster.nodes.values() if node is not leads)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        victim.kill()

    answers = await ask_all(cluster.url, STREAMS, fault)
    assert_same(answers, expected)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s")
    await whole(cluster)


async def test_the_leader_of_jetstream(cluster: Fleet) -> None:
    """Also jobs that wait in the queue come through: it is kept three times. Those that come before another one leads do too."""
    await ready(cluster.url)
    expected, expected_late = await undisturbed(cluster.url, MANY), await undisturbed(cluster.url, LATE)
    victim = await leader(cluster)
    late: list[Answer] = []

    async def fault(progress: Progress) -> None:
        await progress.everybody_has_begun()
        await until(lambda: sum(pieces > 3 for pieces in progress.pieces) >= 20, 30.0)
        victim.kill()
        late.extend(await ask_all(cluster.url, LATE))

    answers = await ask_all(cluster.url, MANY, fault)
    assert_same(answers, expected)
    assert_same(late, expected_late)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s")
    await whole(cluster)


async def test_its_quorum(cluster: Fleet) -> None:
    """JetStream is gone: what needs no queue goes on, old and new; what would have to wait is told to come again."""
    await ready(cluster.url)
    expected = await undisturbed(cluster.url, STREAMS)
    first, second, _ = cluster.cluster.nodes.values()

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        first.kill()
        second.kill()

    answers = await ask_all(cluster.url, STREAMS, fault)
    assert_same(answers, expected)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s")
    assert_same(await ask_all(cluster.url, STREAMS), expected)
    crowd = await ask_all(cluster.url, LONG)
    refused = [answer for answer in crowd if answer.status != 200]
    assert refused
    assert all(answer.status == 503 and answer.retry_after for answer in refused), refused[:2]
    assert len(crowd) - len(refused) >= len(STREAMS), "as many as went on before"
    await whole(cluster)


async def test_its_data(cluster: Fleet) -> None:
    await ready(cluster.url)
    expected = await undisturbed(cluster.url, STREAMS)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        cluster.cluster.kill()
        for node in cluster.cluster.nodes.values():
            node.lose_data()
        cluster.cluster.start()

    assert_same(await ask_all(cluster.url, STREAMS, fault), expected)
    await whole(cluster)
    assert (await queue_info(cluster))["config"]["num_replicas"] == 3


@pytest.mark.parametrize("which", ["n1", "n2", "n3"])
async def test_a_server_that_hangs(cluster: Fleet, which: str) -> None:
    """faults.md, NATS: pause 30 s. Its connections stay open; who has one soon looks for another server all the same."""
    await whole(cluster)
    expected, expected_late = await undisturbed(cluster.url, LASTING), await undisturbed(cluster.url, FEW)
    server, late = cluster.cluster.nodes[which], list[Answer]()

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        server.pause()
        try:
            await progress.everybody_has(max(progress.pieces) + 20, 15.0)
            late.extend(await ask_all(cluster.url, FEW))
        finally:
            server.resume()

    answers = await ask_all(cluster.url, LASTING, fault)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s")
    assert_same(answers, expected)
    assert_same(late, expected_late)
    await whole(cluster)


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_every_server_in_turn_under_a_steady_load(cluster: Fleet, end: str) -> None:
    """No request is sent away: also those that begin in such a moment, and those that must wait for a place."""
    await whole(cluster)
    expected = {question.number: answer for question, answer in zip(MANY, await undisturbed(cluster.url, MANY), strict=True)}
    answers: list[tuple[int, Answer]] = []
    over = asyncio.Event()

    async def again_and_again(question: Question) -> None:
        async with clients(cluster.url) as client:
            while not over.is_set():
                answers.append((question.number, await ask(client, question)))

    async with asyncio.TaskGroup() as group:
        for question in MANY:
            group.create_task(again_and_again(question))
        for node in cluster.cluster.nodes.values():
            await asyncio.to_thread(getattr(node, end))
            before = len(answers)
            await until(lambda: len(answers) >= before + len(MANY), 60.0)  # noqa: B023 - awaited before it changes
            await asyncio.to_thread(node.start)
            await healthy(cluster)
        over.set()
    wrong = [answer for number, answer in answers if answer.said != expected[number].said]
    print(f"\nof {len(answers)} answers {len(wrong)} failed")
    assert not wrong, f"{len(wrong)} of {len(answers)}: {wrong[:2]}"
    await whole(cluster)


async def test_a_worker_dies_and_only_the_server_sees_it(cluster: Fleet) -> None:
    """The last test: nobody starts it again. Without the server's word its streams would wait for 3 s of silence."""
    await ready(cluster.url)
    expected = await undisturbed(cluster.url, FEW)
    async with cluster.operator() as op:
        causes: list[bytes] = []

        async def heard(msg: object) -> None:
            causes.append(msg.data)  # type: ignore[attr-defined]

        await op.client.subscribe("hr.dead.*", cb=heard)
        await op.client.flush()

        async def fault(progress: Progress) -> None:
            await progress.everybody_has(3)
            cluster.kill("d1")

        answers = await ask_all(cluster.url, FEW, fault)
        assert_same(answers, expected)
        print(f"\nlongest pause: {longest_pause(answers):.3f} s")
        await until(lambda: bool(causes), PATIENCE_S)
        assert all(b"disconnected" in cause for cause in causes)
