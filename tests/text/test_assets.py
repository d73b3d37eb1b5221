"""The many spellings of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.text.assets import GenerationDefaults, TextError, read_assets
from services.text.tokenizer import Tokenizer
from tests.text.tiny import END, TEMPLATE, write_tiny_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model_folder(tmp_path / "tiny")


def amend(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_plain_folder(folder: Path) -> None:
    assets = read_assets(folder)
    assert (assets.chat_template, assets.eos_ids) == (TEMPLATE, {END})
    assert assets.special_tokens == {"eos_token": "<|end|>"}


def test_generation_config_wins_over_config_and_the_turn_s_end_is_added(folder: Path) -> None:
    amend(folder / "config.json", eos_token_id=3)
    assert read_assets(folder).eos_ids == {3, END}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_assets(folder).eos_ids == {1, 2, END}


@pytest.mark.parametrize(
    ("config", "temperature", "top_p"),
    [
        ({"temperature": 0.2, "top_p": 0.9}, 0.2, 0.9),
        ({}, 1.0, 1.0),
        ({"temperature": 7, "top_p": 0}, 1.0, 1.0),
        ({"temperature": "hot", "top_p": None}, 1.0, 1.0),
    ],
)
def test_the_makers_defaults(folder: Path, config: dict[str, object], temperature: float, top_p: float) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert read_assets(folder).generation == GenerationDefaults(temperature, top_p)


def test_special_tokens_written_as_objects(folder: Path) -> None:
    amend(folder / "tokenizer_config.json", bos_token={"content": "<|user|>", "lstrip": False}, pad_token=None)
    assert read_assets(folder).special_tokens == {"eos_token": "<|end|>", "bos_token": "<|user|>"}


def test_where_chat_templates_hide(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    amend(folder / "tokenizer_config.json", chat_template=named)
    assert read_assets(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("own")
    assert read_assets(folder).chat_template == "own"


def test_no_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        read_assets(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_broken_json_names_the_file(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TextError, match=r"tokenizer_config\.json"):
        read_assets(folder)


def test_a_tokenizer_from_a_folder(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.size == 266
    assert tokenizer.decode(tokenizer.encode("hello wörld")) == "hello wörld"
    assert tokenizer.token_bytes(tokenizer.encode(" w")[0]) == b" w"
    assert tokenizer.token_bytes(END) == b""
