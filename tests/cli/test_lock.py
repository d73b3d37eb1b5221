"""One `up` a home: the second is told who has it, and a dead one's lock is free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.failure import CommandError
from services.cli.up.lock import only_one

HOLD = """
import sys, time
from pathlib import Path
from services.cli.up.lock import only_one
with only_one(Path(sys.argv[1]), "process 7"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with only_one(home, "process 7"), pytest.raises(CommandError, match="process 7"), only_one(home, "mine"):
        pass
    with only_one(home, "mine"):
        assert (home / "up.lock").read_text() == "mine\n"


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CommandError), only_one(tmp_path, "mine"):
            pass
        holder.kill()
        holder.wait(10)
    with only_one(tmp_path, "mine"):
        pass


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="HEADRACE_HOME"), only_one(tmp_path / "file" / "home", "mine"):
        pass
