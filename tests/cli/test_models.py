"""`headrace models pull|push|list`, as a person uses them: with a folder as the store, and with S3 (moto)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.models.manifest import Manifest
from tests.cli.conftest import Shell
from tests.models.stores import write_model
from tests.s3_fixture import S3


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store, and a home; another machine is another home."""
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADRACE_STORE__URL", (tmp_path / "store").as_uri())
    return tmp_path


def test_push_list_pull(headrace: Shell, homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_model(homes / "tiny")
    assert headrace("models", "list") == "no models: `headrace models pull` fetches one\n"
    assert f"weights {files.weights}" in headrace("models", "push", str(files.folder))
    assert "already" in headrace("models", "push", str(files.folder))
    headrace("models", "push", str(files.folder), "--name", "other")
    assert [row.split()[:2] for row in headrace("models", "list").splitlines()] == [["other", "store"], ["tiny", "store"]]
    assert str(homes / "home" / "pulled" / "tiny") in headrace("models", "pull", "tiny")
    rows = [row.split() for row in headrace("models", "list").splitlines()]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("other", "store", files.weights),
        ("tiny", "here", files.weights),
        ("tiny", "store", files.weights),
    ]
    monkeypatch.delenv("HEADRACE_STORE__URL")
    assert [row.split()[:2] for row in headrace("models", "list").splitlines()] == [["tiny", "here"]]


def test_a_model_that_was_pulled_can_be_pushed_on(headrace: Shell, homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace("models", "push", str(write_model(homes / "tiny").folder))
    headrace("models", "pull", "tiny")
    (homes / "elsewhere").mkdir()
    monkeypatch.setenv("HEADRACE_STORE__URL", str(homes / "elsewhere"))
    headrace("models", "push", "tiny")
    assert [row.split()[:2] for row in headrace("models", "list").splitlines()] == [["tiny", "here"], ["tiny", "store"]]


def test_a_folder_of_something_else_in_the_store_is_said(headrace: Shell, homes: Path) -> None:
    (homes / "store" / "rubbish").mkdir()
    (homes / "store" / "rubbish" / "x").write_text("x")
    assert headrace("models", "list").split()[:3] == ["rubbish", "store", "-"]


def test_a_model_that_goes_while_they_are_listed(headrace: Shell, homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace("models", "push", str(write_model(homes / "tiny").folder))
    headrace("models", "pull", "tiny")

    def replaced(path: Path) -> Manifest | None:
        shutil.rmtree(path.parent.resolve())
        return None

    monkeypatch.setattr("services.cli.models.read_manifest", replaced)
    assert [row.split()[:2] for row in headrace("models", "list").splitlines()] == [["tiny", "store"]]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("pull", "gone"), "there is no model 'gone'"),
        (("push", "gone"), "there is no model 'gone'"),
        (("push", "./gone"), "there is no model './gone'"),
    ],
)
def test_what_goes_wrong_is_one_line(headrace: Shell, arguments: tuple[str, ...], reason: str) -> None:
    said = headrace("models", *arguments, code=1)
    assert said.startswith("headrace: ")
    assert reason in said
    assert said.count("\n") == 1


def test_the_store_can_be_named_on_the_command_line(headrace: Shell, homes: Path) -> None:
    (homes / "other").mkdir()
    headrace("models", "push", str(write_model(homes / "tiny").folder), "--store", str(homes / "other"))
    assert (homes / "other" / "tiny" / "manifest.json").is_file()
    assert not list((homes / "store").iterdir())


def test_a_push_needs_a_store(headrace: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_STORE__URL")
    assert "store.url is not set" in headrace("models", "push", "tiny", code=1)


def test_a_store_that_is_none_names_its_key(headrace: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_STORE__URL", "ftp://x/y")
    assert "store.url: " in headrace("models", "list", code=2)


# what is wrong with a store, each in one line


def one_line(said: str) -> str:
    assert said.startswith("headrace: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture
def closed(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket to which our credentials give no access."""
    bucket = s3.make_bucket()
    monkeypatch.setenv("HEADRACE_STORE__URL", f"s3://{bucket}/models")
    for key, value in s3.environment.items():
        monkeypatch.setenv(key, value)
    s3.request("POST", "/moto-api/reset-auth", b"0")  # from now on moto looks at who asks
    yield bucket
    s3.request("POST", "/moto-api/reset-auth", b"1000000000")


def commands(homes: Path) -> list[tuple[str, ...]]:
    return [("push", str(write_model(homes / "tiny").folder)), ("pull", "tiny"), ("list",)]


def test_a_bucket_that_is_not_there(headrace: Shell, homes: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in s3.environment.items():
        monkeypatch.setenv(key, value)
    for command in commands(homes):
        said = one_line(headrace("models", *command, "--store", "s3://no-such-bucket/models", code=1))
        assert "store.url: s3://no-such-bucket/models: there is no such bucket" in said


def test_a_bucket_that_is_not_ours(headrace: Shell, homes: Path, closed: str) -> None:
    for command in commands(homes):
        said = one_line(headrace("models", *command, code=1))
        assert f"s3://{closed}/models" in said
        assert "the store refused our credentials (403" in said
        assert "secret" not in said


def longer(manifest: dict[str, Any]) -> None:
    shard = next(file for file in manifest["files"] if file["name"].endswith(".safetensors"))
    shard["bytes"] -= 1


def leading_out(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["name"] = "../../outside.json"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (longer, "has 40000 bytes, the manifest says 39999"),
        (leading_out, "names '../../outside.json', which is not a plain file name: refused"),
    ],
)
def test_a_manifest_that_is_wrong(headrace: Shell, homes: Path, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    headrace("models", "push", str(write_model(homes / "tiny").folder))
    path = homes / "store" / "tiny" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert reason in one_line(headrace("models", "pull", "tiny", code=1))
    assert not list(homes.rglob("outside.json"))
    assert not list((homes / "home").rglob("*.safetensors"))


@pytest.mark.parametrize("left", [0, 1, 100], ids="{}_bytes".format)
def test_a_manifest_that_was_cut_short(headrace: Shell, homes: Path, left: int) -> None:
    headrace("models", "push", str(write_model(homes / "tiny").folder))
    path = homes / "store" / "tiny" / "manifest.json"
    path.write_bytes(path.read_bytes()[:left])
    reason = "tiny/manifest.json is not a manifest of this version of Headrace: Input data was truncated"
    assert reason in one_line(headrace("models", "pull", "tiny", code=1))
    assert reason in headrace("models", "list")
    headrace("models", "push", str(homes / "tiny"))
    headrace("models", "pull", "tiny")


def test_a_disk_without_room(headrace: Shell, homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace("models", "push", str(write_model(homes / "tiny").folder))
    with monkeypatch.context() as patch:
        patch.setattr("services.models.pull.shutil.disk_usage", lambda _: SimpleNamespace(free=10))
        assert "is too full: tiny needs" in one_line(headrace("models", "pull", "tiny", code=1))
    headrace("models", "pull", "tiny")
