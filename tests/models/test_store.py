"""Names and folders → files to load; what is incomplete or could run code is one clear line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.models.errors import ModelError
from services.models.progress import Silent
from services.models.store import ModelStore
from tests.text.tiny import write_tiny_model_folder


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's own model, with weights."""
    folder = write_tiny_model_folder(tmp_path / "own" / "tiny")
    save_file({"w": np.arange(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def shard(folder: Path, names: dict[str, str]) -> None:
    """Replaces the single weight file by an index over `names`: tensor → file."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_a_folder_of_the_users_own(store: ModelStore, folder: Path) -> None:
    files = store.open(str(folder))
    assert (files.name, files.folder) == ("tiny", folder)
    assert files.safetensors == (folder / "model.safetensors",)
    assert (files.config, files.tokenizer) == (folder / "config.json", folder / "tokenizer.json")
    assert files.chat_template == folder / "tokenizer_config.json"
    assert store.ensure(str(folder), Silent()) == files


def test_a_name_is_looked_up_under_home(store: ModelStore, tmp_path: Path) -> None:
    folder = write_tiny_model_folder(tmp_path / "home" / "models" / "tiny")
    assert store.path("tiny") == folder
    assert store.open("tiny", weights=False).folder == folder


def test_without_weights_a_script_can_be_played(store: ModelStore, tmp_path: Path) -> None:
    folder = write_tiny_model_folder(tmp_path / "bare")
    files = store.open(str(folder), weights=False)
    assert (files.safetensors, len(files.weights)) == ((), 32)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        store.open(str(folder))


def test_a_template_in_a_file_of_its_own_wins(store: ModelStore, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x")
    assert store.open(str(folder)).chat_template == folder / "chat_template.jinja"


def test_shards_in_the_order_of_their_names(store: ModelStore, folder: Path) -> None:
    for name in ("b.safetensors", "a.safetensors"):
        save_file({name: np.zeros(1, np.float32)}, folder / name)
    shard(folder, {"y": "b.safetensors", "x": "a.safetensors", "z": "a.safetensors"})
    assert [file.name for file in store.open(str(folder)).safetensors] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors", "pytorch_model.bin", "gone.safetensors"])
def test_an_index_cannot_lead_elsewhere(store: ModelStore, folder: Path, name: str) -> None:
    shard(folder, {"w": name})
    with pytest.raises(ModelError, match=r"safetensors"):
        store.open(str(folder))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": []}}', '{"weight_map": {"w": 1}}']
)
def test_a_broken_index_is_one_clear_line(store: ModelStore, folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="index"):
        store.open(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.ckpt"])
def test_weights_that_could_run_code_are_refused_by_name(store: ModelStore, folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"{name} could run code"):
        store.open(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_an_incomplete_folder_says_what_it_lacks(store: ModelStore, folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"no {name}"):
        store.open(str(folder))


@pytest.mark.parametrize("name", ["gpt-9", "org/gpt-9", "./nowhere", "~/nowhere-at-all"])
def test_a_missing_model_says_which_there_are(store: ModelStore, name: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct") as caught:
        store.ensure(name, Silent())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "..", "."])
def test_a_name_cannot_leave_the_store(store: ModelStore, name: str) -> None:
    with pytest.raises(ModelError):
        store.open(name)


def test_weights_identify_config_and_bytes_not_place_or_time(store: ModelStore, folder: Path) -> None:
    before = store.open(str(folder)).weights
    moved = folder.rename(folder.with_name("renamed"))
    os.utime(moved / "model.safetensors", (1, 1))
    config = moved / "config.json"
    config.write_text(json.dumps(dict(reversed(json.loads(config.read_text()).items())), indent=4))
    assert store.open(str(moved)).weights == before
    save_file({"w": np.arange(4, dtype=np.float32) + 1}, moved / "model.safetensors")
    changed = store.open(str(moved)).weights
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5}))
    assert len({before, changed, store.open(str(moved)).weights}) == 3


def test_checksums_of_a_users_folder_are_kept_under_home_only(store: ModelStore, folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    weights = store.open(str(folder)).weights
    assert sorted(folder.iterdir()) == before
    (kept,) = (tmp_path / "home" / "manifests").iterdir()
    kept.write_text(kept.read_text().replace(weights, "0" * 32))
    assert store.open(str(folder)).weights == "0" * 32, "the kept manifest was not used"
    kept.write_text("{")
    assert store.open(str(folder)).weights == weights


def test_a_home_that_cannot_be_written_only_costs_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    store = ModelStore(tmp_path / "home")
    assert store.open(str(folder)).weights == store.open(str(folder)).weights


def test_a_config_that_is_no_json_is_one_clear_line(store: ModelStore, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        store.open(str(folder))
