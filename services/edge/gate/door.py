"""From a request's headers and peer to the caller: what stands before every endpoint that computes or tells.

Invariants: a key that was shown is checked, wherever the caller sits and whatever scheme it comes with; without one only this
machine's own loopback is let in, and only where the settings allow it; neither a proxy on this machine nor another site's web
page in a browser on it makes the world loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from schemas.errors import InvalidApiKey
from schemas.job import Tier
from services.edge.gate.keyring import Keyring
from services.edge.gate.keys import PREFIX
from services.edge.gate.records import Caller
from services.edge.jobs.explained import Explain
from services.edge.tenant import DEFAULT, Tenant

_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via")
_LONGEST = 256


class Door:
    """`whose`: the tenant of a name. `open_on_loopback`: whether callers of this machine need no key."""

    def __init__(self, keyring: Keyring, whose: Callable[[str], Tenant], *, open_on_loopback: bool) -> None:
        self._keyring = keyring
        self._whose = whose
        self._open = open_on_loopback

    async def enter(self, headers: Mapping[bytes, bytes], peer: str | None, *, explain: bool = False) -> Caller:
        """`peer`: the address of the other side. `explain`: it asks why its request goes where it goes; who shows a key may be
        one of many tenants, and is told less. Raises `InvalidApiKey`, `StoreUnavailable`."""
        shown = _shown(headers)
        if self._open and not shown.startswith(PREFIX) and _is_loopback(peer) and _is_local(headers):
            # SDKs insist on some key; one that is not ours is as good as none
            return Caller(self._whose(DEFAULT), Tier.PAID, explain=Explain.ALL if explain else Explain.NOTHING)
        if not shown:
            raise InvalidApiKey("An API key is needed: send it as 'Authorization: Bearer …'.")
        if len(shown) > _LONGEST:
            raise InvalidApiKey("The API key is not valid.")
        record = await self._keyring.check(shown)
        return Caller(
            self._whose(record.tenant),
            record.tier,
            record.id,
            record.models,
            record.limits,
            record.tenant_limits,
            Explain.WORKERS if explain else Explain.NOTHING,
        )


def _shown(headers: Mapping[bytes, bytes]) -> str:
    """The key, "" = none. One of ours is a key without its scheme, too: whoever sent it meant it to count."""
    value = headers.get(b"authorization", b"").decode("latin-1").strip()
    scheme, _, rest = value.partition(" ")
    key = rest.strip()
    if scheme.lower() == "bearer" or key.startswith(PREFIX):
        return key
    return value if value.startswith(PREFIX) else ""


def _is_local(headers: Mapping[bytes, bytes]) -> bool:
    """Whether nothing says that somebody else asks through a program of this machine."""
    if any(name in headers for name in _FORWARDED):
        return False
    origin = headers.get(b"origin")
    return origin is None or _is_own(origin.decode("latin-1"))


def _is_own(origin: str) -> bool:
    """Whether a web page of `origin` is this machine's."""
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or _is_loopback(host)


@lru_cache(maxsize=1024)
def _is_loopback(peer: str | None) -> bool:
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
