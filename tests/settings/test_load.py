"""Settings: where they come from, and that what is wrong is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import BaseModel

from services.settings.errors import SettingsError
from services.settings.load import load
from services.settings.settings import Settings


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_variables_win_over_the_file_and_the_file_over_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('model = "from-file"\n[edge]\nport = 9001\nhost = "0.0.0.0"\n')
    monkeypatch.setenv("HEADRACE_EDGE__PORT", "9002")
    settings = load()
    assert (settings.model, settings.edge.port, settings.edge.host) == ("from-file", 9002, "0.0.0.0")
    assert settings.worker.engine == "torch"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_MODLE", "x", "unknown variable HEADRACE_MODLE"),
        ("HEADRACE_EDGE__PROT", "1", "unknown key edge.prot"),
        ("HEADRACE_EDGE__PORT", "abc", "edge.port"),
        ("HEADRACE_EDGE__PORT", "99999", "edge.port"),
        ("HEADRACE_WORKER__ENGINE", "cuda", "worker.engine"),
        ("HEADRACE_NATS__URL", ",", "nats.url"),
        ("HEADRACE_NATS__URL", "nats://127.0.0.1:99999", "nats.url"),
        ("HEADRACE_STORE__URL", "ftp://host/x", "store.url"),
        ("HEADRACE_STORE__URL", "bucket/prefix", "store.url"),
        ("HEADRACE_STORE__URL", "s3:///prefix", "store.url"),
        ("HEADRACE_STORE__URL", "s3://key:secret@bucket/prefix", "store.url"),
        ("HEADRACE_STORE__URL", "s3://bucket/prefix?x=y", "store.url"),
        ("HEADRACE_STORE__URL", "file://host/x", "store.url"),
        ("HEADRACE_STORE__STALL_S", "0", "store.stall_s"),
        ("HEADRACE_STORE__PARALLEL", "0", "store.parallel"),
        ("HEADRACE_STORE__BUCKET", "b", "unknown key store.bucket"),
        ("HEADRACE_WORKER__MAX_BATCH", "9" * 9, "worker.max_batch"),
        ("HEADRACE_WORKER__STEP_TOKENS", "9" * 20, "worker.step_tokens"),
        ("HEADRACE_EDGE__DRAIN_TIMEOUT_S", "inf", "edge.drain_timeout_s"),
        ("HEADRACE_EDGE__TOTAL_DEADLINE_S", "nan", "edge.total_deadline_s"),
        ("HEADRACE_ROUTER__QUEUE_POLL_S", "1e300", "router.queue_poll_s"),
        ("HEADRACE_SCRIPTED__DECODE_STEP_S", "inf", "scripted.decode_step_s"),
        ("HEADRACE_CONFIG", "missing.toml", "there is no file missing.toml"),
        ("HEADRACE_HOME", "~nobody-of-this-name/x", "home: Could not determine"),
        ("HEADRACE_MODEL", "~nobody-of-this-name/x", "model: "),
        ("HEADRACE_MODELS", "a,~nobody-of-this-name/x", "models"),
        ("HEADRACE_MODELS", "[" * 20_000, "wrong settings: "),
        ("HEADRACE_EDGE", '{"port": 7', '^wrong settings: .*"edge"'),
        ("HEADRACE_EDGE__HOST", "a" * 64, "edge.host"),
        ("HEADRACE_EDGE__ADMIN_HOST", "a..b", "edge.admin_host"),
        ("HEADRACE_WORKER__TRANSFER_HOST", ".", "worker.transfer_host"),
        ("HEADRACE_NATS__URL", "nats://a..b:4222", "nats.url"),
        ("HEADRACE_NATS__URL", "nats://:4222", "nats.url"),
        ("HEADRACE_EDGE__ADMIN_PORT", "8000", "admin_port: 8000 is edge.port already"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=message):
        load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[edge]\nprot = 1\n", "unknown key edge.prot"),
        ("colour = 1\n", "unknown key colour"),
        ("[edge]\nport = 0.5\n", "edge.port"),
        ("[edge\n", "headrace.toml"),
        ("[Edge]\nport = 1\n", "unknown key Edge"),
        ('model = "a"\nModel = "b"\n', "unknown key Model"),
        ("[edge]\nport = 1\nport = 2", r"headrace.toml: .* \(at line 3, column 9\): port"),
        ("[edge]\nhost = 'x'\n[ edge ]\n", r"headrace.toml: .*: edge"),
        ('[nats]\npassword = "s=cret\n', "headrace.toml: .*: password$"),
        ("[edge]\nport = true\n", "edge.port: true and false"),
        ("[edge]\nqueue_deadline_s = true\n", "edge.queue_deadline_s: true and false"),
        ("[edge.model_prices]\nm = true\n", "edge.model_prices.m: true and false"),
        ("schema_version = true\n", "schema_version: true and false"),
        ('model = "a\\u0000b"\n', "model: holds a NUL"),
        ('home = "a\\u0000b"\n', "home: holds a NUL"),
        ('models = ["a", "b\\u0000"]\n', "models: holds a NUL"),
        ('[edge]\nhost = "a\\u0000b"\n', "edge.host: holds a NUL"),
        ('[selection.aliases]\n"a\\u0000" = "b"\n', "selection.aliases: holds a NUL"),
        ("a = " + "[" * 20_000, "headrace.toml"),
        ("[edge]\nport = " + "9" * 5000, "headrace.toml"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "headrace.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load()


def _keys(section: type[BaseModel] = Settings) -> Iterator[tuple[str, ...]]:
    """Every key, with the sections it is in."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from ((name, *key) for key in _keys(inner))
        else:
            yield (name,)


@pytest.mark.parametrize("key", list(_keys()), ids=".".join)
def test_any_value_of_any_key_is_taken_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: tuple[str, ...]) -> None:
    """Whatever is written there: settings, or one line that says what is wrong."""
    file, variable = tmp_path / "headrace.toml", "HEADRACE_" + "__".join(key).upper()
    for value in (
        "x",
        "-1",
        "0",
        "1e400",
        "nan",
        "9" * 5000,
        "[",
        "{}",
        "[1]",
        "null",
        "a..b",
        "~nobody-of-this-name",
        "\x7f",
        " ",
    ):
        monkeypatch.setenv(variable, value)
        _taken_or_named()
    monkeypatch.delenv(variable)
    for written in (
        "-1",
        "1.5",
        "inf",
        "nan",
        '""',
        '"a\\u0000b"',
        "true",
        "[]",
        "[[1]]",
        "{}",
        "{ a = 1 }",
        "1979-05-27",
        '["~nobody-of-this-name"]',
    ):
        file.write_text(f"{'.'.join(key)} = {written}\n")
        _taken_or_named()


def _taken_or_named() -> None:
    with suppress(SettingsError):
        settings = load()
        assert settings.home_dir
        assert settings.served_names


def test_where_the_chat_goes_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HEADRACE_API_KEY", "hr-key")
    load()
