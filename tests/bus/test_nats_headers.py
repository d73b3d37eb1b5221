"""Headers as bytes: what we write is read again, what others write can do no harm."""

from __future__ import annotations

import re
from random import Random

import pytest

from services.bus.nats_headers import decode_headers, encode_headers

KEY = "Nats-Request-Info"
PIECES = (b"NATS/1.0", b" ", b"\r\n", b"\r", b"\n", b":", b"503", b"\xff\xfe", b"\0", KEY.encode(), b"\t", "²é".encode(), b"x")


@pytest.mark.parametrize("headers", [{"": "v"}, {"a b": "v"}, {"a": "v\r\nPUB x 0"}, {"a:b": "v"}, {"a\n": "v"}])
def test_headers_that_would_break_the_framing_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        encode_headers(headers)


def test_what_is_written_is_read() -> None:
    headers = {"Tier": "paid", "Empty": "", "Text": "grüße: 你好", "Json": '{"a": "b: c"}', "A.b/c": "x"}
    assert decode_headers(encode_headers(headers)) == headers


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (b"NATS/1.0 100 Idle Heartbeat\r\nA: 1\r\n\r\n", {"Status": "100", "Description": "Idle Heartbeat", "A": "1"}),
        (b"NATS/1.0\r\nA:1\r\nB:\t2 \r\nA: 3\r\n\r\n", {"A": "3", "B": "2"}),
        (b"NATS/1.0 \xff\xfe\xfd\r\nA: 1\r\n\r\n", {"A": "1"}),
        (b"NATS/1.0 503 \xff\r\n\r\n", {"Status": "503", "Description": "\ufffd"}),
        (b"NATS/1.0 \xc2\xb2\r\n\r\n", {}),
        (b"NATS/1A: 1\r\n\r\n", {}),
        (b"", {}),
        (b"\r\n", {}),
    ],
)
def test_what_servers_and_strangers_write(block: bytes, headers: dict[str, str]) -> None:
    assert decode_headers(block) == headers


@pytest.mark.parametrize(
    "name", [f"{KEY} ", f" {KEY}", f"\t{KEY}", f"\v{KEY}", f"{KEY}\0", KEY.lower(), f"\ufeff{KEY}", f"X{KEY}"]
)
def test_a_name_is_itself_and_nothing_like_it(name: str) -> None:
    """The server replaces a header whose name is equal to the byte; what is merely like it may be a caller's."""
    assert KEY not in decode_headers(f"NATS/1.0\r\n{name}: forged\r\n\r\n".encode())


def test_every_block_has_a_reading() -> None:
    random = Random(3)
    for _ in range(5_000):
        block = b"".join(random.choices(PIECES, k=random.randrange(12)))
        for name, value in decode_headers(block).items():
            assert re.fullmatch("[!-~]+", name), block
            assert "\r\n" not in value, block
