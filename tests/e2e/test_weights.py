"""Processes that start with an empty home and find their model in a bucket (moto's S3), or do not and say why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx
import pytest

from schemas.identity import process_id
from services.bus.dialect import Dialect
from services.bus.nats_bus import connect
from services.clock import SystemClock
from tests.engine.torch_engine.tiny import make
from tests.models.stores import write_model
from tests.nats_fixture import NatsServer
from tests.ports import free_ports
from tests.s3_fixture import S3, SLOW_DOWN, environment, wire_to
from tests.text.tiny import CONFIG, write_tiny_model_folder
from tests.waiting import PATIENCE_S, until

START_S = 90.0


class Hosts:
    """Services as processes, each with a home of its own, as on machines of their own."""

    def __init__(self, folder: Path, nats: NatsServer, bucket: str, s3: str) -> None:
        self.folder = folder
        self.processes = ExitStack()
        self._settings = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "AWS_"))},
            **environment(s3),
            "HEADRACE_NATS__URL": nats.url,
            "HEADRACE_NATS__PREFIX": f"t{folder.name[-1]}{abs(hash(folder)) % 10**6}",
            "HEADRACE_MODEL": "tiny",
            "HEADRACE_STORE__URL": f"s3://{bucket}/models",
        }

    @property
    def prefix(self) -> str:
        return self._settings["HEADRACE_NATS__PREFIX"]

    def start(self, name: str, *arguments: str, **settings: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Its process id and the process; what it says goes to `said(name)`."""
        own = process_id(name, SystemClock().wall(), SystemRandom())
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli.main", *arguments, "--id", own],
                env={**self._settings, **settings, "HEADRACE_HOME": str(self.home(name))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.callback(process.wait, 10)
        self.processes.callback(process.kill)
        return own, process

    def home(self, name: str) -> Path:
        return self.folder / f"home-{name}"

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def bucket(s3: S3) -> str:
    return s3.make_bucket()


@pytest.fixture
def hosts(tmp_path: Path, nats_server: NatsServer, s3: S3, bucket: str) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, nats_server, bucket, s3.url)
    with hosts.processes:
        yield hosts


def push(s3: S3, bucket: str, folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "services.cli.main", "models", "push", str(folder)],
        env={**os.environ, **s3.environment, "HEADRACE_STORE__URL": f"s3://{bucket}/models"},
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=True,
    )


async def status(nats: NatsServer, hosts: Hosts, role: str, process: str) -> Any:
    """What its `status` verb answers; None when nobody does."""
    bus = await connect(nats.url, "operator-0000000000000", "operator", timeout=PATIENCE_S, dialect=Dialect())
    try:
        answer = await bus.request(f"{hosts.prefix}.admin.{role}.{process}.status", b"{}", timeout=PATIENCE_S)
        return json.loads(answer.data)
    finally:
        await bus.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_worker_and_an_edge_with_empty_homes_serve(
    s3: S3, bucket: str, hosts: Hosts, nats_server: NatsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    write_tiny_model_folder(folder)
    make(folder, vocab_size=CONFIG["vocab_size"], shard="20KB")  # its config is the one that fits the weights
    push(s3, bucket, folder)
    worker, _ = hosts.start("w1", "worker", "--role", "both")
    hosts.start("r1", "router")
    port, admin_port = map(str, free_ports(2))
    hosts.start("e1", "edge", HEADRACE_EDGE__PORT=port, HEADRACE_EDGE__ADMIN_PORT=admin_port)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        async def ready() -> bool:
            try:
                return (await client.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await until_true(ready, hosts)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        metrics = await client.get(f"http://127.0.0.1:{admin_port}/metrics")
        assert "headrace_model_fetch_seconds" in metrics.text
    state = (await status(nats_server, hosts, "both", worker))["state"]
    assert state["model"] == "tiny"
    assert list(hosts.home("w1").glob("pulled/tiny/*/*.safetensors"))
    assert not list(hosts.home("e1").glob("**/*.safetensors"))


async def until_true(check: Any, hosts: Hosts) -> None:
    deadline = asyncio.get_running_loop().time() + START_S
    while not await check():
        assert asyncio.get_running_loop().time() < deadline, "".join(hosts.said(name) for name in ("w1", "r1", "e1"))
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_worker_whose_shard_is_damaged_ends_with_the_reason(
    s3: S3, bucket: str, hosts: Hosts, tmp_path: Path, damage: str
) -> None:
    source = write_model(tmp_path / "tiny")
    push(s3, bucket, source.folder)
    shard = source.safetensors[1]
    key, objects = s3.key(bucket, shard.name), s3.objects(bucket)
    if damage == "missing":
        objects.delete(key)
        reason = f"lacks tiny/{key.split('/')[2]}/{shard.name}, which the manifest names"
    else:
        objects.put(key, bytes(shard.stat().st_size))
        reason = f"{shard.name} is corrupt"
    _, process = hosts.start("w1", "worker", "--role", "prefill")
    assert process.wait(START_S) == 1
    (line,) = (line for line in hosts.said("w1").splitlines() if " ERROR " in line)
    assert reason in line


async def test_a_worker_that_waits_for_the_store_says_so_and_stops_when_told_to(
    s3: S3, bucket: str, tmp_path: Path, nats_server: NatsServer
) -> None:
    async with wire_to(s3) as wire:
        wire.answer = SLOW_DOWN
        hosts = Hosts(tmp_path, nats_server, bucket, wire.url)
        with hosts.processes:
            own, process = hosts.start("w1", "worker", "--role", "decode")
            await until(lambda: "asking again" in hosts.said("w1"), START_S)
            answer = await status(nats_server, hosts, "decode", own)
            assert answer["loading"]["model"] == "tiny"
            assert "503 SlowDown; asking again" in answer["loading"]["trouble"]
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0


def test_up_says_at_once_why_there_is_no_model(hosts: Hosts, s3: S3, bucket: str) -> None:
    environ = {**os.environ, **environment(s3.url), "HEADRACE_STORE__URL": f"s3://{bucket}/models"}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "up", "--port", "0", "--model", "tiny"],
        env={**environ, "HEADRACE_HOME": str(hosts.home("up"))},
        capture_output=True,
        text=True,
        timeout=110,  # it starts nothing, but may wait for a core
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"headrace: there is no model 'tiny' in s3://{bucket}/models")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_command_is_aborted_at_its_end_by_the_stores_threads(hosts: Hosts, s3: S3, bucket: str) -> None:
    """One in four was, when so many ran at once: Python's finalization ends foreign threads that want its lock."""
    environ = {**os.environ, **environment(s3.url), "HEADRACE_STORE__URL": f"s3://{bucket}/models"}
    argv = [sys.executable, "-m", "services.cli.main", "up", "--port", "0", "--model", "tiny"]
    running = [
        subprocess.Popen(argv, env={**environ, "HEADRACE_HOME": str(hosts.home(f"up{number}"))}, stderr=subprocess.PIPE)
        for number in range(16)
    ]
    ended = [(process.communicate(timeout=500)[1], process.returncode) for process in running]
    assert [code for _, code in ended] == [1] * len(running)
    assert all(said.splitlines()[-1].startswith(b"headrace: there is no model 'tiny'") for said, _ in ended)
