"""`make up` as a newcomer runs it, and `headrace up` when things go wrong. Real processes, real NATS, real model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from services.models.store import ModelFiles
from tests.chaos.processes import kill, pid
from tests.e2e.running import ROOT, Up, started
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="what is left is read from /proc"),
]

UP = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
KUBERNETES = "Kubernetes is a software platform that enables scalable, distributed computing across the internet."
READY_S = 120.0


@pytest.fixture
def scripted(tmp_path: Path, default_model: ModelFiles) -> Iterator[Up]:
    """Everything up, with the engine that needs no weights."""
    with started([*UP, "--engine", "scripted", "--model", str(default_model.folder)], tmp_path / "home", tmp_path) as up:
        up.wait_ready(READY_S)
        yield up


@pytest.mark.timeout(1500)
def test_from_a_clean_clone_to_an_answer_and_down_again(tmp_path: Path) -> None:
    clone, home = tmp_path / "headrace", tmp_path / "home"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=120)
    command = ["make", "up", "PORT=0"]  # it takes a port when it is there, which may be many minutes from now
    with started(command, home, tmp_path, cwd=clone) as up:
        up.wait_ready(1200)
        assert up.model == "smollm2-135m-instruct"
        assert "MB to download" in up.out.read_text()
        assert _paste(up).startswith(KUBERNETES[:20])
        assert up.chat("--temperature", "0", "--max-tokens", "17", "What is Kubernetes?").strip() == KUBERNETES
        assert up.stop() in (0, 128 + signal.SIGINT, -signal.SIGINT)  # make reports the Ctrl-C it got itself
        up.assert_nothing_is_left()
        assert up.violations == []
        assert "Traceback" not in up.said
    with started(command, home, tmp_path, cwd=clone) as up:  # now everything is there
        up.wait_ready(READY_S)
        assert "Installing" not in up.said
        assert "Downloading" not in up.said
        up.stop()
        up.assert_nothing_is_left()


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_comes_back(scripted: Up) -> None:
    assert scripted.chat("--max-tokens", "4", "hello")
    victim = kill(scripted, "d1")
    _until(lambda: pid(scripted, "d1") not in (0, victim))
    # Between the two: what it complained of last, if it did.
    assert re.search(r"^d1: killed by SIGKILL(: .+)?; starting it again in 0\.25 s$", scripted.said, re.MULTILINE)
    _until(lambda: _ready(scripted))
    assert scripted.chat("--max-tokens", "4", "hello again")
    assert scripted.stop() == 0
    scripted.assert_nothing_is_left()
    assert scripted.violations == []


@pytest.mark.timeout(300)
def test_nothing_outlives_a_supervisor_that_is_killed(scripted: Up) -> None:
    assert len(scripted.processes()) == 6  # up, NATS, router, prefill, decode, edge
    scripted.process.kill()
    scripted.process.wait(PATIENCE_S)
    scripted.assert_nothing_is_left()


@pytest.mark.timeout(300)
def test_a_second_one_in_the_same_home_says_so(scripted: Up, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    with started(UP, scripted.home, second) as other:
        assert other.process.wait(60) == 1
        assert other.said.startswith("headrace: Headrace runs already in ")
        assert scripted.url in other.said
        assert other.said.count("\n") == 1
        assert _ready(scripted)


@pytest.mark.timeout(300)
def test_both_roles_in_one_worker(tmp_path: Path, default_model: ModelFiles) -> None:
    command = [*UP, "--both", "1", "--model", str(default_model.folder)]
    with started(command, tmp_path / "home", tmp_path) as up:
        up.wait_ready(READY_S)
        assert up.chat("--temperature", "0", "--max-tokens", "17", "What is Kubernetes?").strip() == KUBERNETES
        assert up.stop(signal.SIGTERM) == 0
        up.assert_nothing_is_left()
        assert up.violations == []


@pytest.mark.timeout(300)
def test_ctrl_c_lets_an_open_answer_end(tmp_path: Path, default_model: ModelFiles) -> None:
    command = [*UP, "--engine", "scripted", "--model", str(default_model.folder)]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "stream": True}
    slow = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.02"}
    with started(command, tmp_path / "home", tmp_path, env=slow) as up:
        up.wait_ready(READY_S)
        with httpx.stream("POST", f"{up.url}/v1/chat/completions", json={**body, "model": up.model}, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.killpg(up.process.pid, signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert up.process.wait(60) == 0
        assert "Stopping when the open answers are through" in up.said
        up.assert_nothing_is_left()


@pytest.mark.timeout(300)
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, default_model: ModelFiles) -> None:
    command = [*UP, "--engine", "scripted", "--model", str(default_model.folder)]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000, "stream": True}
    with started(command, tmp_path / "home", tmp_path, env={"HEADRACE_SCRIPTED__DECODE_STEP_S": "1"}) as up:
        up.wait_ready(READY_S)
        with httpx.stream("POST", f"{up.url}/v1/chat/completions", json={**body, "model": up.model}, timeout=60) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
            os.killpg(up.process.pid, signal.SIGINT)
            _until(lambda: "Ctrl-C again" in up.said)
            os.killpg(up.process.pid, signal.SIGINT)
            assert up.process.wait(25) == 0  # the edge alone would wait 30 s for an answer that takes 1,000
        up.assert_nothing_is_left()


@pytest.mark.timeout(300)
def test_passwords_are_on_no_command_line(scripted: Up) -> None:
    passwords = re.findall(r"[0-9a-f]{48}", (scripted.home / "nats" / "passwords.json").read_text())
    assert passwords
    for one in scripted.processes():
        command_line = Path(f"/proc/{one}/cmdline").read_text()
        assert not any(password in command_line for password in passwords)


def _paste(up: Up) -> str:
    """The text that the printed `curl` gives, run by a shell."""
    command = up.out.read_text().splitlines()[-1].replace('"max_tokens":300', '"temperature":0,"max_tokens":8')
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    return "".join(re.findall(r'"content":"([^"]+)"', done.stdout))


def _ready(up: Up) -> bool:
    return httpx.get(f"{up.url}/ready", timeout=PATIENCE_S).status_code == 200


def _until(condition: Callable[[], object], limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
