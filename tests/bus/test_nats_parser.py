"""What a server sends reaches the handlers once and in order, however it is cut; nats-py's own parser is the reference."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from services.bus.nats_parser import MessageParser

STREAM = (
    b"PING\r\n"
    b"MSG a.b 1 3\r\nabc\r\n"
    b"MSG a.b 2 reply.to 0\r\n\r\n"
    b"MSG a.b 1 23\r\nMSG x 9 5\r\nPING\r\n\r\n    \r\n"
    b"HMSG a 3 to 12 15\r\nNATS/1.0\r\n\r\nxyz\r\n"
    b"PONG\r\n"
    b"-ERR 'Permissions Violation'\r\n"
    b"MSG a.b 1 2\r\n\r\n\r\n"
    b"+OK\r\n"
    b"MSG  last\t4  r  1\r\nz\r\n"
)
"""Payloads that look like the protocol are among them."""


class Heard:
    """A client, as a parser sees it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self._pings_outstanding = 0

    def deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes) -> None:
        self.heard.append((sid, bytes(subject), bytes(reply), bytes(data), None))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.heard.append((sid, bytes(subject), bytes(reply), data, headers))

    async def _process_err(self, text: str) -> None:
        self.heard.append(text)

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_pong(self) -> None:
        self.heard.append("pong")


async def theirs(pieces: list[bytes]) -> list[Any]:
    client = Heard()
    parser = Parser(client)
    for piece in pieces:
        await parser.parse(piece)
    return client.heard


async def ours(pieces: list[bytes]) -> list[Any]:
    client = Heard()
    parser = MessageParser(client, client.deliver)
    for piece in pieces:
        await parser.parse(piece)
    return client.heard


async def test_it_hears_what_nats_py_hears_wherever_the_stream_is_cut() -> None:
    whole = await theirs([STREAM])
    assert len(whole) == 9
    for cut in range(len(STREAM) + 1):
        assert await ours([STREAM[:cut], STREAM[cut:]]) == whole, cut
    random = Random(1)
    for _ in range(200):
        cuts = sorted(random.randrange(len(STREAM)) for _ in range(random.randrange(8)))
        pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
        assert await ours(pieces) == whole, cuts


async def test_who_sends_anything_has_answered_our_pings() -> None:
    client = Heard()
    client._pings_outstanding = 2
    await MessageParser(client, client.deliver).parse(b"MSG a 1 2\r\nx")
    assert client._pings_outstanding == 0


@pytest.mark.parametrize("line", [b"MSG a\r\n", b"MSG a 1 x\r\n", b"MSG a x 1\r\n", b"MSG a 1 b c 2\r\nab\r\n", b"MSG \r\n"])
async def test_what_is_no_message_is_an_error_as_for_nats_py(line: bytes) -> None:
    """An error of another kind would end the reading of this connection for good."""
    with pytest.raises(ProtocolError):
        await ours([line])


async def test_what_fails_in_an_unforeseen_way_is_a_protocol_error_too() -> None:
    """So the connection is made anew at once, instead of being deaf until its pings are missed."""

    class Failing(Heard):
        async def _process_msg(self, *about: Any) -> None:
            raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "as nats-py does for a strange status")

    parser = MessageParser(Failing(), Heard().deliver)
    with pytest.raises(ProtocolError):
        await parser.parse(b"HMSG a 3 to 12 15\r\nNATS/1.0\r\n\r\nxyz\r\n")
