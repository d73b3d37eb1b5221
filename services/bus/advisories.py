"""What a NATS server itself says of the connections of one account: who connected, who is gone.

The system account's subjects, imported by our account (infra/nats/permissions.conf). A connection's name is its process id.
Source: nats-server's events io.nats.server.advisory.v1.client_connect and .client_disconnect.
"""

from __future__ import annotations

import msgspec

from schemas.codec import decode_json
from schemas.identity import is_process


class _Client(msgspec.Struct, frozen=True):
    name: str = ""


class _Advisory(msgspec.Struct, frozen=True):
    client: _Client


def connected(account: str) -> str:
    """Where a server says that somebody logged in to `account`."""
    return f"$SYS.ACCOUNT.{account}.CONNECT"


def disconnected(account: str) -> str:
    """Where a server says that a connection of `account` ended, whatever ended it."""
    return f"$SYS.ACCOUNT.{account}.DISCONNECT"


def process_of(data: bytes) -> str:
    """The process that an advisory is about, "" when its connection had another name. Raises `UnreadableMessage`."""
    name = decode_json(data, _Advisory).client.name
    return name if is_process(name) else ""
