"""A whole Headrace for a bench: `headrace up` in a folder of its own, and the CPU time of each of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.up.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stack:
    """A running stack. `ports`: of its edges. `pids` by name: nats, r1, p1, d1, e1 …"""

    home: Path
    ports: range
    model: str
    pids: dict[str, int]

    @property
    def port(self) -> int:
        """Of the first edge."""
        return self.ports[0]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each process so far."""
        return {name: cpu_of(pid) for name, pid in self.pids.items()}


@contextmanager
def stack(home: Path, *arguments: str, edges: int = 1, settings: dict[str, str] | None = None) -> Iterator[Stack]:
    """`headrace up ARGUMENTS` until the block ends. Raises RuntimeError when it is not ready within 5 minutes."""
    ports = free_ports(edges)
    environ = {**os.environ, "HEADRACE_HOME": str(home), **(settings or {})}
    command = [sys.executable, "-m", "services.cli.main", "up", "--edge", str(edges), "--port", str(ports[0]), *arguments]
    up = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        model = _wait_ready(ports, up)
        yield Stack(home, ports, model, _children(up.pid))
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.wait(60)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()


def build_load(folder: Path) -> Path:
    """The load generator, compiled."""
    program = folder / "load"
    subprocess.run(["cc", "-O2", "-o", str(program), str(ROOT / "bench" / "load.c")], check=True)
    return program


def run_load(program: Path, port: int, bodies: Path, *, streams: int, requests: int, offset: int = 0) -> dict[str, Any]:
    """One closed-loop run; what the generator printed. Raises as `load_result`."""
    return load_result(start_load(program, port, bodies, "-c", str(streams), "-n", str(requests), "-o", str(offset)))


def start_load(program: Path, port: int, bodies: Path, *options: str) -> subprocess.Popen[str]:
    """The load generator at work; `load_result` waits for it."""
    command = [str(program), "-p", str(port), "-b", str(bodies), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def load_result(running: subprocess.Popen[str]) -> dict[str, Any]:
    """What the generator printed. Raises RuntimeError, with what it said, when a request failed."""
    out, said = running.communicate(timeout=600)
    if running.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, running.args))}: {said or out}")  # type: ignore[arg-type]
    result: dict[str, Any] = json.loads(out)
    return result


def _wait_ready(ports: range, up: subprocess.Popen[str]) -> str:
    """The model's name, once every edge serves it."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if up.poll() is not None:
            raise RuntimeError(f"headrace up ended with {up.returncode}: {up.stdout.read() if up.stdout else ''}")
        try:
            for port in ports:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                    pass
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/v1/models", timeout=1) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("headrace up was not ready within 5 minutes")


def _children(parent: int) -> dict[str, int]:
    """Processes started by `parent`, directly or not, by their --name; the NATS server as `nats`, the supervisor as `up`."""
    found = {"up": parent}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    for pid in parents:
        ancestor = pid
        while ancestor not in (0, parent):
            ancestor = parents.get(ancestor, 0)
        if ancestor == parent and pid != parent:
            argv = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
            name = argv[argv.index("--name") + 1] if "--name" in argv else Path(argv[0]).name
            found["nats" if "nats-server" in name else name] = pid
    return found


def spent_each(before: dict[str, float], after: dict[str, float], count: int) -> dict[str, float]:
    """CPU microseconds a unit of `count`, by process."""
    return {name: 1e6 * (after[name] - before[name]) / count for name in before}


def cpu_of(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK
