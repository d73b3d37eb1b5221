"""`headrace up` as a person starts it: wait for its line, talk to it, stop it, and look whether anything is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli.up.nats import violations
from services.cli.up.ports import port_is_free
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"^Headrace is ready: (http://127\.0\.0\.1:(\d+)) \(models? (.+)\)$", re.MULTILINE)
_ADMIN = re.compile(r"^Metrics and probes: (http://127\.0\.0\.1:\d+)/metrics", re.MULTILINE)
_NATS_PORT = re.compile(r'^listen: "127\.0\.0\.1:(\d+)"', re.MULTILINE)
STOP_S = 60.0


@dataclass(slots=True)
class Up:
    """A started `headrace up`. `out` and `err` are files it writes to."""

    process: subprocess.Popen[bytes]
    home: Path
    out: Path
    err: Path

    def wait_ready(self, limit: float) -> None:
        """Until its line is there. Raises AssertionError with what it said when it ends, or takes too long."""
        deadline = time.monotonic() + limit
        while not _READY.search(self.out.read_text()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.said}"
            assert time.monotonic() < deadline, f"not ready in {limit} s: {self.said}"
            time.sleep(0.05)

    @property
    def said(self) -> str:
        """The end of all it printed."""
        return self.output[-4000:]

    @property
    def output(self) -> str:
        """All it printed."""
        return self.out.read_text() + self.err.read_text()

    @property
    def url(self) -> str:
        return self._ready[1]

    @property
    def admin_url(self) -> str:
        """Where the first edge answers /metrics, /health and /ready."""
        found = _ADMIN.search(self.out.read_text())
        assert found, self.said
        return found[1]

    @property
    def port(self) -> int:
        return int(self._ready[2])

    @property
    def model(self) -> str:
        return self._ready[3]

    @property
    def nats_port(self) -> int:
        found = _NATS_PORT.search((self.home / "nats" / "nats-server.conf").read_text())
        assert found
        return int(found[1])

    @property
    def violations(self) -> list[str]:
        """What a role tried that the permissions do not allow; the server's log says so."""
        return violations((self.home / "logs" / "nats.log").read_text())

    def chat(self, *arguments: str, limit: float = 120.0) -> str:
        """What `headrace chat` prints. Raises AssertionError when it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "services.cli.main", "chat", *arguments],
            cwd=ROOT,
            env={**os.environ, "HEADRACE_URL": self.url},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C, as a terminal sends it: to the whole foreground group. The exit code."""
        os.killpg(self.process.pid, number)
        return self.process.wait(STOP_S)

    def processes(self) -> list[int]:
        """Every living process that works in this home."""
        return [pid for pid in _pids() if _environ(pid).get("HEADRACE_HOME") == str(self.home) and pid != os.getpid()]

    def assert_nothing_is_left(self) -> None:
        """No process, and neither port. A dying process gives up its memory, where we look, before its sockets."""
        deadline = time.monotonic() + PATIENCE_S
        while left := [*self.processes(), *(port for port in (self.port, self.nats_port) if not port_is_free("127.0.0.1", port))]:
            assert time.monotonic() < deadline, f"left (process or port): {left}; {self.said}"
            time.sleep(0.01)

    @property
    def _ready(self) -> re.Match[str]:
        found = _READY.search(self.out.read_text())
        assert found, self.said
        return found


@contextmanager
def started(
    argv: Sequence[str], home: Path, folder: Path, *, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> Iterator[Up]:
    """`argv` as a foreground job of its own, killed with all it started at the end."""
    out, err = folder / "up.out", folder / "up.err"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**clean, **(env or {}), "HEADRACE_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    up = Up(process, home, out, err)
    try:
        yield up
    finally:
        for pid in up.processes():
            _kill(pid)
        process.wait(PATIENCE_S)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _environ(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty for one that is gone or a zombie."""
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(item.decode("utf-8", "replace").split("=", 1) for item in items if b"=" in item)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
