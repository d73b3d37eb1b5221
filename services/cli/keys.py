"""`headrace keys` and `headrace tenants`: API keys and limits in the edges' database, from the shell of whoever runs it.

Works on the database and the home folder's secret directly, so that keys can be made before anything runs. A key's text is
printed once, by the command that makes it.
"""

from __future__ import annotations

import argparse
import re
import secrets
from datetime import UTC, datetime

from services.cli.database import with_keys
from services.cli.failure import CommandError
from services.cli.rights import limits_of, models_of, print_table, spell, spell_models
from services.edge.gate.keys import new_key
from services.edge.gate.records import KeyRecord, Unreadable
from services.edge.store.database import LONGEST_NAME
from services.edge.store.keys import SqlKeyStore
from services.edge.tenant import server_secret
from services.settings.settings import Settings

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LAST_TIME = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def create(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print a new key's text."""
    tenant, models = _tenant(arguments.tenant), models_of(arguments)
    if len(arguments.name) > LONGEST_NAME or not arguments.name.isprintable():
        raise CommandError(f"a key's name is one line of {LONGEST_NAME} characters at most")
    made = new_key(server_secret(settings.home_dir), secrets.token_bytes)

    async def work(keys: SqlKeyStore) -> None:
        await keys.create(
            made.id,
            made.digest,
            tenant,
            name=arguments.name,
            tier=arguments.tier,
            models=models,
            limits=limits_of(arguments),
            valid_s=arguments.expires,
        )
        print(made.text)

    with_keys(settings, work)
    return 0


def show(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print a table of all keys."""

    async def work(keys: SqlKeyStore) -> None:
        columns = ("id", "tenant", "tier", "models", "limits", "state", "created", "name")
        print_table([columns, *map(_row, await keys.all(arguments.tenant))])

    with_keys(settings, work)
    return 0


def revoke(arguments: argparse.Namespace, settings: Settings) -> int:
    """The key is refused from now on, by every edge within a few seconds."""

    async def work(keys: SqlKeyStore) -> None:
        if not await keys.end(arguments.id):
            raise CommandError(f"there is no key {arguments.id}")

    with_keys(settings, work)
    return 0


def rotate(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print a new key that may do what the old one may, for as long as it might; the old one ends after the grace period."""
    made = new_key(server_secret(settings.home_dir), secrets.token_bytes)

    async def work(keys: SqlKeyStore) -> None:
        old = await keys.get(arguments.id)
        now = datetime.now(UTC).timestamp()
        if old is None or not old.valid(now):
            raise CommandError(f"there is no key {arguments.id} that is still valid")
        valid_s = None if old.expires is None else old.expires - now
        await keys.create(
            made.id,
            made.digest,
            old.tenant,
            name=old.name,
            tier=old.tier,
            models=old.models,
            limits=old.limits,
            valid_s=valid_s,
        )
        await keys.end(old.id, arguments.grace)
        print(made.text)

    with_keys(settings, work)
    return 0


def limit_tenant(arguments: argparse.Namespace, settings: Settings) -> int:
    """All keys of a tenant together get these limits, in place of those they had."""
    tenant, limits = _tenant(arguments.tenant), limits_of(arguments)

    async def work(keys: SqlKeyStore) -> None:
        await keys.limit_tenant(tenant, limits)

    with_keys(settings, work)
    return 0


def show_tenants(_: argparse.Namespace, settings: Settings) -> int:
    """Print the tenants that have limits."""

    async def work(keys: SqlKeyStore) -> None:
        rows = [(tenant, spell(limits)) for tenant, limits in (await keys.tenant_limits()).items()]
        print_table([("tenant", "limits"), *rows])

    with_keys(settings, work)
    return 0


def _tenant(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise CommandError("a tenant's name is 1 to 64 letters, digits, '.', '_' or '-'")
    return name


def _row(record: KeyRecord | Unreadable) -> tuple[str, ...]:
    if isinstance(record, Unreadable):
        return (record.id, "", "", "", "", "made by another version", "", "")
    limits, created = spell(record.limits), _time(record.created)
    return (record.id, record.tenant, record.tier, spell_models(record.models), limits, _state(record), created, record.name)


def _state(record: KeyRecord) -> str:
    if record.revoked is not None:
        return f"revoked {_time(record.revoked)}"
    return "valid" if record.expires is None else f"until {_time(record.expires)}"


def _time(when: float) -> str:
    return datetime.fromtimestamp(min(when, _LAST_TIME), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
