"""Who asks: the NATS account and the connection that a request came from, as the server says it.

A request that crosses from another account gets the header `Nats-Request-Info` from the server, whatever the caller wrote there,
and a reply subject of the server's own, which leads back. Within our own account nothing of that is so: there the header could be
forged, and its author has no business here. Source: NATS documentation, "Accounts", service imports with `share`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from schemas.errors import PermissionDenied
from services.bus.interface import Msg

HEADER = "Nats-Request-Info"
_CROSSED = "_R_."
"""What the server's own reply subjects begin with."""
_LONGEST = 128
"""What the database takes."""


@dataclass(frozen=True, slots=True)
class Origin:
    """`connection`: (server, number), which an account without `share: true` keeps to itself."""

    account: str
    connection: tuple[str, int] | None


class _Info(msgspec.Struct):
    acc: str
    id: int | None = None
    server: str = ""


def read_origin(msg: Msg) -> Origin:
    """Raises `PermissionDenied` for a request that did not come from another account."""
    told = msg.headers.get(HEADER)
    if told is None or not msg.reply.startswith(_CROSSED):
        raise PermissionDenied("Requests are taken from tenants' accounts only, with a reply subject.")
    try:
        info = msgspec.json.decode(told, type=_Info)
    except msgspec.DecodeError:
        raise PermissionDenied(f"The header {HEADER} cannot be read.") from None
    if not 0 < len(info.acc) <= _LONGEST:
        raise PermissionDenied(f"The header {HEADER} names no account, or one of more than {_LONGEST} characters.")
    return Origin(info.acc, None if info.id is None else (info.server, info.id))
