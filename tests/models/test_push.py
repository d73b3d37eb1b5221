"""Pushing a model: only what may be loaded, the manifest last, the same content once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.models.errors import ModelError, Trouble
from services.models.progress import Silent
from services.models.published import decode
from services.models.push import push
from services.models.store import ModelFiles, ModelStore
from tests.models.stores import MemoryStore, Said, published, pulled, write_model


async def send(store: MemoryStore, files: ModelFiles, progress: Silent | None = None, *, deadline_s: float = 30) -> None:
    await push(store, files, "tiny", progress or Silent(), deadline_s=deadline_s)


async def test_the_manifest_comes_last(tmp_path: Path) -> None:
    store = MemoryStore()
    files = await published(store, tmp_path / "tiny")
    assert store.writes[-1] == "tiny/manifest.json"
    manifest = decode(store.objects["tiny/manifest.json"], "")
    assert manifest.weights == files.weights
    assert {file.name for file in manifest.files} == {path.name for path in files.folder.iterdir()}


async def test_the_same_content_is_sent_once(tmp_path: Path) -> None:
    store, said = MemoryStore(), Said()
    files = await published(store, tmp_path / "tiny")
    before = dict(store.objects)
    store.writes.clear()
    await send(store, files, said)
    assert store.writes == []
    assert store.objects == before
    assert any("already" in line for line in said.lines)


async def test_of_a_changed_model_only_what_changed_is_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    files = await published(store, tmp_path / "tiny")
    store.writes.clear()
    files.tokenizer.write_text(files.tokenizer.read_text() + "\n")
    await send(store, files)
    assert [path.rpartition("/")[2] for path in store.writes] == ["tokenizer.json", "manifest.json"]


async def test_a_push_that_was_interrupted_shows_nobody_anything_and_goes_on(tmp_path: Path) -> None:
    class Broken(MemoryStore):
        async def write(self, path: str, content: bytes | Path) -> None:
            if path.endswith("-00002-of-00002.safetensors"):
                raise Trouble("the cable")
            await super().write(path, content)

    broken, files = Broken(), write_model(tmp_path / "tiny")
    with pytest.raises(ModelError, match="the cable"):
        await send(broken, files)
    with pytest.raises(ModelError, match="no model"):
        await pulled(broken, tmp_path / "home")
    store = MemoryStore()
    store.objects = broken.objects
    await send(store, files)
    sent = [path.rpartition("/")[2] for path in store.writes]
    assert "model-00001-of-00002.safetensors" not in sent
    assert sent[-1] == "manifest.json"
    assert len((await pulled(store, tmp_path / "home")).safetensors) == 2


async def test_what_no_model_is_loaded_from_is_left_out_and_said(tmp_path: Path) -> None:
    store, said = MemoryStore(), Said()
    files = write_model(tmp_path / "tiny")
    for name in ("pytorch_model.bin", "modeling_tiny.py", "README.md", "other.safetensors", ".hidden.json"):
        (files.folder / name).write_bytes(b"x")
    (files.folder / "original").mkdir()
    await send(store, files, said)
    names = {path.rpartition("/")[2] for path in store.objects}
    assert names.isdisjoint({"pytorch_model.bin", "modeling_tiny.py", "README.md", "other.safetensors", ".hidden.json"})
    (line,) = (line for line in said.lines if line.startswith("Left out"))
    assert {"pytorch_model.bin", "modeling_tiny.py", "README.md", "original", "other.safetensors"} <= set(
        line.partition(": ")[2].split(", ")
    )


async def test_weights_that_are_links_are_followed(tmp_path: Path) -> None:
    store, files = MemoryStore(), write_model(tmp_path / "tiny", shards=1)
    (shard,) = files.safetensors
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    await send(store, ModelStore(tmp_path).open(str(files.folder)))
    assert (await pulled(store, tmp_path / "home")).weights == files.weights


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", ".x", "x" * 200, "a\n"])
async def test_a_name_that_is_no_folder_of_a_store(tmp_path: Path, name: str) -> None:
    files = write_model(tmp_path / "tiny")
    with pytest.raises(ModelError, match="cannot be the name of a model"):
        await push(MemoryStore(), files, name, Silent(), deadline_s=30)


async def test_a_file_that_changes_while_it_is_sent_is_not_published(tmp_path: Path) -> None:
    class Growing(MemoryStore):
        async def write(self, path: str, content: bytes | Path) -> None:
            if isinstance(content, Path) and content.name == "config.json":
                await asyncio.to_thread(content.write_bytes, b'{"grown": true}')
            await super().write(path, content)

    store = Growing()
    with pytest.raises(ModelError, match="changed while it was sent"):
        await send(store, write_model(tmp_path / "tiny"))
    assert "tiny/manifest.json" not in store.objects


async def test_a_damaged_manifest_in_the_store_does_not_stop_a_push(tmp_path: Path) -> None:
    store = MemoryStore()
    files = await published(store, tmp_path / "tiny")
    store.objects["tiny/manifest.json"] = json.dumps({"format": 99}).encode()
    await send(store, files)
    assert (await pulled(store, tmp_path / "home")).weights == files.weights


async def test_a_push_has_a_deadline(tmp_path: Path) -> None:
    class Hanging(MemoryStore):
        async def write(self, path: str, content: bytes | Path) -> None:
            await asyncio.Event().wait()

    with pytest.raises(ModelError, match=r"not pushed in 0\.2 s \(store\.deadline_s\)"):
        await send(Hanging(), write_model(tmp_path / "tiny"), deadline_s=0.2)
