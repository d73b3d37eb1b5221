"""`headrace accounts`: what callers of each NATS account may do, in the edges' database, from the shell of whoever runs it."""

from __future__ import annotations

import argparse
import re

from services.cli.database import with_database
from services.cli.failure import CommandError
from services.cli.rights import limits_of, models_of, print_table, spell, spell_models
from services.edge.gate.records import ANY, AccountRecord, Unreadable
from services.edge.store.accounts import SqlAccountStore
from services.edge.store.database import Database
from services.settings.settings import Settings

_NAME = re.compile(r"[!-~]{1,64}")
"""Also `ANY`. NATS takes any word for an account's name, or a key of 56 characters."""


def limit(arguments: argparse.Namespace, settings: Settings) -> int:
    """The account's callers together get these limits, tier and models, in place of those they had."""
    if not _NAME.fullmatch(arguments.account):
        raise CommandError(
            f"an account's name is 1 to 64 characters without spaces, or '{ANY}' for all that have no limits of their own"
        )
    record = AccountRecord(arguments.account, arguments.tier, models_of(arguments), limits_of(arguments))

    async def work(database: Database) -> None:
        await SqlAccountStore(database).set(record)

    with_database(settings, work)
    return 0


def forget(arguments: argparse.Namespace, settings: Settings) -> int:
    """The account is treated as any other again."""

    async def work(database: Database) -> None:
        if not await SqlAccountStore(database).delete(arguments.account):
            raise CommandError(f"there are no limits of account {arguments.account}")

    with_database(settings, work)
    return 0


def show(_: argparse.Namespace, settings: Settings) -> int:
    """Print the accounts that were told what they may do."""

    async def work(database: Database) -> None:
        rows = [_row(name, record) for name, record in (await SqlAccountStore(database).all()).items()]
        print_table([("account", "tier", "models", "limits"), *rows])

    with_database(settings, work)
    return 0


def _row(name: str, record: AccountRecord | Unreadable) -> tuple[str, ...]:
    if isinstance(record, Unreadable):
        return (name, "", "", "made by another version")
    return (name, record.tier, spell_models(record.models), spell(record.limits))
