"""Pool memory: what the owner may do, and what a reader may not."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import sys
from collections.abc import Callable

import pytest

from services.kv import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def test_a_reader_sees_what_the_owner_writes() -> None:
    own = memory.allocate(100_000)
    assert own.fd is not None
    assert own.view.nbytes == 100_000
    seen = memory.map_shared(own.fd, 100_000)
    own.view[99_990:] = b"0123456789"
    assert bytes(seen[99_990:]) == b"0123456789"
    assert not any(seen[:99_990])


def test_a_reader_can_neither_write_nor_resize() -> None:
    own = memory.allocate(8192)
    assert own.fd is not None
    assert memory.map_shared(own.fd, 8192).readonly
    spoil: list[Callable[[int], object]] = [
        lambda fd: mmap.mmap(fd, 8192),
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, 4096),
        lambda fd: os.ftruncate(fd, 16384),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ]
    for attempt in spoil:
        with pytest.raises(PermissionError):
            attempt(own.fd)


def test_memory_that_its_owner_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(OSError, match="not a sealed"):
        memory.map_shared(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory.map_shared(fd, 8192)
    os.close(fd)


@pytest.mark.parametrize("size", [4096, 8193, 1 << 40, 0])
def test_memory_of_another_size_is_not_mapped(size: int) -> None:
    own = memory.allocate(8192)
    assert own.fd is not None
    with pytest.raises(OSError, match="not a sealed"):
        memory.map_shared(own.fd, size)


def test_no_file_is_mapped_for_memory() -> None:
    with open(__file__, "rb") as file, pytest.raises(OSError):
        memory.map_shared(file.fileno(), os.fstat(file.fileno()).st_size)


def test_the_descriptor_ends_with_the_memory() -> None:
    own = memory.allocate(4096)
    fd, part = own.fd, own.view[10:20]
    assert fd is not None
    inode = os.fstat(fd).st_ino

    def is_open() -> bool:
        """Its number may be given out anew at once, by whatever else this process does."""
        try:
            return os.fstat(fd).st_ino == inode
        except OSError:
            return False

    del own
    gc.collect()
    assert is_open()
    del part
    gc.collect()
    assert not is_open()


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(OSError, match="more than this machine has"):
        memory.allocate(1 << 60)


def test_where_memfd_is_forbidden_the_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden)
    own = memory.allocate(4096)
    own.view[0] = 1
    assert own.fd is None
