"""NIXL behind one thread: its agent is not thread-safe, has calls that last as long as a copy, and can only be polled.

Owns: the agent, the memory registered with it, the transfers under way. Must not know: tickets, blocks. Invariant: a transfer
that has begun is followed to its end, whoever still waits for it, and its arena is used again only when it succeeded. NIXL would
take one back at once, but bytes that are under way may arrive later; so none is taken back, and none writes where KV blocks lie.

Source: the Python API of https://github.com/ai-dynamo/nixl, package `nixl-cu12` 1.5; it runs without a GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import logging
import mmap
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

MODULE = "nixl_cu12"
_FIRST_POLL_S, _LAST_POLL_S = 0.0002, 0.05
_FEWEST_BYTES = 1 << 20
_MOST_BYTES = 1 << 29

T = TypeVar("T")


class NixlError(OSError):
    """NIXL cannot do this, or not any more."""


def installed() -> bool:
    return importlib.util.find_spec(MODULE) is not None


def _load() -> Any:
    nixl = importlib.import_module(MODULE)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl.nixl_agent(f"headrace-{secrets.token_hex(8)}", nixl.nixl_agent_config(backends=["UCX"]))


class Arena:
    """Memory that a transfer writes, registered with the agent for as long as that lives."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))
        self.address = _address(self.view)


class NixlAgent:
    """One for a process. `load` makes NIXL's own, when the first call needs it: half a second, and 100 MB."""

    def __init__(self, load: Callable[[], Any] = _load) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl")
        self._agent: Any = None
        self._lent: list[memoryview] = []
        self._idle: list[Arena] = []
        self._arena_bytes = 0
        self._running: set[asyncio.Task[Arena]] = set()

    @property
    def is_exhausted(self) -> bool:
        """So much memory belongs to transfers that are under way, or that failed, that another way is to be preferred."""
        return self._arena_bytes - sum(arena.view.nbytes for arena in self._idle) >= _MOST_BYTES

    async def lend(self, memory: memoryview) -> tuple[bytes, int]:
        """Let others read `memory`: this agent's metadata, and the address of the memory. Raises NixlError."""
        address = _address(memory)
        self._lent.append(memory)

        def register() -> bytes:
            self._loaded().register_memory([(address, memory.nbytes, 0, "")], "DRAM")
            return bytes(self._loaded().get_agent_metadata())

        return await self._call(register), address

    async def add(self, metadata: bytes) -> str:
        """The name of the agent that this metadata describes; known for good, as transfers may be under way. Raises NixlError."""
        name = await self._call(lambda: self._loaded().add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    async def read(self, agent: str, pieces: Sequence[tuple[int, int]]) -> Arena:
        """An arena that begins with a copy of these (address, bytes) pieces of `agent`'s memory; the caller recycles it.

        Raises NixlError. A caller that is cancelled is released at once; the transfer is not.
        """
        transfer = asyncio.create_task(self._transfer(agent, pieces))
        self._running.add(transfer)
        transfer.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(transfer)
        except asyncio.CancelledError:
            transfer.add_done_callback(self._reclaim)
            raise

    def recycle(self, arena: Arena) -> None:
        self._idle.append(arena)

    def close(self) -> None:
        """Follow no transfer any more. What they may still write stays mapped as long as this agent."""
        for transfer in self._running:
            transfer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _transfer(self, agent: str, pieces: Sequence[tuple[int, int]]) -> Arena:
        arena = await self._arena(sum(size for _, size in pieces))
        state, handle = await self._call(lambda: self._begin(agent, pieces, arena))
        pause = _FIRST_POLL_S
        while state == "PROC":
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
            state = await self._call(lambda: self._state(handle))
        await self._call(lambda: self._loaded().release_xfer_handle(handle))
        if state != "DONE":
            raise NixlError("the transfer failed")
        return arena

    async def _arena(self, size: int) -> Arena:
        for position, arena in enumerate(self._idle):
            if arena.view.nbytes >= size:
                return self._idle.pop(position)
        size = max(_FEWEST_BYTES, 1 << (size - 1).bit_length())
        self._arena_bytes += size
        arena = Arena(size)
        self._lent.append(arena.view)
        await self._call(lambda: self._loaded().register_memory([(arena.address, size, 0, "")], "DRAM"))
        return arena

    def _reclaim(self, transfer: asyncio.Task[Arena]) -> None:
        if not transfer.cancelled() and transfer.exception() is None:
            self.recycle(transfer.result())

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except Exception as error:  # whatever a foreign library raises; it names its classes in a private module
            raise NixlError(f"{type(error).__name__}: {error}") from error

    # in the thread

    def _loaded(self) -> Any:
        if self._agent is None:
            self._agent = self._load()
        return self._agent

    def _begin(self, agent: str, pieces: Sequence[tuple[int, int]], arena: Arena) -> tuple[str, Any]:
        nixl, address, here = self._loaded(), arena.address, []
        for _, size in pieces:
            here.append((address, size, 0))
            address += size
        there = [(start, size, 0) for start, size in pieces]
        handle = nixl.initialize_xfer("READ", nixl.get_xfer_descs(here, "DRAM"), nixl.get_xfer_descs(there, "DRAM"), agent)
        return str(nixl.transfer(handle)), handle

    def _state(self, handle: Any) -> str:
        return str(self._loaded().check_xfer_state(handle))


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
