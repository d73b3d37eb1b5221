"""A model to publish, a store in memory that can be told to misbehave, and what a test sees of progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from services.clock import SystemClock
from services.models.errors import Missing, Trouble
from services.models.progress import Progress, Silent
from services.models.pull import Pull, read_published
from services.models.push import push
from services.models.store import ModelFiles, ModelStore
from tests.text.tiny import write_tiny_model_folder

SHARD = 40_000
PIECE = 4_096

Fault = Callable[[str, int], Awaitable[None]]


def write_model(folder: Path, shards: int = 2, seed: int = 1, shard_bytes: int = SHARD) -> ModelFiles:
    """A model whose weights are noise, in `shards` files with an index."""
    write_tiny_model_folder(folder)
    random = Random(seed)
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    for name in names:
        (folder / name).write_bytes(random.randbytes(shard_bytes))
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ModelStore(folder.parent / "unused").open(str(folder))


class Said(Silent):
    """Remembers lines, and how far the bar came."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(line)


class MemoryStore:
    """Objects by path. `fault(path, offset)` runs before each read and may raise or wait."""

    url = "memory://models"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads: list[tuple[str, int, int]] = []
        self.writes: list[str] = []
        self.fault: Fault | None = None

    async def size(self, path: str) -> int:
        return len(self._object(path))

    async def read(self, path: str, start: int, end: int) -> bytes:
        if self.fault is not None:
            await self.fault(path, start)
        self.reads.append((path, start, end))
        return self._object(path)[start:end]

    async def write(self, path: str, content: bytes | Path) -> None:
        self.objects[path] = content if isinstance(content, bytes) else await asyncio.to_thread(content.read_bytes)
        self.writes.append(path)

    async def folders(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self.objects})

    def key(self, name: str) -> str:
        """The path of the object that is file `name`."""
        (found,) = (path for path in self.objects if path.endswith(f"/{name}"))
        return found

    def read_of(self, name: str) -> int:
        """Bytes asked for of file `name`."""
        return sum(end - start for path, start, end in self.reads if path.endswith(f"/{name}"))

    def _object(self, path: str) -> bytes:
        if path not in self.objects:
            raise Missing(f"{self.url}/{path} is not there")
        return self.objects[path]


def trouble_for(times: int) -> Fault:
    """The first `times` reads fail."""
    left = times

    async def fault(path: str, start: int) -> None:
        nonlocal left
        if left:
            left -= 1
            raise Trouble(f"{path}: 503 SlowDown")

    return fault


async def published(store: MemoryStore, folder: Path, model: str = "tiny", **changes: int) -> ModelFiles:
    """A model, pushed."""
    files = write_model(folder, **changes)
    await push(store, files, model, Silent(), deadline_s=30)
    return files


async def pulled(
    store: MemoryStore, home: Path, *, weights: bool = True, progress: Progress | None = None, deadline_s: float = 30
) -> ModelFiles:
    """What a process that starts would have."""
    found = await read_published(store, "tiny")
    pull = Pull(store, "tiny", home, SystemClock(), progress or Silent(), deadline_s, 4, PIECE)
    folder = await pull.run(found, weights=weights)
    return ModelStore(home).open_folder(folder, "tiny", weights=weights)
