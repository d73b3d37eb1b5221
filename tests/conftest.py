"""Fixtures every folder may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models_fixture import default_model
from tests.nats_fixture import NatsCluster, NatsServer

__all__ = ["default_model"]


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
