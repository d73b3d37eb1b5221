"""Which carriers a worker uses. `auto`: the fastest that leads to the owner; every server also streams."""

from __future__ import annotations

from typing import Literal

from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import DEFAULT_LIMITS, TransferLimits
from services.kv.transfer.mapped import MappedReader
from services.kv.transfer.reader import Reader
from services.kv.transfer.stream import StreamReader

TransferKind = Literal["auto", "shm", "tcp"]


def transfer_client(kind: TransferKind, limits: TransferLimits = DEFAULT_LIMITS) -> SocketTransferClient:
    """A client that fetches by `kind` alone, or by the first that works."""
    readers: dict[TransferKind, list[Reader]] = {
        "auto": [MappedReader(), StreamReader()],
        "shm": [MappedReader()],
        "tcp": [StreamReader()],
    }
    return SocketTransferClient(readers[kind], limits)
