"""Tenants over NATS who mean harm: none is taken for another, none keeps an edge from answering the others."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from services.edge.nats_api.origin import HEADER
from services.edge.tenant import tenant
from tests.edge.fakes import MODEL, says
from tests.edge.nats_rig import CHAT, SECRET, Call, caller, edge, stranger
from tests.infra.accounts import AccountServer
from tests.waiting import until

SUBJECT = CHAT.encode()
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
FORGED = b'{"acc":"zenith"}'
CUT = b"Last: " + b"  "
"""The last line of a block that does not end as it should: the server's own header is written into it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountServer]:
    with AccountServer(tmp_path_factory.mktemp("nats"), tenants=("acme", "zenith")) as running:
        yield running


def blocks(*lines: bytes) -> list[bytes]:
    """Header blocks of these lines: one that ends as it should, one that is cut off."""
    whole = b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines)
    return [whole + b"\r\n", whole + CUT, whole]


SPELLINGS = [HEADER.encode() + b":", HEADER.encode() + b" :", b" " + HEADER.encode() + b":", HEADER.lower().encode() + b":"]
SPELLINGS += [
    b"\t" + HEADER.encode() + b":",
    b"\v" + HEADER.encode() + b"\f:",
    HEADER.upper().encode() + b":",
    b"\r" + HEADER.encode() + b":",
]
LIES = [block for name in SPELLINGS for n in (1, 2, 3) for block in blocks(*[name + FORGED] * n)]
LIES += [block for name in SPELLINGS for block in blocks(b"A: b", b"", name + FORGED)]


async def test_no_header_makes_a_tenant_another_one(server: AccountServer) -> None:
    """Each forged block is either refused or answered as what the server says the caller is."""
    async with edge(server, most=10_000) as api, stranger(server, "acme") as liar:
        api.jobs.default = says("x")
        liar.listen(b"mine.*")
        for number, head in enumerate(LIES):
            liar.publish(SUBJECT, head, BODY, b"mine.%d" % number)
            liar.publish(SUBJECT, head, b'{"acc":"zenith",' + BODY[1:], b"mine.x")
        await until(lambda: sum(api.counted().values()) == 2 * len(LIES))
        assert api.jobs.handles
        assert {handle.draft.salt for handle in api.jobs.handles} == {tenant(SECRET, "nats:acme").salt}


HEADS = [
    b"NATS/1.0 \xff\xfe\xfd\r\n\r\n",
    b"NATS/1.0 503 \xff\xfe\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 \xc2\xb2\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n",
    b"NATS/1.0\r\n: \r\n\r\n",
    b"NATS/1.0\r\n\0:\0\r\n\r\n",
    b"NATS/1.0\r\nStatus: 503\r\n\r\n",
    b"NATS/1.0\r\nHeadrace-Hint: " + b"h" * 1_000_000 + b"\r\n\r\n",
    b"NATS/1.0\r\n" + b"".join(b"H%d: v\r\n" % n for n in range(50_000)) + b"\r\n",
    b"NATS/1.0",
    b"N",
    b"\r\n",
    b"\r\n\r\n",
    b"\0" * 64,
    b" " * 64,
]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
async def test_no_header_makes_an_edge_deaf(server: AccountServer, head: bytes) -> None:
    async with edge(server), stranger(server, "acme") as liar, caller(server, "zenith") as client:
        liar.publish(SUBJECT, head, BODY, b"mine")
        await liar.flushed()
        call = await (await Call(client).send()).one()
        assert call["choices"]
