"""A real nats-server with infra/nats/: our account with its roles, and tenants' accounts as tenants.conf describes them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from services.cli.up.credentials import load_or_create
from services.cli.up.nats import NatsPlan, binary, write_config
from tests.ports import free_ports
from tests.waiting import PATIENCE_S

_TENANT = """
{name} {{
  users: [ {{ user: {name}, password: {name} }} ]
  imports: [
    {{ service: {{ account: HEADRACE, subject: "hr.v1.chat.completions" }}, share: true }}
    {{ service: {{ account: HEADRACE, subject: "hr.v1.cancel.*" }}, share: true }}
  ]
}}
"""


class AccountServer:
    """A tenant's user and password are its name. `plain` is a user of our own account that may do anything."""

    def __init__(self, folder: Path, tenants: Sequence[str] = ()) -> None:
        self.plan = NatsPlan(folder, *free_ports(2))
        self.passwords = dict(load_or_create(folder))
        (folder / "tenants.conf").write_text("".join(_TENANT.format(name=name) for name in tenants))
        self._config = write_config(self.plan, self.passwords)
        permissions = folder / "permissions.conf"
        ours, users, roles = permissions.read_text().partition("users: [\n      {\n        user: edge,")
        permissions.write_text(f"{ours}users: [ {{ user: plain, password: plain }}\n{users.removeprefix('users: [')}{roles}")
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.plan.url

    @property
    def log(self) -> str:
        return self._log.read_text()

    def restart(self) -> None:
        """kill -9, and a new start that knows nothing of before."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self.__enter__()

    def __enter__(self) -> AccountServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([binary(), "-c", str(self._config)], stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while "Server is ready" not in self.log:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
