"""`headrace models pull|push|list`, as a person uses them, with a folder as the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.models.stores import write_model


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
