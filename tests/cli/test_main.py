"""The command line: one line for a mistake, the right exit code, and nothing heavy imported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.identity import is_process, process_name
from services.cli.arguments import parser
from services.cli.failure import CommandError
from services.cli.given import process_of, settings_of
from services.cli.main import main


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of this machine, and none that `main` sets outlive a test."""
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")})
    os.environ["HEADRACE_HOME"] = str(tmp_path / "home")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: ")
    assert err.count("\n") == 1
    return err


def test_wrong_settings_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "many"]) == 2
    assert "edge.port" in one_line(capsys)


@pytest.mark.parametrize("engine", ["quantum", "TORCH"])
def test_an_unknown_engine_is_a_wrong_setting(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--engine", engine]) == 2
    assert "worker.engine" in one_line(capsys)


def test_a_busy_port_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["up", "--port", str(port)]) == 1
    assert f"port {port} of 127.0.0.1 is taken" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "port", "told"),
    [
        (["--edge", "2", "--port", "8000"], "8001", "port 8001 would be an edge's and another one's for operators"),
        (["--edge", "3", "--port", "65534"], "0", "none after 65535"),
    ],
)
def test_ports_that_cannot_be_are_one_line(
    arguments: list[str], port: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["HEADRACE_EDGE__ADMIN_PORT"] = port
    assert main(["up", *arguments]) == 1
    assert told in one_line(capsys)


def test_an_argument_that_is_no_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "\udcff"]) == 2
    assert "not UTF-8" in one_line(capsys)


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "0", "--model", "no-such-model"]) == 1
    assert "no-such-model" in one_line(capsys)


def test_models_of_the_command_line_count_more_than_all_others(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('model = "a"\nmodels = ["a", "b"]\n')
    os.environ |= {"HEADRACE_CONFIG": str(tmp_path / "headrace.toml"), "HEADRACE_MODEL": "b"}
    told = settings_of(parser().parse_args(["up", "--model", "c", "--model", "/folder/of/d"]))
    assert (told.model, told.served) == ("c", ("c", "/folder/of/d"))
    assert settings_of(parser().parse_args(["up", "--model", "e"])).served == ("e",)


def test_a_selection_that_cannot_be_kept_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "headrace.toml").write_text('[selection.aliases]\nx = "y"\ny = "x"\n')
    os.environ["HEADRACE_CONFIG"] = str(tmp_path / "headrace.toml")
    assert main(["up", "--port", "0"]) == 2
    assert "selection.aliases.x: leads back to itself" in one_line(capsys)


@pytest.mark.parametrize("arguments", [["up", "--prefill", "0", "--port", "0"], ["up", "--decode", "0", "--port", "0"]])
def test_half_a_pair_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert "at least one prefill and one decode" in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["fly"], ["worker"], ["worker", "--role", "cook"]),
        *(["up", "--decode", "-1"], ["up", "--prefill", "100000"], ["up", "--nats-port", "70000"]),
    ],
)
def test_wrong_arguments_are_a_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: headrace" in capsys.readouterr().err


def test_a_wrong_role_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "--role", "cook"])
    assert "'cook' is none of prefill, decode, both" in capsys.readouterr().err


def test_a_process_keeps_the_id_it_was_given_or_gets_one() -> None:
    given = parser().parse_args(["router", "--name", "r1", "--id", "r1-0k3v9x00abcde"])
    assert process_of(given) == "r1-0k3v9x00abcde"
    made = process_of(parser().parse_args(["router", "--name", "r1"]))
    assert is_process(made)
    assert process_name(made) == "r1"


@pytest.mark.parametrize("arguments", [["router", "--name", "R 1"], ["edge", "--id", "e1"]])
def test_a_bad_name_or_id(arguments: list[str]) -> None:
    with pytest.raises(CommandError):
        process_of(parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("services.cli.main", ("torch", "numpy", "nats", "fastapi", "httpx", "jinja2")),
        ("services.cli.up.command", ("torch", "fastapi", "transformers")),
        ("services.cli.chat", ("torch", "numpy", "nats", "fastapi")),
        ("services.cli.process", ("torch", "nats", "fastapi")),
    ],
)
def test_a_command_loads_only_what_it_needs(module: str, absent: tuple[str, ...]) -> None:
    source = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
