"""Ports for servers that a test starts.

They lie below the range from which the kernel takes ports of outgoing connections and of sockets that ask for any: between the
choice and the start of the server nobody is given one by chance.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_240
_HIGHEST = 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones."""
    below = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _HIGHEST
    found: list[int] = []
    for port in random.sample(range(_LOWEST, max(below, _LOWEST + 1_000)), 1_000):
        if _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
