"""What a caller may do, as flags of a command and as text in a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from services.cli.failure import CommandError
from services.edge.gate.limits import Limits


def limits_of(arguments: argparse.Namespace) -> Limits:
    return Limits(
        requests_per_minute=arguments.rpm,
        tokens_per_minute=arguments.tpm,
        concurrent=arguments.concurrent,
        tokens_per_day=arguments.budget_day,
        tokens_per_month=arguments.budget_month,
        prompt_tokens=arguments.max_prompt,
        output_tokens=arguments.max_output,
    )


def models_of(arguments: argparse.Namespace) -> frozenset[str] | None:
    """None = all, which nobody gets by an empty value. Raises `CommandError`."""
    if arguments.models is None:
        return None
    names = frozenset(name.strip() for name in arguments.models.split(","))
    if not all(name and name.isprintable() for name in names):
        raise CommandError("--models: names with commas between them; leave it out for all models")
    return names


def spell(limits: Limits) -> str:
    return " ".join(f"{name}={value}" for name, value in msgspec.to_builtins(limits).items()) or "none"


def spell_models(models: frozenset[str] | None) -> str:
    return "all" if models is None else ",".join(sorted(models))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
