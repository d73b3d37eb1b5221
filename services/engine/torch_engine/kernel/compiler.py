"""C sources → a shared library in a cache folder, compiled for this machine when it is first needed.

Knows nothing of what the library does. Invariant: a library's file name tells its sources, compiler, flags and CPU, and a file
under that name is whole. Of several processes that need it one builds, and the others wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
# No contraction: which products fuse with which sums is written in the source, not left to the compiler.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
LINK = ("-shared", "-fPIC", "-pthread", "-lm")
NATIVE = ("-march=native",)
_LIMIT_S = 120.0
_CANDIDATES = ("cc", "gcc", "clang")


class KernelUnavailable(Exception):
    """The kernel cannot be built or loaded here; the text says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str


def find_compiler(candidates: Sequence[str] = _CANDIDATES) -> Compiler:
    """The C compiler of `$CC` or the first candidate on the path. Raises `KernelUnavailable`."""
    named = os.environ.get("CC")
    for name in [named] if named else candidates:
        if (path := shutil.which(name)) is not None:
            return Compiler(path, _run([path, "--version"]).splitlines()[0])
    raise KernelUnavailable(f"no C compiler ({named or ', '.join(candidates)}) on the path")


def build(folder: Path, compiler: Compiler, *, target: Sequence[str] = NATIVE, source: Path = SOURCE) -> Path:
    """The library in `folder`, compiled unless it is there. Takes some seconds. Raises `KernelUnavailable`."""
    flags = (*FLAGS, *target)
    library = folder / f"{_digest(source, compiler, flags)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as workplace:
            if library.is_file():
                return library  # somebody else's, while we waited
            made = Path(workplace) / library.name
            _run([compiler.path, *flags, str(source / "kernel.c"), "-o", str(made), *LINK])
            made.replace(library)
    except OSError as error:
        raise KernelUnavailable(f"cannot write {folder}: {error.strerror}") from None
    return library


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time; each for as long as a compiler may take, and the system frees the lock of one that died.

    A file system without locks lets all of them in: then each builds for itself.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF):
            os.close(fd)
            raise
    try:
        yield
    finally:
        os.close(fd)


def _digest(source: Path, compiler: Compiler, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((compiler, flags, LINK, _cpu())).encode())
    for file in sorted(source.glob("*.[ch]")):
        digest.update(repr((file.name, file.read_bytes())).encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What `-march=native` looks at: a home folder may be shared by machines of several kinds."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            lines = [
                line for line in info.read().split("\n\n")[0].splitlines() if line.startswith(("model name", "flags", "Features"))
            ]
    except OSError:
        lines = [platform.processor()]
    return "\n".join([platform.machine(), *lines])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        raise KernelUnavailable(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout
