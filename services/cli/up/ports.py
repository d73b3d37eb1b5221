"""Ports for servers that are started a while after their ports were chosen: `headrace up`, benches, tests.

They lie below the range from which the kernel takes ports of outgoing connections and of sockets that ask for any: between the
choice and the start of the server nobody is given one by chance. Several are always asked for at once, so that they differ.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Container
from pathlib import Path
from random import SystemRandom

LAST_PORT = 65535
_LOOPBACK = "127.0.0.1"
_LOWEST = 10_240
_HIGHEST = 32_768
_LEAST = 1_000
"""Ports to choose from, also where the kernel's range begins lower."""
_TRIES = 1_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = _LOOPBACK) -> int:
    """One on which a server could listen now. Raises as `free_ports`."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = _LOOPBACK, avoid: Container[int] = ()) -> range:
    """So many in a row, none of which is in `avoid`. Raises OSError when there are none, or none on `host`."""
    below = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _HIGHEST
    random, firsts = SystemRandom(), range(_LOWEST, max(below, _LOWEST + _LEAST) - count + 1)
    for _ in range(_TRIES if firsts else 0):
        first = random.choice(firsts)
        row = range(first, first + count)
        if all(port not in avoid and port_is_free(host, port) for port in row):
            return row
    raise OSError(f"no {count} free ports in a row on {host}")


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody listens there now. A port in TIME_WAIT counts as free, as it does for servers; one beyond the last is none.

    Raises OSError where we could not listen all the same: the address is not this machine's, the port is for root only.
    """
    if port > LAST_PORT:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        return True
