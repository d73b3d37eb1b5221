"""`headrace keys`, `tenants` and `accounts`, as a person uses them."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path

import pytest

from services.cli.database import with_keys
from services.cli.main import main
from services.cli.up.development_key import development_key
from services.edge.gate.keys import key_id, new_key
from services.edge.store.keys import SqlKeyStore
from services.edge.tenant import server_secret
from services.settings.settings import Settings
from tests.cli.conftest import Shell


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path


def test_create_list_rotate_revoke(headrace: Shell) -> None:
    text = headrace(
        "keys", "create", "--tenant", "acme", "--tier", "free", "--models", "a,b", "--rpm", "5", "--name", "ci"
    ).strip()
    key = key_id(text)
    assert key is not None
    (_, row) = headrace("keys", "list").splitlines()
    assert row.split()[:4] == [key, "acme", "free", "a,b"]
    assert "requests_per_minute=5" in row
    assert "valid" in row
    assert text not in row
    renewed = headrace("keys", "rotate", key, "--grace", "1h").strip()
    (_, old, new) = headrace("keys", "list", "--tenant", "acme").splitlines()
    assert "until" in old
    assert "requests_per_minute=5" in new
    assert headrace("keys", "revoke", key_id(renewed) or "") == ""
    assert "revoked" in headrace("keys", "list").splitlines()[2]
    assert "still valid" in headrace("keys", "rotate", key_id(renewed) or "", code=1)


def test_tenants(headrace: Shell) -> None:
    headrace("tenants", "limit", "acme", "--tpm", "1000", "--max-output", "50")
    assert "tokens_per_minute=1000 output_tokens=50" in headrace("tenants", "list")
    headrace("tenants", "limit", "acme", "--concurrent", "5", "--budget-day", "1000", "--budget-month", "20000")
    assert "concurrent=5 tokens_per_day=1000 tokens_per_month=20000" in headrace("tenants", "list")


def test_accounts(headrace: Shell) -> None:
    headrace("accounts", "limit", "acme", "--tier", "free", "--models", "a,b", "--rpm", "60", "--budget-day", "1000")
    headrace("accounts", "limit", "*", "--concurrent", "2")
    _, others, acme = headrace("accounts", "list").splitlines()
    assert acme.split() == ["acme", "free", "a,b", "requests_per_minute=60", "tokens_per_day=1000"]
    assert others.split() == ["*", "paid", "all", "concurrent=2"]
    headrace("accounts", "forget", "*")
    assert len(headrace("accounts", "list").splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("accounts", "limit", "a b"), 1),
        (("accounts", "forget", "nothing"), 1),
        (("keys", "create", "--tenant", "a b"), 1),
        (("keys", "revoke", "nothing"), 1),
        (("keys", "rotate", "nothing"), 1),
        (("tenants", "limit", "", "--rpm", "1"), 1),
        (("keys", "create", "--tenant", "a", "--name", "x" * 129), 1),
        (("keys", "create", "--tenant", "a", "--name", "two\nlines"), 1),
        (("keys", "create", "--tenant", "a", "--models", ""), 1),
        (("keys", "create", "--tenant", "a", "--models", "a,,b"), 1),
        (("accounts", "limit", "a", "--models", ","), 1),
        (("keys", "create", "--tenant", "a", "--name", "\udcff"), 2),
        (("keys", "list", "--tenant", "\udcff"), 2),
        (("keys", "revoke", "\udcff"), 2),
    ],
)
def test_mistakes_end_in_one_line(headrace: Shell, arguments: tuple[str, ...], code: int) -> None:
    assert headrace(*arguments, code=code).startswith("headrace: ")


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--tier", "gold"), ("--rpm", "0"), ("--rpm", "x"), ("--budget-day", "9" * 19), ("--tpm", "9" * 5000)),
        *(("--expires", "soon"), ("--expires", "5"), ("--expires", "999999999d"), ("--expires", "9" * 20 + "s")),
    ],
)
def test_flags_are_checked(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "create", "--tenant", "acme", *arguments])


def test_a_database_that_cannot_be_used(headrace: Shell, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HEADRACE_EDGE__DATABASE_URL", "mysql://x")
    assert "edge.database_url" in headrace("keys", "list", code=2)


def test_a_home_that_is_no_folder_is_named(headrace: Shell, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HEADRACE_HOME", str(home / "file"))
    assert "(edge.database_url: [Errno " in headrace("keys", "list", code=1)


def test_the_key_that_up_prints_stays_until_it_is_revoked(headrace: Shell, home: Path) -> None:
    settings = Settings(home=home)
    first = development_key(settings)
    assert development_key(settings) == first
    assert (home / "development.key").stat().st_mode & 0o077 == 0
    headrace("keys", "revoke", key_id(first) or "")
    assert development_key(settings) != first


def test_a_key_of_another_build_that_lives_too_long_hides_no_other(headrace: Shell, home: Path) -> None:
    made = new_key(server_secret(home), secrets.token_bytes)
    keep = partial(SqlKeyStore.create, key=made.id, digest=made.digest, tenant="acme", valid_s=1e14)
    with_keys(Settings(home=home), keep)
    assert "until 9999-12-31" in headrace("keys", "list")


def test_a_rotated_key_lives_no_longer_than_the_old_one(headrace: Shell) -> None:
    key = key_id(headrace("keys", "create", "--tenant", "acme", "--expires", "1d").strip()) or ""
    headrace("keys", "rotate", key)
    _, old, new = headrace("keys", "list").splitlines()
    assert "revoked" in old
    assert "until" in new
    assert "still valid" in headrace("keys", "rotate", key, code=1)
