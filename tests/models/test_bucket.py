"""The library against a real S3 server (moto) and a folder: what it answers, and what we make of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.models.bucket import ObjectStore, open_bucket
from services.models.errors import Forbidden, Missing, ModelError, Trouble
from services.settings.store import StoreSettings
from tests.s3_fixture import S3, Wire, environment, wire_to


@pytest.fixture
def bucket_url(s3: S3) -> str:
    return f"s3://{s3.make_bucket()}/models"


@pytest.fixture
def on_s3(s3: S3, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for key, value in s3.environment.items():
        monkeypatch.setenv(key, value)
    return open_bucket(StoreSettings(url=bucket_url))


@pytest.fixture
def in_a_folder(tmp_path: Path) -> ObjectStore:
    (tmp_path / "with space").mkdir()
    return open_bucket(StoreSettings(url=(tmp_path / "with space").as_uri()))


@pytest.fixture(params=["on_s3", "in_a_folder"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def wire(s3: S3, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(wire_to(s3))
        for key, value in environment(wire.url).items():
            monkeypatch.setenv(key, value)
        yield wire


async def test_what_is_written_can_be_read(store: ObjectStore, tmp_path: Path) -> None:
    content = bytes(range(256)) * 100
    (tmp_path / "file").write_bytes(content)
    await store.write("tiny/aa/a.json", content)
    await store.write("tiny/bb/b.json", tmp_path / "file")
    await store.write("tiny/bb/b.json", tmp_path / "file")
    for path in ("tiny/aa/a.json", "tiny/bb/b.json"):
        assert await store.size(path) == len(content)
        assert await store.read(path, 100, 356) == content[100:356]
        assert await store.read(path, 25_000, 99_999) == content[25_000:]


async def test_more_than_one_part(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (17 * 2**20))
    await store.write("tiny/aa/big", tmp_path / "file")
    assert await store.size("tiny/aa/big") == 17 * 2**20


async def test_folders(store: ObjectStore) -> None:
    assert await store.folders() == []
    await store.write("b/manifest.json", b"{}")
    await store.write("a/x/y.json", b"{}")
    assert await store.folders() == ["a", "b"]


async def test_what_is_not_there_is_missing(store: ObjectStore) -> None:
    for asking in (store.size("no/such"), store.read("no/such", 0, 5)):
        with pytest.raises(Missing, match="no/such is not there"):
            await asking


async def test_a_bucket_that_is_not_there(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in s3.environment.items():
        monkeypatch.setenv(key, value)
    store = open_bucket(StoreSettings(url="s3://never-made/models"))
    for asking in (store.read("a", 0, 5), store.write("a", b"x"), store.folders()):
        with pytest.raises(ModelError, match=r"store\.url: s3://never-made/models: there is no such bucket") as caught:
            await asking
        assert type(caught.value) is ModelError, "no object that is missing"
    with pytest.raises(Missing):
        await store.size("a")  # the answer to HEAD has no body that would say why


async def test_what_lies_behind_an_objects_end_is_nothing(store: ObjectStore) -> None:
    await store.write("empty", b"")
    await store.write("short", b"abc")
    assert [await store.read("empty", 0, 9), await store.read("short", 1, 9), await store.read("short", 3, 9)] == [
        b"",
        b"bc",
        b"",
    ]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/gone", f"{tmp_path}/gone"):
        with pytest.raises(ModelError, match=r"store\.url: there is no folder .*gone"):
            open_bucket(StoreSettings(url=url))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("403 Forbidden", Forbidden),
        ("401 Unauthorized", Forbidden),
        ("404 Not Found", Missing),
        ("400 Bad Request", ModelError),
        ("429 Too Many Requests", Trouble),
        ("503 Service Unavailable", Trouble),
        ("500 Internal Server Error", Trouble),
    ],
)
async def test_a_status_and_what_it_means(wire: Wire, bucket_url: str, status: str, kind: type[ModelError]) -> None:
    body = b"<Error><Code>ItsReason</Code><AWSAccessKeyId>key</AWSAccessKeyId></Error>"
    wire.answer = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    store = open_bucket(StoreSettings(url=bucket_url))
    with pytest.raises(ModelError) as caught:
        await store.read("a", 0, 5)
    assert type(caught.value) is kind
    if kind is not Missing:
        assert f"{status[:3]} ItsReason" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "AWSAccessKeyId" not in str(caught.value)


async def test_a_line_that_is_cut_in_an_answer_is_trouble(wire: Wire, bucket_url: str) -> None:
    store = open_bucket(StoreSettings(url=bucket_url))
    await store.write("a", b"x" * 100_000)
    wire.down_limit = wire.down + 50_000
    with pytest.raises(Trouble):
        await store.read("a", 0, 100_000)


async def test_nobody_there_is_trouble(bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(key, value)
    with pytest.raises(Trouble):
        await open_bucket(StoreSettings(url=bucket_url)).read("a", 0, 5)


async def test_silence_is_trouble(wire: Wire, bucket_url: str) -> None:
    await open_bucket(StoreSettings(url=bucket_url)).write("a", b"x" * 100_000)
    wire.open.clear()
    with pytest.raises(Trouble):
        await open_bucket(StoreSettings(url=bucket_url, stall_s=0.2)).read("a", 0, 100_000)


async def test_slow_is_not_silent(wire: Wire, bucket_url: str) -> None:
    """The library's clock is the real one, which a pause of this process does not stop."""
    await open_bucket(StoreSettings(url=bucket_url)).write("a", b"x" * 400_000)
    wire.rate = 100_000
    began = asyncio.get_running_loop().time()
    assert len(await open_bucket(StoreSettings(url=bucket_url, stall_s=3.0)).read("a", 0, 400_000)) == 400_000
    assert asyncio.get_running_loop().time() - began > 3.0
