"""infra/nats/ against a real server: what each role may do, from the subjects table, and what it must not."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.subjects import COUNTERS_STREAM, JOBS_STREAM, QUARANTINE_BUCKET, WORKERS_BUCKET, Subjects
from services.cli.up.credentials import USERS, load_or_create
from services.cli.up.nats import NatsPlan, violations, write_config, write_operator_context
from tests.infra.accounts import AccountServer
from tests.waiting import PATIENCE_S

S = Subjects()
MODEL = "smollm2-135m-instruct"
P, D, B, R, E = (f"{name}1-0k3v9x00abcde" for name in ("p", "d", "b", "r", "e"))
JOB = "0" * 32

WORKER_REGISTRY = (
    f"$JS.API.STREAM.CREATE.KV_{WORKERS_BUCKET}",
    f"$JS.API.STREAM.UPDATE.KV_{WORKERS_BUCKET}",
    f"$KV.{WORKERS_BUCKET}.{P}",
)
PREFILL_ASKS = (S.decode_lease(D), S.decode_handoff(D), S.decode_offer(D))
DECODE_HEARS = (S.decode_lease("*"), S.decode_submit("*"), S.decode_handoff("*"), S.decode_offer("*"))
WORKER_HEARS = (
    S.control(D),
    S.attach(JOB),
    S.edge_state_any(),
    S.dead_any(),
    "$SRV.PING",
    "$SRV.INFO.decode",
    "hr.kvevents.*.snapshot",
)

MAY_PUBLISH: dict[str, tuple[str, ...]] = {
    "edge": (
        S.submit(MODEL),
        S.router_submit(R),
        S.job(MODEL, "standard", 3, JOB),
        S.cancel(),
        S.control(D),
        S.attach(JOB),
        S.edge_state(E),
        "_R_.abc.def",
        S.counter("requests", "key-abc", "1"),
        *(f"$JS.API.STREAM.{verb}.{COUNTERS_STREAM}" for verb in ("CREATE", "UPDATE")),
        *(f"$JS.API.STREAM.{verb}.KV_{QUARANTINE_BUCKET}" for verb in ("CREATE", "UPDATE", "INFO", "MSG.GET")),
        f"$KV.{QUARANTINE_BUCKET}.{JOB}",
    ),
    "router": (
        S.prefill_submit(P),
        S.decode_lease(D),
        S.decode_submit(D),
        S.reply(E),
        S.queue(MODEL),
        S.dead(P),
        f"hr.kvevents.{P}.snapshot",
        f"_INBOX.edge.{E}.1",
        f"$JS.API.STREAM.CREATE.{JOBS_STREAM}",
        f"$JS.API.STREAM.UPDATE.{JOBS_STREAM}",
        f"$JS.API.STREAM.INFO.{JOBS_STREAM}",
        f"$JS.API.STREAM.MSG.GET.{JOBS_STREAM}",
        f"$JS.API.STREAM.MSG.DELETE.{JOBS_STREAM}",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{JOBS_STREAM}.standard-3",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS_STREAM}.standard-3",
        f"$JS.ACK.{JOBS_STREAM}.standard-3.1.1.1.1700000000000000000.0",
    ),
    "prefill": (
        S.reply(E),
        f"_INBOX.edge.{E}.1",
        *PREFILL_ASKS,
        S.worker_state("prefill", MODEL, P),
        f"hr.kvevents.{P}",
        f"_INBOX.router.{R}.1",
        *WORKER_REGISTRY,
    ),
    "decode": (
        S.reply(E),
        f"_INBOX.edge.{E}.1",
        S.worker_state("decode", MODEL, D),
        f"hr.kvevents.{D}",
        f"_INBOX.router.{R}.1",
        f"_INBOX.prefill.{P}.1",
        *WORKER_REGISTRY,
    ),
    "both": (
        S.reply(E),
        f"_INBOX.edge.{E}.1",
        *PREFILL_ASKS,
        S.worker_state("both", MODEL, B),
        f"hr.kvevents.{B}",
        f"_INBOX.router.{R}.1",
        f"_INBOX.prefill.{P}.1",
        *WORKER_REGISTRY,
    ),
    "supervisor": (S.dead(P),),
    "operator": ("$SRV.PING", "$SRV.STATS.router", S.admin("router", R, "drain"), "$JS.API.STREAM.LIST"),
}

MAY_HEAR: dict[str, tuple[str, ...]] = {
    "edge": (
        f"_INBOX.edge.{E}.*",
        S.reply(E),
        S.queue_any(),
        S.dead_any(),
        "$SRV.PING",
        S.admin("edge", E, "*"),
        S.chat(),
        S.chat_cancel_any(),
        "$SYS.ACCOUNT.*.DISCONNECT",
    ),
    "router": (
        f"_INBOX.router.{R}.*",
        S.submit_any(),
        S.router_submit(R),
        S.queue_any(),
        S.cancel(),
        S.worker_state_any(),
        S.edge_state_any(),
        "hr.kvevents.*",
        S.dead_any(),
        "$SRV.PING",
        "$SYS.ACCOUNT.HEADRACE.DISCONNECT",
        "$SYS.ACCOUNT.HEADRACE.CONNECT",
    ),
    "prefill": (f"_INBOX.prefill.{P}.*", S.prefill_submit("*"), *WORKER_HEARS),
    "decode": (f"_INBOX.decode.{D}.*", *DECODE_HEARS, *WORKER_HEARS),
    "both": (f"_INBOX.both.{B}.*", S.prefill_submit("*"), *DECODE_HEARS, *WORKER_HEARS),
    "supervisor": ("_INBOX.supervisor.u1.*",),
    "operator": ("_INBOX.operator.1", "hr.>", "$JS.EVENT.>"),
}

MUST_NOT_PUBLISH: dict[str, tuple[str, ...]] = {
    "edge": (
        S.prefill_submit(P),
        S.decode_lease(D),
        S.decode_handoff(D),
        S.worker_state("decode", MODEL, D),
        S.queue(MODEL),
        S.reply(E),
        S.dead(D),
        f"_INBOX.router.{R}.1",
        f"$KV.{WORKERS_BUCKET}.{D}",
        f"$JS.API.STREAM.DELETE.{JOBS_STREAM}",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS_STREAM}.standard-3",
    ),
    "router": (
        S.submit(MODEL),
        S.job(MODEL, "standard", 3, JOB),
        S.decode_handoff(D),
        S.control(D),
        S.attach(JOB),
        S.worker_state("prefill", MODEL, P),
        S.edge_state(E),
        f"$JS.API.STREAM.DELETE.{JOBS_STREAM}",
    ),
    "prefill": (
        S.job(MODEL, "standard", 3, JOB),
        S.submit(MODEL),
        S.prefill_submit(P),
        S.decode_submit(D),
        S.worker_state("decode", MODEL, D),
        S.queue(MODEL),
        S.dead(D),
        S.cancel(),
        f"$JS.API.STREAM.PURGE.{JOBS_STREAM}",
    ),
    "decode": (
        S.job(MODEL, "standard", 3, JOB),
        S.submit(MODEL),
        S.prefill_submit(P),
        S.decode_handoff(D),
        S.control(P),
        S.worker_state("prefill", MODEL, P),
        S.dead(P),
    ),
    "both": (S.job(MODEL, "standard", 3, JOB), S.prefill_submit(P), S.worker_state("decode", MODEL, B), S.dead(P)),
    "supervisor": (S.submit(MODEL), S.control(D), S.cancel(), S.reply(E)),
    "operator": (S.submit(MODEL), S.prefill_submit(P), S.dead(P), f"$JS.API.STREAM.DELETE.{JOBS_STREAM}"),
}

MUST_NOT_HEAR: dict[str, tuple[str, ...]] = {
    "edge": (
        "hr.>",
        "_INBOX.>",
        f"_INBOX.router.{R}.*",
        S.jobs(),
        S.worker_state_any(),
        S.control(D),
        S.attach(JOB),
        S.submit_any(),
    ),
    "router": (
        "hr.>",
        "_INBOX.>",
        f"_INBOX.edge.{E}.*",
        S.reply(E),
        S.control(D),
        S.attach(JOB),
        S.jobs(),
        S.prefill_submit("*"),
    ),
    "prefill": (f"_INBOX.decode.{D}.*", f"_INBOX.edge.{E}.*", S.reply(E), S.submit_any(), S.decode_handoff("*"), S.jobs()),
    "decode": (f"_INBOX.prefill.{P}.*", S.reply(E), S.submit_any(), S.prefill_submit("*"), S.jobs()),
    "both": (f"_INBOX.decode.{D}.*", f"_INBOX.router.{R}.*", S.reply(E), S.submit_any()),
    "supervisor": ("hr.>", S.dead_any(), S.reply(E), f"_INBOX.edge.{E}.*"),
    "operator": ("_INBOX.>", f"_INBOX.edge.{E}.*"),
}

ROLES = sorted(MAY_PUBLISH)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountServer]:
    with AccountServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


class Person:
    """A plain NATS client that logged in as one role."""

    def __init__(self) -> None:
        self.client = Client()
        self._errors: asyncio.Queue[str] = asyncio.Queue()
        self._asked = 0

    async def note(self, error: Exception) -> None:
        self._errors.put_nowait(str(error))

    async def refusals(self) -> list[str]:
        """What the server refused since the last call. Refusals come in order: all are here once a last, certain one is."""
        self._asked += 1
        last = f"never.allowed.{self._asked}"
        await self.client.publish(last, b"")
        errors: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while not errors or last not in errors[-1]:
                errors.append(await self._errors.get())
        return errors[:-1]

    async def publish(self, subject: str) -> list[str]:
        await self.client.publish(subject, b"")
        return await self.refusals()

    async def subscribe(self, subject: str) -> list[str]:
        subscription = await self.client.subscribe(subject)
        refused = await self.refusals()
        await subscription.unsubscribe()
        return refused


@asynccontextmanager
async def login(server: AccountServer, user: str) -> AsyncIterator[Person]:
    person = Person()
    await person.client.connect(
        server.plan.url,
        user=user,
        password=server.passwords[user],
        error_cb=person.note,
        allow_reconnect=False,
        connect_timeout=PATIENCE_S,
        inbox_prefix=f"_INBOX.{user}",
    )
    try:
        yield person
    finally:
        await person.client.close()


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_do_what_the_table_says(server: AccountServer, role: str) -> None:
    async with login(server, role) as person:
        for subject in MAY_PUBLISH[role]:
            assert await person.publish(subject) == [], f"{role} may publish {subject}"
        for subject in MAY_HEAR[role]:
            assert await person.subscribe(subject) == [], f"{role} may hear {subject}"


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_do_nothing_else(server: AccountServer, role: str) -> None:
    async with login(server, role) as person:
        for subject in (*MUST_NOT_PUBLISH[role], "hr.unheard.of", "other.subject"):
            assert await person.publish(subject), f"{role} must not publish {subject}"
        for subject in (*MUST_NOT_HEAR[role], ">"):
            assert await person.subscribe(subject), f"{role} must not hear {subject}"


async def test_a_role_hears_only_its_own_half_of_a_wildcard(server: AccountServer) -> None:
    """A reply that one role sends to another's inbox is read by that role alone."""
    async with login(server, "router") as router, login(server, "edge") as edge:
        heard: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        async def answer(msg: Msg) -> None:
            heard.set_result(msg)

        await edge.client.subscribe(f"_INBOX.edge.{E}.*", cb=answer)
        await edge.client.flush(PATIENCE_S)
        assert await router.publish(f"_INBOX.edge.{E}.1") == []
        async with asyncio.timeout(PATIENCE_S):
            assert (await heard).subject == f"_INBOX.edge.{E}.1"


