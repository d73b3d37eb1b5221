"""`serve` whole: NATS, HTTP, a router and a worker played by the test, and the way down."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from schemas.codec import decode, encode
from schemas.job import Job
from schemas.placement import Accepted
from schemas.reply import FinishReason, Frame, Frames
from schemas.state import Capabilities, ModelCard, QueueReport
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.nats_bus import connect
from services.edge.http_server import HttpServer, free_port
from services.edge.service import serve
from services.edge.store.database import database_url
from services.edge.tenant import server_secret, tenant
from services.settings.edge import EdgeSettings
from services.settings.nats import NatsSettings
from services.settings.settings import Settings
from tests.edge.cluster import DECODE, EDGE, ROUTER
from tests.edge.migrated import migrated
from tests.edge.sse import read_stream
from tests.nats_fixture import NatsServer
from tests.ports import free_ports
from tests.text.tiny import byte_ids, write_tiny_model_folder
from tests.waiting import PATIENCE_S

MODEL = "tiny"


async def test_from_start_to_drain(nats_server: NatsServer, tmp_path: Path) -> None:
    write_tiny_model_folder(tmp_path / "models" / MODEL)
    port = free_ports(1)[0]
    settings = Settings(
        home=tmp_path,
        model=MODEL,
        nats=NatsSettings(url=nats_server.url),
        edge=EdgeSettings(port=port, drain_timeout_s=PATIENCE_S),
    )
    async with migrated(database_url("", tmp_path)):
        pass  # as the command does before it serves
    stop = asyncio.Event()
    edge = asyncio.create_task(serve(settings, EDGE, stop, lambda: None))
    router = await connect(nats_server.url, ROUTER, "router", timeout=PATIENCE_S)
    subjects = Subjects()
    jobs: list[Job] = []

    def accept(msg: Msg) -> None:
        jobs.append(decode(msg.data, Job))
        router.publish(msg.reply, encode(Accepted(run=1, prefill="", decode=DECODE, router=ROUTER)))

    def say(index: int, text: str, finish: FinishReason | None) -> None:
        job = jobs[-1]  # where an answer was late, its second attempt
        frame = Frame(run=1, job=job.job, attempt=job.attempt, hop=2, index=index, tokens=tuple(byte_ids(text)), finish=finish)
        router.publish(job.reply_to, encode(Frames(process=DECODE, frames=(frame,))), reply=subjects.control(DECODE))

    async def report() -> None:
        """As routers do: one report may come before the edge listens, and is soon old."""
        card = ModelCard(model=MODEL, capabilities=Capabilities(seed=True), context_length=512)
        while True:
            router.publish(subjects.queue(MODEL), encode(QueueReport(router=ROUTER, model=MODEL, card=card)))
            await asyncio.sleep(0.1)

    for subject in (subjects.submit(MODEL), subjects.router_submit(ROUTER)):
        await router.subscribe(subject, accept)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        await _status(client, "/ready", 503)
        reporting = asyncio.create_task(report())
        await _status(client, "/ready", 200)
        admin = await router.request(subjects.admin("edge", EDGE, "status"), b"", timeout=PATIENCE_S)
        seen = json.loads(admin.data)
        assert (seen["models"], seen["routers"], seen["draining"]) == ([MODEL], [ROUTER], False)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        drained = await router.request(subjects.admin("edge", EDGE, "drain"), b"{}", timeout=PATIENCE_S)
        assert json.loads(drained.data)["draining"]
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        undrained = await router.request(subjects.admin("edge", EDGE, "undrain"), b"{}", timeout=PATIENCE_S)
        assert not json.loads(undrained.data)["draining"]
        await _status(client, "/ready", 200)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            say(0, "hel", None)
            stop.set()
            await _status(client, "/ready", 503)
            say(3, "lo", FinishReason.STOP)
            assert read_stream(await response.aread()).content == "hello"
    async with asyncio.timeout(PATIENCE_S):
        await edge
    assert free_port("127.0.0.1", port) == port
    reporting.cancel()
    await router.close()


async def test_a_busy_port_ends_it_before_anything_else(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match="cannot listen"):
        await serve(Settings(home=tmp_path, edge=EdgeSettings(port=port)), EDGE, asyncio.Event(), lambda: None)
    server.close()


def test_the_secret_is_made_once_and_is_ours_alone(tmp_path: Path) -> None:
    secret = server_secret(tmp_path / "home")
    assert server_secret(tmp_path / "home") == secret
    path = tmp_path / "home" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    path.write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        server_secret(tmp_path / "home")


def test_tenants_differ() -> None:
    names = [tenant(b"k" * 32, f"t{n}") for n in range(100)]
    assert len({each.salt for each in names}) == 100
    assert {each.lane for each in names} == set(range(16))
    assert tenant(b"k" * 32) != tenant(b"j" * 32)


async def _status(client: httpx.AsyncClient, path: str, wanted: int) -> None:
    """Waits until `path` answers `wanted`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if (await client.get(path)).status_code == wanted:
                    return
            except httpx.ConnectError:
                pass
            await asyncio.sleep(0.01)


def test_the_edge_never_loads_torch() -> None:
    code = "import sys, services.edge.service; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_an_edge_that_cannot_start_leaves_nothing_running_beside(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: HttpServer) -> None:
        raise OSError("no such address")

    write_tiny_model_folder(tmp_path / "models" / MODEL)
    monkeypatch.setattr(HttpServer, "start", fail)
    edge = EdgeSettings(port=free_ports(1)[0])
    settings = Settings(home=tmp_path, model=MODEL, nats=NatsSettings(url=nats_server.url), edge=edge)
    with pytest.raises(OSError, match="no such address"):
        await serve(settings, EDGE, asyncio.Event(), lambda: None)
    running = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
    assert not running & {"QuarantineBucket.run", "Keyring.run", "Budgets.run", "record_loop_lag", "Background.run"}
