"""What counts of a deadline: not the time in which this process stood still."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from services.kv.transfer.patience import within
from services.kv.transfer.wire import receive_into
from tests.waiting import PATIENCE_S


async def test_it_ends() -> None:
    with pytest.raises(TimeoutError):
        async with within(0.3):
            await asyncio.sleep(PATIENCE_S)


async def test_nothing_is_left_of_one_that_was_kept() -> None:
    async with within(0.05), within(None):
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)


async def test_whoever_cancels_is_heard() -> None:
    async def waits() -> None:
        async with within(PATIENCE_S):
            await asyncio.sleep(PATIENCE_S)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_peer_is_not_silent_because_we_stood_still() -> None:
    """It stood still with us, or what it said waits in the socket."""
    for waits in (False, True):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            got = bytearray(2)
            receiving = asyncio.create_task(receive_into(ours, memoryview(got), silent_s=0.5))
            await asyncio.sleep(0.01)
            if waits:
                theirs.send(b"a")
            time.sleep(1.2)  # noqa: ASYNC251 - all of this process
            for byte in b"ab"[waits:]:
                await asyncio.sleep(0.05)
                theirs.send(bytes([byte]))
            await receiving
            assert got == b"ab"


async def test_a_peer_that_is_silent_while_we_run_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(TimeoutError):
            await receive_into(ours, memoryview(bytearray(1)), silent_s=0.3)
        theirs.send(b"x")
        got = bytearray(1)
        await receive_into(ours, memoryview(got), silent_s=PATIENCE_S)
        assert got == b"x"