async def test_routers_hear_at_once_that_a_connection_ended(server: AccountServer) -> None:
    async with login(server, "router") as router:
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def note(msg: Msg) -> None:
            if b'"decode"' in msg.data and not heard.done():
                heard.set_result(msg.data)

        await router.client.subscribe("$SYS.ACCOUNT.HEADRACE.DISCONNECT", cb=note)
        await router.client.flush(PATIENCE_S)
        async with login(server, "decode"):
            pass
        async with asyncio.timeout(PATIENCE_S):
            assert await heard


async def test_the_server_is_as_we_configured_it(server: AccountServer) -> None:
    async with login(server, "edge") as person:
        assert person.client.max_payload == 8 * 2**20


async def test_nobody_enters_without_a_password(server: AccountServer) -> None:
    with pytest.raises(Exception, match="Authorization"):
        await nats.connect(server.plan.url, allow_reconnect=False, max_reconnect_attempts=0, connect_timeout=PATIENCE_S)


async def test_violations_are_found_in_the_log(server: AccountServer) -> None:
    async with login(server, "supervisor") as person:
        await person.publish("hr.unheard.of.here")
        await person.subscribe("hr.unheard.of.there")
    found = violations(server.log)
    assert any("hr.unheard.of.here" in line for line in found)
    assert any("hr.unheard.of.there" in line for line in found)
    assert not violations("[1] [INF] Server is ready\n")


def test_passwords_are_made_once_and_private(tmp_path: Path) -> None:
    first = load_or_create(tmp_path / "nats")
    assert set(first) == set(USERS)
    assert len(set(first.values())) == len(USERS)
    assert load_or_create(tmp_path / "nats") == first
    for file in (tmp_path / "nats").iterdir():
        assert os.stat(file).st_mode & 0o077 == 0


async def test_the_operators_context_logs_in(server: AccountServer) -> None:
    context = json.loads(write_operator_context(server.plan, server.passwords).read_text())
    client = await nats.connect(
        context["url"], user=context["user"], password=context["password"], inbox_prefix=context["inbox_prefix"]
    )
    assert json.loads((await client.request("$JS.API.STREAM.NAMES", timeout=PATIENCE_S)).data)["total"] == 0
    await client.close()


def test_rendered_files_are_private(tmp_path: Path) -> None:
    plan = NatsPlan(tmp_path / "nats", 4222, 8222)
    config = write_config(plan, load_or_create(plan.folder))
    assert "{{" not in config.read_text() + (plan.folder / "permissions.conf").read_text()
    for file in plan.folder.iterdir():
        assert os.stat(file).st_mode & 0o077 == 0
