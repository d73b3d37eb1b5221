"""Strange requests over NATS: where they want their answers, what they hold, how many they are; and an edge that ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.errors import MessageTooLarge
from schemas.state import Capabilities
from schemas.subjects import Subjects
from tests.edge.fakes import MODEL, Script, says
from tests.edge.nats_rig import CHAT, Call, caller, edge, stranger
from tests.infra.accounts import AccountServer
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until

SUBJECT = CHAT.encode()
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountServer]:
    with AccountServer(tmp_path_factory.mktemp("nats"), tenants=("acme", "zenith")) as running:
        yield running


REPLIES = [
    b"hr.admin.edge.e1-0000000000000.drain",
    b"hr.submit.tiny",
    b"hr.ctl.d1-0000000000000",
    b"hr.dead.d1-0000000000000",
    b"$JS.API.STREAM.DELETE.HR_JOBS",
    b"$KV.HR_QUARANTINE.all",
    b"$SYS.REQ.SERVER.PING",
    b"_INBOX.edge.x.1",
    b"_INBOX.zenith.1",
    CHAT.encode(),
    Subjects().chat_cancel("0" * 32).encode(),
    b"*",
    b">",
    b"a..b",
    b"." * 64,
    b"\xff\xfe",
    b"r" * 3_000,
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_stays_in_its_account_wherever_it_is_sent(server: AccountServer, stream: bool) -> None:
    """A reply subject is its caller's own account's, whatever it is called: no other tenant hears an answer, and none of ours."""
    body = BODY[:-1] + (b', "stream": true}' if stream else b"}")
    async with (
        edge(server, most=64) as api,
        stranger(server, "acme") as liar,
        caller(server, "plain") as ours,
        caller(server, "zenith") as zenith,
    ):
        api.jobs.default = says("se", "cret")
        heard = [await listening(client) for client in (ours, zenith)]
        for reply in REPLIES:
            liar.publish(SUBJECT, b"", body, reply)
        await until(lambda: len(api.jobs.handles) == len(REPLIES))
        await until(lambda: api.traffic.running == 0)
        assert (await (await Call(zenith).send()).one())["choices"]
        own = {msg.subject for msg in heard[1]} - {CHAT}
        assert all(subject.startswith("_INBOX.zenith.") for subject in own), own
        assert "_INBOX.zenith.1" not in own
        said = [msg.subject for msg in heard[0] if b"cret" in msg.data]
        assert all(subject.startswith("_R_.") or subject in _EXPORTED for subject in said), said


_EXPORTED = {CHAT, Subjects().chat_cancel("0" * 32)}
"""What a tenant may publish on anyway."""


async def listening(client: Client) -> list[Msg]:
    """All that this client can hear from now on."""
    heard: list[Msg] = []

    async def keep(msg: Msg) -> None:
        heard.append(msg)

    await client.subscribe(">", cb=keep)
    await client.flush()
    return heard


NAMES = [b"", b"*", b">", b"a.b", b"tiny.paid.0.x", b" ", b"\\u0000", b"\\r\\nPUB"]
BODIES = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"\xff",
    b"\xef\xbb\xbf" + BODY,
    b"[" * 1_000_000,
    b'{"a":' * 200_000,
    b'{"a":1e999}',
    b'{"model":"\\ud800"}',
    b'{"model":' + b"9" * 10_000 + b"}",
    b" " * 5_000_000,
    BODY[:-1] + b',"user":"' + b"u" * 5_000_000 + b'"}',
    BODY.replace(b'"hi"', b'"' + b"w " * 1_500_000 + b'"'),
    BODY.replace(b'"tiny"', b'"' + b"m" * 3_000_000 + b'"'),
    *(BODY.replace(b'"tiny"', b'"%b"' % name) for name in NAMES),
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_a_body_that_is_none_is_one_refusal(server: AccountServer, body: bytes) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        answer = await client.request(CHAT, body, timeout=2 * PATIENCE_S)
        assert answer.headers
        assert answer.headers["Nats-Service-Error-Code"] in ("400", "404", "413")
        assert json.loads(answer.data)["error"]["message"]
        assert not api.jobs.handles
        await until(lambda: sum(api.counted().values()) == 1)


async def test_who_waits_for_no_answer_costs_nothing_and_counts(server: AccountServer) -> None:
    async with edge(server, most=200) as api, stranger(server, "acme") as liar:
        for _ in range(100):
            liar.publish(SUBJECT, b"", BODY)
        await until(lambda: api.counted() == {("unknown", "permission_denied", "403"): 100})
        assert not api.jobs.handles


async def test_nobody_ends_an_answer_whose_subject_he_cannot_know(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client, stranger(server, "zenith") as liar:
        api.jobs.default = Script([byte_ids("a")], finish=None, pause_s=0.01, forever=True)
        call = await Call(client).send(stream=True)
        await until(lambda: call.got)
        subject = call.headers["Headrace-Cancel"].encode()
        stem = subject[: -len("0" * 32)]
        guesses = [stem + each for each in (b"*", b">", b"\xff" * 8, b"0" * 32, b"x" * 3_000)]
        for guess in (*guesses, stem[:-1], subject + b".x"):
            liar.publish(guess, b"", b"", b"mine")
        await liar.flushed()
        seen = len(call.got)
        await until(lambda: len(call.got) > seen + 20)
        assert not api.jobs.handles[0].cancelled.is_set()


async def test_a_flood_at_the_limit_is_answered_to_the_last(server: AccountServer) -> None:
    """Whoever is refused is told so, and counts; what ran before goes on."""
    async with edge(server, most=2) as api, caller(server, "acme") as client, caller(server, "zenith") as other:
        api.jobs.default = Script([byte_ids("a")], finish=None)
        for _ in range(2):
            await Call(other).send()
        await until(lambda: len(api.jobs.handles) == 2)
        told = await asyncio.gather(*(client.request(CHAT, BODY, timeout=4 * PATIENCE_S) for _ in range(2_000)))
        assert {answer.headers["Nats-Service-Error-Code"] for answer in told if answer.headers} == {"503"}
        assert len(api.jobs.handles) == api.traffic.running == 2
        assert api.counted() == {("unknown", "overloaded", "503"): 2_000}


async def test_a_chunk_too_large_for_a_message_ends_the_stream_with_the_reason(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        api.jobs.default = Script([byte_ids("x"), byte_ids("y" * 9_000)])
        api.jobs.capabilities = Capabilities(logprobs=True)
        call = await Call(client).send(stream=True, logprobs=True, top_logprobs=20)
        await until(lambda: call.got and not call.got[-1].data, timeout=4 * PATIENCE_S)
        chunks = await call.stream()
        assert chunks[-1]["error"]["code"] == MessageTooLarge.code
        assert any(chunk["choices"][0]["delta"].get("content") == "x" for chunk in chunks[:-1])


@pytest.mark.parametrize("how", ["whole", "stream", "stream that begins"])
async def test_who_is_cut_off_by_the_end_of_the_edge_is_told(server: AccountServer, how: str) -> None:
    """One error, and of a stream that began the empty message after it, which is the last."""
    begins = how == "stream that begins"
    async with caller(server, "acme") as client:
        async with edge(server, drain_s=0.0) as api:
            api.jobs.default = Script([byte_ids("a")], finish=None, admit=asyncio.Event() if how == "stream" else None)
            call = await Call(client).send(stream=how != "whole")
            await until(lambda: api.jobs.handles)
            if begins:
                await until(lambda: call.got)
        await until(lambda: any(b'"error"' in msg.data for msg in call.got))
        if begins:
            await until(lambda: not call.got[-1].data)
        await client.flush()
        errors = [msg for msg in call.got if b'"error"' in msg.data]
        assert len(errors) == 1
        assert call.got[-2 if begins else -1] is errors[0]
        assert api.jobs.handles[0].cancelled.is_set()
