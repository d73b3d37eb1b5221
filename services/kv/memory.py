"""The memory of a KV pool, in a form that another process of this host can be given to read.

Owns: the mapping and its descriptor. Must not know: blocks, readers. Invariant: whoever is passed the descriptor can read the
memory, and can neither write it nor change its size; so no reader spoils it, and no owner makes a reader fault.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import weakref
from dataclasses import dataclass

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: no writable mapping from now on; those that exist stay. The `fcntl` module has no name for it before Python 3.13."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """`view` is writable. `fd` names the same memory, and lives as long as it; None: it is this process's alone."""

    view: memoryview
    fd: int | None = None


def allocate(size: int) -> PoolMemory:
    """`size` zeroed bytes; each page is taken from the system when it is first touched. Raises OSError, ValueError."""
    if size > _physical():
        raise OSError(errno.ENOMEM, "more than this machine has")  # a memfd is accounted page by page: it would only fail later
    if sys.platform == "linux":
        try:
            return _sealed(size)
        except PermissionError:  # a sandbox may forbid memfd or a seal
            pass
    return PoolMemory(memoryview(mmap.mmap(-1, size)))


def _sealed(size: int) -> PoolMemory:
    fd = os.memfd_create("headrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(memory, os.close, fd)
    return PoolMemory(memoryview(memory), fd)


def map_shared(fd: int, size: int) -> memoryview:
    """The memory of another process's `PoolMemory`, `size` bytes, read-only. `fd` may be closed afterwards.

    Raises OSError when the descriptor is no sealed memory of this size: reading it could then end this process.
    """
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size or size == 0:
        raise OSError(errno.EINVAL, "not a sealed KV memory of the size announced")
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
