"""Which carriers a worker uses: one, or the fastest that leads to the owner."""

from __future__ import annotations

import ipaddress
import logging
from typing import Literal

from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import DEFAULT_LIMITS, TransferLimits
from services.kv.transfer.mapped import MappedReader
from services.kv.transfer.nixl_agent import NixlAgent, NixlError, installed
from services.kv.transfer.nixl_reader import NixlReader
from services.kv.transfer.reader import Reader
from services.kv.transfer.server import SocketTransferServer
from services.kv.transfer.stream import StreamReader
from services.kv.transfer.wire import split_address
from services.settings.errors import SettingsError

TransferKind = Literal["auto", "shm", "tcp", "nixl"]

_log = logging.getLogger(__name__)


def transfer_client(
    kind: TransferKind, agent: NixlAgent | None = None, limits: TransferLimits = DEFAULT_LIMITS
) -> SocketTransferClient:
    """A client that fetches by `kind` alone; `auto`: by the first of shared memory, NIXL when there is an agent, TCP."""
    nixl: list[Reader] = [] if agent is None else [NixlReader(agent)]
    readers: dict[TransferKind, list[Reader]] = {
        "auto": [MappedReader(), *nixl, StreamReader()],
        "shm": [MappedReader()],
        "tcp": [StreamReader()],
        "nixl": nixl,
    }
    return SocketTransferClient(readers[kind], limits)


async def open_carriers(server: SocketTransferServer, kind: TransferKind, agent: NixlAgent | None = None) -> None:
    """What a started `server` offers beside TCP, for readers of the same `kind`. Raises NixlError where only NIXL would do.

    With `auto`, NIXL is loaded only where other hosts can come from.
    """
    if kind in ("auto", "shm"):
        await server.share()
    if agent is not None and (kind == "nixl" or (kind == "auto" and not _is_loopback(server.address))):
        try:
            await server.lend(agent)
        except NixlError as error:
            if kind == "nixl":
                raise
            _log.warning("KV transfer: no NIXL: %s", error)


def nixl_agent(kind: TransferKind) -> NixlAgent | None:
    """An agent where NIXL is wanted and installed; it loads when it is used. Raises SettingsError: wanted, not installed."""
    if kind == "nixl" and not installed():
        raise SettingsError("worker.transfer: nixl is the extra 'nixl' (in a checkout: pip install -e '.[nixl]')")
    return NixlAgent() if kind == "nixl" or (kind == "auto" and installed()) else None


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
