"""NVIDIA Dynamo 1.6.1 as an opponent: its frontend with a prefill and a decode mocker, an engine that takes no time.

Started by the Python of an environment that has `ai-dynamo==1.6.1`; processes find each other through files, so that it needs
neither etcd nor NATS. Without TCP_NODELAY its frontend waits up to 40 ms for acknowledgements; `preload`, a library that sets it
on every socket, shows what a fixed one would do.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.stack import cpu_of
from services.cli.up.ports import free_ports

MODEL = "smollm2"
MOCKER = ("--speedup-ratio", "1000000", "--num-gpu-blocks-override", "65536", "--block-size", "64", "--max-num-seqs", "1024")
START_S = 120
STOP_S = 20


@dataclass(frozen=True)
class Dynamo:
    """`pids` by name: frontend, prefill, decode."""

    port: int
    pids: dict[str, int]
    model: str = MODEL

    def cpu_seconds(self) -> dict[str, float]:
        return {name: cpu_of(pid) for name, pid in self.pids.items()}


@contextmanager
def dynamo(python: Path, model: Path, *, preload: Path | None = None) -> Iterator[Dynamo]:
    """`model`: a folder with tokenizer and configuration. Raises RuntimeError when it does not answer in two minutes."""
    with tempfile.TemporaryDirectory() as files:
        environ = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": files,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
            **({"LD_PRELOAD": str(preload)} if preload else {}),
        }
        environ.pop("PYTHONPATH", None)
        port, bootstrap = free_ports(2)
        mocker = ("dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, *MOCKER, "--disaggregation-mode")
        commands = {
            "frontend": ("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"),
            "prefill": (*mocker, "prefill", "--bootstrap-ports", str(bootstrap)),
            "decode": (*mocker, "decode"),
        }
        running = {name: _start(python, command, environ) for name, command in commands.items()}
        try:
            _wait_answer(port, running)
            yield Dynamo(port, {name: process.pid for name, process in running.items()})
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def build_nodelay(folder: Path) -> Path:
    """The library for `preload`, compiled."""
    library = folder / "nodelay.so"
    source = Path(__file__).parent / "nodelay.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def _start(python: Path, command: tuple[str, ...], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(python), "-m", *command], env=environ, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _wait_answer(port: int, running: dict[str, subprocess.Popen[bytes]]) -> None:
    question = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        ended = [name for name, process in running.items() if process.poll() is not None]
        if ended:
            raise RuntimeError(f"Dynamo's {ended[0]} ended at its start")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("Dynamo did not answer in two minutes")
