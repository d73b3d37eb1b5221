"""Is it there yet? One cheap question to NATS or to the edge, never an exception for a no."""

from __future__ import annotations

import asyncio

POLL_S = 0.03
_ANSWER_S = 2.0
_MAX_BODY = 64 * 1024


async def nats_answers(host: str, port: int) -> bool:
    """Whether a NATS server greets us there."""
    return (await _talk(host, port, b"", 5)).startswith(b"INFO ")


async def http_status(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET; (0, "") when nothing there speaks HTTP."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    answer = await _talk(host, port, request, _MAX_BODY)
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return 0, ""
    return int(words[1]), body.decode("utf-8", "replace").strip()


async def _talk(host: str, port: int, request: bytes, enough: int) -> bytes:
    """What the other side says, up to `enough` bytes; nothing when it cannot be reached or takes too long."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                answer = b""
                while len(answer) < enough and (data := await reader.read(enough)):
                    answer += data
                return answer
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return b""
