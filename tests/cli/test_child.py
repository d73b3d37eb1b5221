"""One child: its output, its end, and that nothing of it outlives anybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.up.child import MAX_LINE, Child, describe
from tests.cli.programs import CRASHES, GOOD, PARENT, STUBBORN, alive, argv, until_now
from tests.waiting import until


async def start(source: str, lines: list[str]) -> Child:
    return await Child.start(argv(source), os.environ, lines.append)


async def test_exit_code_and_last_words_arrive() -> None:
    lines: list[str] = []
    child = await start(CRASHES, lines)
    assert await child.wait() == 3
    assert lines == ["out of luck"]


async def test_a_signal_is_a_negative_code() -> None:
    lines: list[str] = []
    child = await start(STUBBORN, lines)
    await until(lambda: lines)
    child.terminate()
    child.kill()
    assert await child.wait() == -signal.SIGKILL


async def test_terminate_lets_it_leave() -> None:
    lines: list[str] = []
    child = await start(GOOD, lines)
    await until(lambda: lines)
    child.terminate()
    assert await child.wait() == 0


async def test_lines_are_cut_at_newlines_and_never_endless() -> None:
    lines: list[str] = []
    child = await start(f"print('a\\r\\n\\nb'); print('x' * {3 * MAX_LINE}); print(end='no newline')", lines)
    assert await child.wait() == 0
    assert lines[:3] == ["a", "", "b"]
    assert "".join(lines[3:]) == "x" * (3 * MAX_LINE) + "no newline"
    assert max(map(len, lines)) <= 2 * MAX_LINE


async def test_bytes_that_are_no_text_do_not_stop_it() -> None:
    lines: list[str] = []
    child = await start("import sys; sys.stdout.buffer.write(b'\\xff\\xfeok\\n')", lines)
    assert await child.wait() == 0
    assert lines[0].endswith("ok")


async def test_what_a_child_started_ends_with_it() -> None:
    lines: list[str] = []
    child = await start(PARENT, lines)
    assert await child.wait() == 0
    await until(lambda: not alive(int(lines[0])))


async def test_a_missing_program_is_an_oserror() -> None:
    with pytest.raises(OSError):
        await Child.start(["no-such-program-here"], os.environ, print)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's leash is Linux only")
def test_a_child_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    source = (
        "import asyncio, os, sys\n"
        "from services.cli.up.child import Child\n"
        "from tests.cli.programs import STUBBORN, argv\n"
        "async def main():\n"
        "    child = await Child.start(argv(STUBBORN), os.environ, lambda line: print(child.pid, flush=True))\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert alive(child)
        supervisor.kill()
        until_now(lambda: not alive(child))


def test_ends_are_described() -> None:
    assert describe(3) == "exit code 3"
    assert describe(-9) == "killed by SIGKILL"
    assert describe(-200) == "killed by signal 200"
