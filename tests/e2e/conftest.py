"""Stacks of real processes, one for each set of settings, shared by the tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.running import Up, started
from tests.text.tiny import write_tiny_model_folder

UP = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
READY_S = 120.0

StartScripted = Callable[..., Up]


@pytest.fixture(scope="module")
def scripted_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartScripted]:
    """`start(*arguments, **settings)`: a stack with scripted engines over the tiny model; the same call gives the same one."""
    running: dict[tuple[object, ...], Up] = {}
    with ExitStack() as stack:

        def start(*arguments: str, **settings: str) -> Up:
            key = (arguments, tuple(sorted(settings.items())))
            if key not in running:
                folder = tmp_path_factory.mktemp("stack")
                model = folder / "tiny"
                write_tiny_model_folder(model)
                argv = [*UP, "--engine", "scripted", "--model", str(model), *arguments]
                up = stack.enter_context(started(argv, folder / "home", folder, env=settings))
                up.wait_ready(READY_S)
                running[key] = up
            return running[key]

        yield start
        for up in running.values():
            assert not up.violations, up.violations
