"""What a bench cannot run with is refused before it runs, and the last line says which flag it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bench import router_decision, routing

STRANGE = ("0", "-1", "nan", "inf", "many", "")
FLAGS = [
    *((routing.main, flag) for flag in ("--loads", "--peak", "--rows", "--prefill-workers", "--batch", "--decode-kv")),
    *((routing.main, flag) for flag in ("--prefill-rate", "--step", "--queue-step", "--limit-ttft", "--limit-itl")),
    *((router_decision.main, flag) for flag in ("--decisions", "--workers", "--tokens")),
]


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize(("main", "flag"), FLAGS)
def test_strange_numbers(main: Callable[[Sequence[str]], int], flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trace", "none", f"{flag}={value}"] if main is routing.main else [f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"argument {flag}: {value!r} is no " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--prefill-cache", "--step-per-sequence"])
def test_what_may_be_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert routing.main(["--trace", "/nowhere", f"{flag}=0"]) == 2
    assert capsys.readouterr().err == "/nowhere: No such file or directory\n"


def test_more_tokens_than_a_worker_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        router_decision.main(["--tokens", "131072"])
    assert "from 1 to 131071" in capsys.readouterr().err
