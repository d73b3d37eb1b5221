"""Stacks of real processes, one for each set of settings, shared by the tests of a module; the plain ones by all modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.e2e.running import Up, started
from tests.text.tiny import write_tiny_model_folder

UP = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
READY_S = 120.0
PLAIN: tuple[tuple[str, ...], ...] = ((), ("--both", "1"))
"""Without settings, many modules ask for these. Each start costs seconds, each running one some of the machine: not for more."""

StartScripted = Callable[..., Up]


@contextmanager
def scripted_stacks(factory: pytest.TempPathFactory) -> Iterator[StartScripted]:
    """`start(*arguments, **settings)`: a stack with scripted engines over the tiny model; the same call gives the same one."""
    running: dict[tuple[object, ...], Up] = {}
    with ExitStack() as stack:

        def start(*arguments: str, **settings: str) -> Up:
            key = (arguments, tuple(sorted(settings.items())))
            if key not in running:
                folder = factory.mktemp("stack")
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


@pytest.fixture(scope="package")
def plain_stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartScripted]:
    """For modules that leave them as they found them."""
    with scripted_stacks(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartScripted]:
    """Of this module alone, to break."""
    with scripted_stacks(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def scripted_stack(own_stack: StartScripted, plain_stacks: StartScripted) -> StartScripted:
    """A plain one if that is asked for, else one of this module's own."""

    def start(*arguments: str, **settings: str) -> Up:
        return (plain_stacks if arguments in PLAIN and not settings else own_stack)(*arguments, **settings)

    return start
