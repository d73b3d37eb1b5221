"""Fixtures every folder may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.models_fixture import default_model
from tests.nats_fixture import NatsCluster, NatsServer
from tests.postgres_fixture import MISSING, Postgres, binaries
from tests.s3_fixture import S3, MotoServer
from tests.steady_time import steady_time

__all__ = ["default_model"]

# How long an example takes is the machine's affair, not the test's.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(scope="session", autouse=True)
def _steady_time() -> Iterator[None]:
    with steady_time():
        yield


@pytest.fixture(scope="module")
def nothing_left_over() -> None:
    """For tests in which nobody may log an error: what earlier ones left, such as a task whose failure nobody asked for, says so
    when it is collected, whenever that is. Now."""
    gc.collect()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for all tests that leave it as they found it."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of this test's own, to stop, kill, pause or fill."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    """Three servers of this test's own."""
    cluster = NatsCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for all tests; each makes a database of its own. Where it is not installed they are skipped, but not in CI."""
    found = binaries()
    if found is None:
        if os.environ.get("CI") in ("true", "1"):
            pytest.fail(f"{MISSING}: install it, its tests are not skipped with CI=true")
        pytest.skip(MISSING)
    server = Postgres(found)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One server for all tests; each makes a bucket of its own."""
    server = MotoServer(tmp_path_factory.mktemp("s3"))
    try:
        yield server.start()
    finally:
        server.kill()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was not tested is said, however quiet pytest is."""
    if any(MISSING in str(report.longrepr) for report in terminalreporter.getreports("skipped")):
        terminalreporter.write_line(f"skipped: {MISSING}")
