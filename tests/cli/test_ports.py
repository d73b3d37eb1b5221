import socket

import pytest

from services.cli.up import ports
from services.cli.up.ports import LAST_PORT, free_port, free_ports, port_is_free


def test_ports_in_a_row_are_all_free_and_none_is_one_to_avoid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a crowded machine: every tenth port is taken, every other tenth is somebody's to be."""
    monkeypatch.setattr(ports, "port_is_free", lambda host, port: port % 10 != 0)
    for _ in range(50):
        row = free_ports(4, avoid={port for port in range(LAST_PORT) if port % 10 == 5})
        assert list(row) == [row[0], row[0] + 1, row[0] + 2, row[0] + 3]
        assert not {port % 10 for port in row} & {0, 5}


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert not port_is_free("127.0.0.1", server.getsockname()[1])
    assert not port_is_free("127.0.0.1", LAST_PORT + 1)


def test_an_address_of_another_machine_is_told_apart_from_a_port_that_is_taken() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.1:8000: Cannot assign"):
        port_is_free("203.0.113.1", 8000)


@pytest.mark.parametrize("count", [4, 10**6])
def test_no_free_ports_is_said_and_not_tried_for_ever(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "port_is_free", lambda host, port: False)
    with pytest.raises(OSError, match=f"no {count} free ports in a row"):
        free_ports(count)
