"""Which processes run, told what, with whose password."""

from __future__ import annotations

import pytest

from services.cli.failure import CommandError
from services.cli.up.credentials import USERS
from services.cli.up.plan import Counts, Services, counts, plan
from services.settings.edge import EdgeSettings
from services.settings.nats import NatsSettings
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings

PASSWORDS = {user: f"secret-of-{user}" for user in USERS}
SETTINGS = Settings(
    model="m",
    edge=EdgeSettings(port=8123, admin_port=9123),
    nats=NatsSettings(prefix="hr2"),
    worker=WorkerSettings(engine="scripted"),
)
INHERITED = {"PATH": "/bin", "HEADRACE_NATS__PASSWORD": "an operator's", "HEADRACE_ROUTER__QUEUE_POLL_S": "0.2"}


def planned(asked: Counts) -> Services:
    return plan(SETTINGS, asked, "nats://127.0.0.1:4999", PASSWORDS, INHERITED)


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "expected"),
    [
        (None, None, 0, Counts(1, 1)),
        (2, 3, 0, Counts(2, 3)),
        (None, None, 1, Counts(0, 0, 1)),
        (1, None, 2, Counts(1, 0, 2)),
    ],
)
def test_counts(prefill: int | None, decode: int | None, both: int, expected: Counts) -> None:
    assert counts(prefill, decode, both) == expected


@pytest.mark.parametrize(("prefill", "decode"), [(0, None), (None, 0), (0, 0)])
def test_half_a_pair_serves_nothing(prefill: int | None, decode: int | None) -> None:
    with pytest.raises(CommandError, match="at least one prefill and one decode"):
        counts(prefill, decode, 0)


def test_names_and_arguments() -> None:
    services = planned(Counts(2, 1, 1))
    assert [program.name for program in services.all] == ["r1", "p1", "p2", "d1", "b1", "e1"]
    assert services.workers[1].argv[-5:] == ("worker", "--role", "prefill", "--name", "p2")
    assert services.routers[0].argv[-3:] == ("router", "--name", "r1")


def test_workers_are_told_how_many_share_the_machine() -> None:
    services = planned(Counts(2, 1, 1))
    assert {program.env["HEADRACE_WORKER__MACHINE_WORKERS"] for program in services.workers} == {"4"}
    assert "HEADRACE_WORKER__MACHINE_WORKERS" not in services.routers[0].env


def test_each_model_has_as_many_workers() -> None:
    settings = SETTINGS.model_copy(update={"models": ("m", "/folder/of/other")})
    services = plan(settings, Counts(2, 1), "nats://127.0.0.1:4999", PASSWORDS, INHERITED)
    told = {program.name: program.env["HEADRACE_MODEL"] for program in services.workers}
    assert told == {"p1": "m", "p2": "m", "d1": "m", "p3": "/folder/of/other", "p4": "/folder/of/other", "d2": "/folder/of/other"}
    assert {program.env["HEADRACE_MODELS"] for program in services.all} == {'["m", "/folder/of/other"]'}
    assert {program.env["HEADRACE_WORKER__MACHINE_WORKERS"] for program in services.workers} == {"6"}


def test_more_routers_and_edges() -> None:
    services = planned(Counts(1, 1, router=2, edge=3))
    assert [program.name for program in services.all] == ["r1", "r2", "p1", "d1", "e1", "e2", "e3"]
    assert [program.env["HEADRACE_EDGE__PORT"] for program in services.edges] == ["8123", "8124", "8125"]
    assert [program.env["HEADRACE_EDGE__ADMIN_PORT"] for program in services.edges] == ["9123", "9124", "9125"]


@pytest.mark.parametrize(("router", "edge"), [(0, 1), (1, 0)])
def test_without_a_router_or_an_edge_nothing_is_served(router: int, edge: int) -> None:
    with pytest.raises(CommandError, match="at least one router and one edge"):
        counts(1, 1, 0, router, edge)


def test_each_process_has_the_password_of_its_own_role_only() -> None:
    for program, user in zip(planned(Counts(1, 1, 1)).all, ("router", "prefill", "decode", "both", "edge"), strict=True):
        secrets = {value for value in program.env.values() if value.startswith("secret-of-")}
        assert secrets == {PASSWORDS[user]}
        assert program.env["HEADRACE_NATS__USER"] == user
        assert program.env["HEADRACE_NATS__PASSWORD"] == PASSWORDS[user]
        assert not any("secret" in argument for argument in program.argv)


def test_each_process_is_told_what_up_was_told() -> None:
    for program in planned(Counts(1, 1)).all:
        assert program.env["HEADRACE_MODEL"] == "m"
        assert program.env["HEADRACE_NATS__PREFIX"] == "hr2"
        assert program.env["HEADRACE_NATS__URL"] == "nats://127.0.0.1:4999"
        assert program.env["HEADRACE_WORKER__ENGINE"] == "scripted"
        assert program.env["HEADRACE_ROUTER__QUEUE_POLL_S"] == "0.2"
        assert program.env["PATH"] == "/bin"
