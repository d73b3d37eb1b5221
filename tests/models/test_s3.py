"""Pushing and pulling through S3 (moto's server), over a wire that is cut, slowed, or answers for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from services.clock import SystemClock
from services.models.errors import Forbidden, ModelError
from services.models.obtain import obtain, open_store
from services.models.progress import Silent
from services.models.push import push
from services.models.store import ModelFiles
from services.settings.settings import Settings
from services.settings.store import StoreSettings
from tests.models.stores import Said, write_model
from tests.s3_fixture import S3, SLOW_DOWN, Wire, environment, wire_to
from tests.waiting import until

BIG = 24 * 2**20


@pytest.fixture
def bucket(s3: S3) -> str:
    return s3.make_bucket()


@pytest.fixture
async def wire(s3: S3, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    async with wire_to(s3) as wire:
        for key, value in environment(wire.url).items():
            monkeypatch.setenv(key, value)
        yield wire


def settings(bucket: str, home: Path, **store: float) -> Settings:
    return Settings(home=home, model="tiny", store=StoreSettings(url=f"s3://{bucket}/models", **store))  # type: ignore[arg-type]


async def pushed(bucket: str, folder: Path, shard_bytes: int = 40_000) -> ModelFiles:
    files = write_model(folder, shards=2, shard_bytes=shard_bytes)
    store = open_store(settings(bucket, folder), SystemClock(), Random(1), Silent())
    await push(store, files, "tiny", Silent(), deadline_s=60)
    return files


def begun(home: Path) -> list[int]:
    """Bytes of each file that is on its way. Whoever pulls moves one away when it is whole, also while we look."""
    partial = home / "pulled/tiny/partial"
    sizes = []
    for name in os.listdir(partial) if partial.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            sizes.append((partial / name).stat().st_size)
    return sizes


async def start(settings: Settings, said: Silent | None = None, *, weights: bool = True) -> ModelFiles:
    return await obtain(settings, settings.model, said or Silent(), SystemClock(), Random(2), weights=weights)


async def test_an_empty_home_has_the_model_after_the_start(s3: S3, bucket: str, wire: Wire, tmp_path: Path) -> None:
    source = await pushed(bucket, tmp_path / "tiny")
    files = await start(settings(bucket, tmp_path / "home"))
    assert (files.name, files.weights) == ("tiny", source.weights)
    assert [path.read_bytes() for path in files.safetensors] == [path.read_bytes() for path in source.safetensors]
    assert all(meta["path"].startswith("models/tiny/") for meta in s3.objects(bucket).list().collect())


async def test_an_edge_moves_no_weights(bucket: str, wire: Wire, tmp_path: Path) -> None:
    await pushed(bucket, tmp_path / "tiny", shard_bytes=2**20)
    before = wire.down
    files = await start(settings(bucket, tmp_path / "home"), weights=False)
    assert wire.down - before < 2**20
    assert files.tokenizer.is_file()
    assert not list(files.folder.glob("*.safetensors"))


async def test_a_line_cut_in_a_shard_is_gone_on_with(bucket: str, wire: Wire, tmp_path: Path) -> None:
    source = await pushed(bucket, tmp_path / "tiny", shard_bytes=BIG)
    wire.down_limit = wire.down + BIG
    with pytest.raises(ModelError, match="asked again for"):
        await start(settings(bucket, tmp_path / "home", retry_s=0.5, parallel=1))  # else no piece may be whole when it is cut
    left = sum(begun(tmp_path / "home"))
    assert left > 0
    wire.down_limit = None
    before = wire.down
    files = await start(settings(bucket, tmp_path / "home"))
    assert wire.down - before < 2 * BIG - left + 2**20
    assert [path.read_bytes() for path in files.safetensors] == [path.read_bytes() for path in source.safetensors]


async def test_a_start_that_is_killed_in_a_shard_is_gone_on_with(bucket: str, wire: Wire, tmp_path: Path) -> None:
    source = await pushed(bucket, tmp_path / "tiny", shard_bytes=BIG)
    wire.rate = 12 * 2**20
    pulling = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", "models", "pull", "tiny"),
        env={**os.environ, "HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_STORE__URL": f"s3://{bucket}/models"},
        stdout=subprocess.DEVNULL,
    )
    await until(lambda: max(begun(tmp_path / "home"), default=0) >= 2**23, 60)
    pulling.send_signal(signal.SIGKILL)
    await pulling.wait()
    left = sum(begun(tmp_path / "home"))
    assert 0 < left < 2 * BIG
    wire.rate = None
    before = wire.down
    files = await start(settings(bucket, tmp_path / "home"))
    assert wire.down - before < 2 * BIG - left + 2**20
    assert files.weights == source.weights


async def test_a_store_that_is_busy_for_a_while(bucket: str, wire: Wire, tmp_path: Path) -> None:
    await pushed(bucket, tmp_path / "tiny")
    wire.answer, said = SLOW_DOWN, Said()
    starting = asyncio.create_task(start(settings(bucket, tmp_path / "home"), said))
    await until(lambda: said.lines)
    assert "503 SlowDown; asking again" in said.lines[0]
    wire.answer = b""
    assert len((await starting).safetensors) == 2


async def test_a_store_that_stays_busy_is_the_reason(bucket: str, wire: Wire, tmp_path: Path) -> None:
    wire.answer = SLOW_DOWN
    with pytest.raises(ModelError, match=rf"s3://{bucket}/models/tiny/manifest.json: 503 SlowDown; asked again for"):
        await start(settings(bucket, tmp_path / "home", retry_s=0.3))


async def test_a_store_that_is_away_does_not_stop_who_has_the_model(bucket: str, wire: Wire, tmp_path: Path) -> None:
    source = await pushed(bucket, tmp_path / "tiny")
    await start(settings(bucket, tmp_path / "home"))
    wire.answer, said = SLOW_DOWN, Said()
    files = await start(settings(bucket, tmp_path / "home", retry_s=0.3), said)
    assert files.weights == source.weights
    assert "going on with the tiny that is on this machine, which may be an older one" in said.lines[-1]


async def test_who_has_only_an_edges_part_of_it_does_not_start_as_a_worker(bucket: str, wire: Wire, tmp_path: Path) -> None:
    await pushed(bucket, tmp_path / "tiny")
    await start(settings(bucket, tmp_path / "home"), weights=False)
    wire.answer = SLOW_DOWN
    with pytest.raises(ModelError, match="503 SlowDown"):
        await start(settings(bucket, tmp_path / "home", retry_s=0.3))
    assert (await start(settings(bucket, tmp_path / "home", retry_s=0.3), weights=False)).name == "tiny"


async def test_a_bit_that_flipped_in_the_bucket(s3: S3, bucket: str, wire: Wire, tmp_path: Path) -> None:
    source = await pushed(bucket, tmp_path / "tiny")
    content = bytearray(source.safetensors[1].read_bytes())
    content[777] ^= 1
    s3.objects(bucket).put(s3.key(bucket, source.safetensors[1].name), bytes(content))
    with pytest.raises(ModelError, match=rf"{source.safetensors[1].name} is corrupt"):
        await start(settings(bucket, tmp_path / "home"))


async def test_a_shard_that_is_gone_from_the_bucket(s3: S3, bucket: str, wire: Wire, tmp_path: Path) -> None:
    source = await pushed(bucket, tmp_path / "tiny")
    s3.objects(bucket).delete(s3.key(bucket, source.safetensors[1].name))
    with pytest.raises(ModelError, match=rf"lacks .*{source.safetensors[1].name}, which the manifest names"):
        await start(settings(bucket, tmp_path / "home"))


async def test_wrong_credentials(s3: S3, bucket: str, wire: Wire, tmp_path: Path) -> None:
    await pushed(bucket, tmp_path / "tiny")
    s3.request("POST", "/moto-api/reset-auth", b"0")  # from now on moto looks at who asks
    try:
        with pytest.raises(Forbidden, match=r"the store refused our credentials .403 InvalidAccessKeyId") as caught:
            await start(settings(bucket, tmp_path / "home"))
        assert "secret" not in str(caught.value)
    finally:
        s3.request("POST", "/moto-api/reset-auth", b"1000000000")
    assert (await start(settings(bucket, tmp_path / "home"))).name == "tiny"


async def test_a_push_of_the_same_content_sends_nothing(s3: S3, bucket: str, wire: Wire, tmp_path: Path) -> None:
    await pushed(bucket, tmp_path / "tiny")
    before = s3.objects(bucket).list().collect()
    await pushed(bucket, tmp_path / "again" / "tiny")
    assert s3.objects(bucket).list().collect() == before, "dates included"


async def test_a_folder_is_no_matter_of_a_store(wire: Wire, tmp_path: Path) -> None:
    own = write_model(tmp_path / "own")
    wire.answer = SLOW_DOWN
    files = await start(settings("nowhere", tmp_path / "home").model_copy(update={"model": str(own.folder)}))
    assert files.folder == own.folder
