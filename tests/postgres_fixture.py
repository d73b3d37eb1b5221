"""A real PostgreSQL for tests: a temporary folder, a unix socket and no port, stopped whatever happens.

PostgreSQL refuses to run as root; there it runs as the user `postgres`, or `nobody`.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL

MISSING = "no PostgreSQL"
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0
_USER = "headrace"
_DATABASES = "postgres"
_FOLDERS = ("/usr/lib/postgresql", "/usr/local/opt", "/opt/homebrew/opt", "/usr")
"""Where distributions keep it, beside the path: Debian and its kin leave it out of the path."""


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`: of the path, else the newest of a distribution's. None: not installed."""
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).resolve().parent] if on_path is not None else []
    for folder in _FOLDERS:
        candidates += sorted(Path(folder).glob("*/bin"), key=_version, reverse=True)
    return next((each for each in candidates if all(os.access(each / name, os.X_OK) for name in ("initdb", "postgres"))), None)


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.parent.name.rpartition("@")[2].rpartition("-")[2].split(".") if part.isdigit())


class Postgres:
    """One server process over `folder`, made anew and removed at the end. Its socket is a file in it: keep the path short."""

    def __init__(self, bin_folder: Path) -> None:
        self._bin = bin_folder
        self._folder = Path(tempfile.mkdtemp(prefix="hr-pg-"))  # not pytest's: no other user may pass through that
        self._as = _another_user()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Returns when it answers. Raises RuntimeError with its log when it does not in time."""
        if self._as:
            shutil.chown(self._folder, self._as["user"], self._as["group"])
        data, log = self._folder / "data", self._folder / "log"
        made = [str(self._bin / "initdb"), "-D", str(data), "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, timeout=60, cwd=self._folder, **self._as)
        options = ("listen_addresses=", f"unix_socket_directories={self._folder}", "fsync=off", "max_connections=60")
        command = [str(self._bin / "postgres"), "-D", str(data), *(word for each in options for word in ("-c", each))]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, cwd=self._folder, **self._as)
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._psql("SELECT 1"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}")
            time.sleep(0.05)

    def new_database(self) -> URL:
        """An empty one."""
        name = f"test_{next(self._numbers)}"
        assert self._psql(f"CREATE DATABASE {name}")
        return URL.create("postgresql+asyncpg", _USER, database=name, query={"host": str(self._folder)})

    def stop(self) -> None:
        """At once, whoever is connected; the folder goes too."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)  # one that had to be killed may leave others that still write there

    def _psql(self, statement: str) -> bool:
        command = [str(self._bin / "psql"), "-h", str(self._folder), "-U", _USER, "-d", _DATABASES, "-qc", statement]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def _another_user() -> dict[str, Any]:
    """What makes a subprocess run as another user, where we are root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
