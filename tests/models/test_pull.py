"""Pulling a published model: whole or not at all, resumed, fetched once, and never led astray by what a store says."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.models.errors import Missing, ModelError
from services.models.partial import PartialFile
from services.models.place import Place
from services.models.progress import Silent
from services.models.published import decode
from services.models.push import push
from services.models.store import ModelStore
from tests.models.stores import PIECE, SHARD, MemoryStore, Said, published, pulled, write_model
from tests.waiting import until

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "headrace.json"}


def partial_of(store: MemoryStore, home: Path, name: str) -> Path:
    """Where file `name` grows."""
    (file,) = (file for file in decode(store.objects["tiny/manifest.json"], "").files if file.name == name)
    return Place(home, "tiny").partial(file)


async def test_what_is_pulled_is_what_was_pushed(tmp_path: Path) -> None:
    store = MemoryStore()
    source = await published(store, tmp_path / "tiny")
    files = await pulled(store, tmp_path / "home")
    assert content(files.folder) == content(source.folder)
    assert (files.name, files.weights) == ("tiny", source.weights)
    assert [path.name for path in files.safetensors] == [FIRST, SECOND]
    assert ModelStore(tmp_path / "home").open("tiny") == files, "by its name, without a store"


async def test_files_of_the_same_content_are_fetched_each_by_itself(tmp_path: Path) -> None:
    store, source = MemoryStore(), write_model(tmp_path / "tiny")
    source.safetensors[1].write_bytes(source.safetensors[0].read_bytes())
    await push(store, ModelStore(tmp_path).open(str(source.folder)), "tiny", Silent(), deadline_s=30)
    assert content((await pulled(store, tmp_path / "home")).folder) == content(source.folder)


async def test_nobody_reads_the_weights_again_to_know_what_they_are(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    await pulled(store, tmp_path / "home")
    assert not (tmp_path / "home" / "manifests").exists()


async def test_the_second_start_fetches_only_the_manifest(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    await pulled(store, tmp_path / "home")
    store.reads.clear()
    await pulled(store, tmp_path / "home")
    assert [path for path, _, _ in store.reads] == ["tiny/manifest.json"]


async def test_an_edge_pulls_no_weights(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    files = await pulled(store, tmp_path / "home", weights=False)
    assert (store.read_of(FIRST), store.read_of(SECOND)) == (0, 0)
    assert files.chat_template == files.folder / "tokenizer_config.json"
    worker = await pulled(store, tmp_path / "home")
    assert worker.folder == files.folder
    assert store.read_of("tokenizer.json") < 2 * files.tokenizer.stat().st_size, "a worker fetches what an edge fetched before"


async def test_a_start_that_was_interrupted_in_a_shard_goes_on_there(tmp_path: Path) -> None:
    store = MemoryStore()
    source = await published(store, tmp_path / "tiny", shards=1)
    (shard,) = source.safetensors
    stopped = asyncio.Event()

    async def stop_in_the_middle(path: str, start: int) -> None:
        if path.endswith(shard.name) and start >= 5 * PIECE:
            stopped.set()
            await asyncio.Event().wait()

    store.fault = stop_in_the_middle
    first = asyncio.create_task(pulled(store, tmp_path / "home"))
    await stopped.wait()
    partial = partial_of(store, tmp_path / "home", shard.name)
    await until(lambda: partial.is_file() and partial.stat().st_size >= 3 * PIECE)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    begun = partial.stat().st_size
    store.fault = None
    store.reads.clear()
    files = await pulled(store, tmp_path / "home")
    assert store.read_of(shard.name) == SHARD - begun
    assert content(files.folder) == content(source.folder)
    assert list(partial.parent.iterdir()) == []


async def test_damage_in_what_an_earlier_start_left_is_found_and_mended(tmp_path: Path) -> None:
    store, said = MemoryStore(), Said()
    await published(store, tmp_path / "tiny")
    partial = partial_of(store, tmp_path / "home", FIRST)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * (2 * PIECE))
    files = await pulled(store, tmp_path / "home", progress=said)
    assert store.read_of(FIRST) == SHARD - 2 * PIECE + SHARD
    assert any(FIRST in line and "damaged" in line for line in said.lines)
    assert len(files.safetensors) == 2


@pytest.mark.parametrize("length", [SHARD, SHARD + 5])
async def test_what_is_longer_than_a_file_is_no_beginning_of_it(tmp_path: Path, length: int) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    partial = partial_of(store, tmp_path / "home", FIRST)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * length)
    assert len((await pulled(store, tmp_path / "home")).safetensors) == 2


async def test_a_flipped_bit_is_not_served(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    good = store.objects[store.key(SECOND)]
    store.objects[store.key(SECOND)] = good[:99] + bytes([good[99] ^ 1]) + good[100:]
    with pytest.raises(ModelError, match=rf"memory://models/tiny/[0-9a-f]{{64}}/{SECOND} is corrupt"):
        await pulled(store, tmp_path / "home")
    with pytest.raises(ModelError, match="there is no model"):
        ModelStore(tmp_path / "home").open("tiny")
    store.objects[store.key(SECOND)] = good
    assert len((await pulled(store, tmp_path / "home")).safetensors) == 2


async def test_a_missing_shard_is_known_before_the_first_byte(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    del store.objects[store.key(SECOND)]
    with pytest.raises(ModelError, match=rf"lacks tiny/[0-9a-f]{{64}}/{SECOND}"):
        await pulled(store, tmp_path / "home")
    assert store.read_of(FIRST) == 0


async def test_a_truncated_object_is_known_before_the_first_byte(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    store.objects[store.key(SECOND)] = store.objects[store.key(SECOND)][:-1]
    with pytest.raises(ModelError, match=f"has {SHARD - 1} bytes, the manifest says {SHARD}"):
        await pulled(store, tmp_path / "home")
    assert store.read_of(FIRST) == 0


async def test_a_model_that_nobody_pushed(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"no model 'tiny' in memory://models .*headrace models push"):
        await pulled(MemoryStore(), tmp_path / "home")


async def test_several_processes_fetch_once(tmp_path: Path) -> None:
    store, said = MemoryStore(), Said()
    await published(store, tmp_path / "tiny")
    store.reads.clear()

    async def until_the_others_wait(path: str, start: int) -> None:
        if not path.endswith("manifest.json"):
            await until(lambda: sum("waiting" in line for line in said.lines) == 3)

    store.fault = until_the_others_wait
    everyone = await asyncio.gather(*(pulled(store, tmp_path / "home", progress=said) for _ in range(4)))
    assert len({files.folder for files in everyone}) == 1
    assert (store.read_of(FIRST), store.read_of(SECOND)) == (SHARD, SHARD)


async def test_a_store_that_is_too_slow_is_given_up_and_gone_on_with(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    hanging = asyncio.Event()

    async def hang(path: str, start: int) -> None:
        if path.endswith(FIRST) and start >= 4 * PIECE:
            hanging.set()
            await asyncio.Event().wait()

    store.fault = hang
    with pytest.raises(ModelError, match=r"not fetched .* in 3 s \(store\.deadline_s\); the next start goes on"):
        await pulled(store, tmp_path / "home", deadline_s=3)
    assert hanging.is_set()
    store.fault = None
    store.reads.clear()
    await pulled(store, tmp_path / "home")
    assert store.read_of(FIRST) < SHARD


async def test_a_full_disk_is_known_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    monkeypatch.setattr("services.models.pull.shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ModelError, match=r"pulled/tiny is too full: tiny needs \d+ MB more"):
        await pulled(store, tmp_path / "home")
    assert store.read_of(FIRST) == 0


async def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PartialFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", full)
        with pytest.raises(ModelError, match="pulled/tiny is full: make room, and start again to go on"):
            await pulled(store, tmp_path / "home")
    await pulled(store, tmp_path / "home")


async def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot write .*pulled/tiny: "):
        await pulled(store, tmp_path / "home")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../../x.json", "not a plain file name"),
        ("/etc/x.json", "not a plain file name"),
        ("a/b.json", "not a plain file name"),
        ("..", "not a plain file name"),
        (".x.json", "not a plain file name"),
        ("a\\b.json", "not a plain file name"),
        ("pytorch_model.bin", "only .safetensors"),
        ("modeling.py", "only .safetensors"),
        ("x.json\n", "not a plain file name"),
        ("CONFIG.json", "twice"),
    ],
)
async def test_a_manifest_cannot_lead_elsewhere(tmp_path: Path, name: str, reason: str) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    manifest = json.loads(store.objects["tiny/manifest.json"])
    manifest["files"].append({**manifest["files"][0], "name": name})
    store.objects["tiny/manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(ModelError, match=rf"memory://models/tiny/manifest.json names .*{reason}.*: refused"):
        await pulled(store, tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"weights": "x"},
        {"files": []},
        {"files": [{"name": "config.json", "bytes": -1, "sha256": "0" * 64}]},
        {"files": [{"name": "config.json", "bytes": 1, "sha256": "../../x"}]},
        {"files": None},
    ],
)
async def test_a_manifest_that_is_none_is_one_clear_line(tmp_path: Path, change: dict[str, object]) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    store.objects["tiny/manifest.json"] = json.dumps({**json.loads(store.objects["tiny/manifest.json"]), **change}).encode()
    with pytest.raises(ModelError, match=r"memory://models/tiny/manifest\.json") as caught:
        await pulled(store, tmp_path / "home")
    assert "\n" not in str(caught.value)


async def test_a_manifest_whose_identity_is_not_that_of_its_weights(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    manifest = json.loads(store.objects["tiny/manifest.json"])
    store.objects["tiny/manifest.json"] = json.dumps({**manifest, "weights": "0" * 32}).encode()
    with pytest.raises(ModelError, match="contradicts itself"):
        await pulled(store, tmp_path / "home")


async def test_a_new_revision_leaves_the_one_that_is_in_use(tmp_path: Path) -> None:
    store, home = MemoryStore(), tmp_path / "home"
    await published(store, tmp_path / "one" / "tiny", seed=1)
    first = await pulled(store, home)
    before = content(first.folder)
    await published(store, tmp_path / "two" / "tiny", seed=2)
    second = await pulled(store, home)
    assert second.folder != first.folder
    assert second.weights != first.weights
    assert content(first.folder) == before
    assert ModelStore(home).open("tiny").weights == second.weights
    await published(store, tmp_path / "three" / "tiny", seed=3)
    third = await pulled(store, home)
    assert [folder.is_dir() for folder in (first.folder, second.folder, third.folder)] == [False, True, True]


async def test_a_push_during_a_pull_changes_nothing_of_it(tmp_path: Path) -> None:
    store = MemoryStore()
    old = await published(store, tmp_path / "one" / "tiny", seed=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(path: str, start: int) -> None:
        if path.endswith(FIRST) and start:
            begun.set()
            await go_on.wait()

    store.fault = wait
    pulling = asyncio.create_task(pulled(store, tmp_path / "home"))
    await begun.wait()
    await published(store, tmp_path / "two" / "tiny", seed=2)
    go_on.set()
    assert (await pulling).weights == old.weights


async def test_a_file_that_was_changed_here_is_fetched_again(tmp_path: Path) -> None:
    store = MemoryStore()
    source = await published(store, tmp_path / "tiny")
    files = await pulled(store, tmp_path / "home")
    files.safetensors[0].write_bytes(b"\0" * SHARD)
    os.utime(files.safetensors[0], (1, 1))  # else, where a clock tick is long, it may have the date it had
    files.tokenizer.write_bytes(b"{}")
    assert content((await pulled(store, tmp_path / "home")).folder) == content(source.folder)


async def test_weights_with_another_date_are_looked_into_not_fetched(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny")
    files = await pulled(store, tmp_path / "home")
    os.utime(files.safetensors[0], (1, 1))
    store.reads.clear()
    await pulled(store, tmp_path / "home")
    assert store.read_of(FIRST) == 0


async def test_pieces_are_read_at_once_but_not_too_many(tmp_path: Path) -> None:
    store = MemoryStore()
    await published(store, tmp_path / "tiny", shards=1)
    running = most = 0

    async def count(path: str, start: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    store.fault = count
    await pulled(store, tmp_path / "home")
    assert 1 < most <= 4
