"""The commands and what can be said to each: `headrace <command> --help`. Knows nothing of what they do."""

from __future__ import annotations

import argparse

from schemas.job import Tier
from schemas.state import Role
from services.cli import parse, start
from services.cli.start import Command


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="headrace", description="Disaggregated LLM inference over NATS.")
    commands = top.add_subparsers(metavar="command", required=True)

    up = _command(commands, "up", "start everything on this machine", start.up)
    up.add_argument("--prefill", type=parse.processes, metavar="N", help="prefill workers (1; 0 with --both)")
    up.add_argument("--decode", type=parse.processes, metavar="N", help="decode workers (1; 0 with --both)")
    up.add_argument("--both", type=parse.processes, default=0, metavar="N", help="workers that prefill and decode (0)")
    up.add_argument("--router", type=parse.processes, default=1, metavar="N", help="routers (1)")
    up.add_argument("--edge", type=parse.processes, default=1, metavar="N", help="HTTP edges, on ports one after another (1)")
    up.add_argument(
        "--model",
        action="append",
        help="a known model, or a folder in Hugging Face layout; again for another one, with as many workers (HEADRACE_MODELS)",
    )
    up.add_argument("--port", help="the HTTP port, 0 for a free one (HEADRACE_EDGE__PORT)")
    up.add_argument("--engine", help="torch, scripted or trtllm (HEADRACE_WORKER__ENGINE)")
    up.add_argument("--nats-port", type=parse.port, default=0, metavar="PORT", help="the NATS port (a free one)")
    up.add_argument("--verbose", action="store_true", help="show everything the processes say, not only warnings")

    chat = _command(commands, "chat", "talk to a running Headrace (HEADRACE_URL, HEADRACE_API_KEY)", start.chat)
    chat.add_argument("prompt", nargs="*", help="one question; without it, a conversation")
    chat.add_argument("--model", help="the model to ask (the first that the server lists)")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="end an answer after so many tokens")
    chat.add_argument("--temperature", type=float, metavar="T", help="0 = the likeliest token always (the model's own)")
    chat.add_argument("--seed", type=int, metavar="N", help="the same seed and question give the same answer")

    worker = _service(commands, "worker", "run one worker", start.worker)
    worker.add_argument("--role", type=parse.role, metavar="|".join(Role), required=True, help="what it computes")
    _service(commands, "router", "run one router", start.router)
    _service(commands, "edge", "run one HTTP edge", start.edge)

    _model_commands(commands)
    verify = _command(commands, "verify", "compare an installed engine with what its adapter relies on", start.verify)
    verify.add_argument("engine", choices=["trtllm"])
    verify.add_argument("--package", metavar="FOLDER", help="of the package (where Python would find it)")
    _key_commands(commands)
    return top


def _model_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "models on this machine, and in the store (HEADRACE_STORE__URL)"
    models = commands.add_parser("models", help=about, description=about).add_subparsers(metavar="action", required=True)
    pull = _command(models, "pull", "put a model on this machine unless it is here", start.action("models", "pull"))
    known = "a model of the store; without a store, one that Headrace knows (HEADRACE_MODEL, or all of HEADRACE_MODELS)"
    pull.add_argument("which", nargs="?", metavar="model", help=known)
    push = _command(models, "push", "put a model of this machine into the store", start.action("models", "push"))
    push.add_argument("which", nargs="?", metavar="model", help="its name, or a folder in Hugging Face layout (HEADRACE_MODEL)")
    push.add_argument("--name", help="what to call it there (its own name)")
    listing = _command(
        models, "list", "list them, with their size and the identity of their weights", start.action("models", "show")
    )
    for command in (pull, push, listing):
        command.add_argument("--store", metavar="URL", help="such as s3://bucket/models (HEADRACE_STORE__URL)")


def _key_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser("keys", help="API keys").add_subparsers(metavar="action", required=True)
    create = _command(keys, "create", "make a key and print it, this once", start.action("keys", "create"))
    create.add_argument("--tenant", required=True, help="whose key it is")
    create.add_argument("--name", default="", help="what to call it in the list")
    create.add_argument("--expires", type=parse.duration, metavar="30d", help="how long it is valid (for ever)")
    _rights_flags(create)
    shown = _command(keys, "list", "list the keys, without their secrets", start.action("keys", "show"))
    shown.add_argument("--tenant", help="of this tenant only")
    _command(keys, "revoke", "end a key at once", start.action("keys", "revoke")).add_argument("id")
    rotate = _command(keys, "rotate", "make a key in another's place and print it", start.action("keys", "rotate"))
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace", type=parse.duration, default=0.0, metavar="1h", help="how long the old one still works (not at all)"
    )

    tenants = commands.add_parser("tenants", help="limits of tenants").add_subparsers(metavar="action", required=True)
    limit = _command(tenants, "limit", "set the limits of all keys of a tenant together", start.action("keys", "limit_tenant"))
    limit.add_argument("tenant")
    _limit_flags(limit)
    _command(tenants, "list", "list the tenants that have limits", start.action("keys", "show_tenants"))

    accounts = commands.add_parser("accounts", help="limits of callers over NATS").add_subparsers(metavar="action", required=True)
    told = _command(accounts, "limit", "set what an account's callers together may do", start.action("accounts", "limit"))
    told.add_argument("account", help="a NATS account, or '*' for all that were told nothing")
    _rights_flags(told)
    _command(accounts, "forget", "treat an account as any other again", start.action("accounts", "forget")).add_argument(
        "account"
    )
    _command(accounts, "list", "list the accounts that were told something", start.action("accounts", "show"))


def _rights_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tier", type=parse.tier, default=Tier.PAID, metavar="|".join(Tier), help=f"({Tier.PAID})")
    command.add_argument("--models", metavar="A,B", help="the models that may be used (all)")
    _limit_flags(command)


def _limit_flags(command: argparse.ArgumentParser) -> None:
    for flag, what in (
        ("--rpm", "requests a minute"),
        ("--tpm", "tokens a minute, of prompts and answers"),
        ("--concurrent", "requests that run at once"),
        ("--budget-day", "tokens a day (UTC), of prompts and answers"),
        ("--budget-month", "tokens a calendar month (UTC), of prompts and answers"),
        ("--max-prompt", "tokens of one prompt"),
        ("--max-output", "tokens of one answer"),
    ):
        command.add_argument(flag, type=parse.limit, metavar="N", help=f"{what}, at most (no limit)")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, run: Command
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=run)
    return command


def _service(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, run: Command
) -> argparse.ArgumentParser:
    service = _command(commands, name, summary, run)
    service.add_argument("--name", default=name, help=f"what this process is called ({name}); its id is name-<start>")
    service.add_argument("--id", help=argparse.SUPPRESS)
    return service
