"""`headrace worker`: what only its start finds out."""

from __future__ import annotations

import pytest

from services.cli.worker import _listen
from services.clock import SystemClock
from services.kv.pool import BlockPool
from services.kv.transfer.server import SocketTransferServer
from services.settings import SettingsError, WorkerSettings


async def test_an_address_that_is_not_ours_is_named_by_its_key() -> None:
    server = SocketTransferServer(BlockPool(4), clock=SystemClock())
    with pytest.raises(SettingsError, match=r"worker\.transfer_host: 192\.0\.2\.1"):
        await _listen(server, WorkerSettings(transfer_host="192.0.2.1"))
    await server.close()
