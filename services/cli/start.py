"""What each command starts. Its module is imported only then, so that a router never loads torch and a chat starts at once."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from importlib import import_module

from services.cli.given import process_of, settings_of
from services.settings.settings import Settings

Command = Callable[[argparse.Namespace], int]


def up(arguments: argparse.Namespace) -> int:
    from services.cli.up.command import run

    return run(arguments, settings_of(arguments))


def chat(arguments: argparse.Namespace) -> int:
    from services.cli.chat import run

    return run(arguments)


def verify(arguments: argparse.Namespace) -> int:
    from services.cli.verify import run

    return run(arguments)


def worker(arguments: argparse.Namespace) -> int:
    from services.cli.process import run
    from services.cli.worker import serve

    async def serve_role(settings: Settings, process: str, stop: asyncio.Event, loaded: Callable[[], None]) -> None:
        await serve(settings, process, arguments.role, stop, loaded)

    return run(serve_role, settings_of(arguments), process_of(arguments))


def router(arguments: argparse.Namespace) -> int:
    from services.cli.process import run
    from services.router.service import serve

    return run(serve, settings_of(arguments), process_of(arguments))


def edge(arguments: argparse.Namespace) -> int:
    from services.cli.process import run
    from services.edge.service import serve

    return run(serve, settings_of(arguments), process_of(arguments))


def action(module: str, name: str) -> Command:
    """A function of `services.cli.<module>` that takes the arguments and the settings."""

    def run(arguments: argparse.Namespace) -> int:
        command: Callable[[argparse.Namespace, Settings], int] = getattr(import_module(f"services.cli.{module}"), name)
        return command(arguments, settings_of(arguments))

    return run
