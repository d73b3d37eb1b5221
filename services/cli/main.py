"""`headrace <command>`: the arguments, and nothing else.

A command's module is imported only when the command runs, so that `headrace router` never loads torch and `headrace chat`
starts at once. Invariant: a person's mistake ends in one line on standard error, never in a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from random import SystemRandom

from schemas.identity import is_process, process_id
from schemas.job import Tier
from schemas.state import Role
from services.cli.failure import EXIT_FAILED, EXIT_USAGE, CommandError
from services.clock import SystemClock
from services.models.errors import ModelError
from services.settings.errors import SettingsError
from services.settings.load import load
from services.settings.settings import Settings

EXIT_INTERRUPTED = 130
_LONGEST_S = 36_525 * 86_400

Command = Callable[[argparse.Namespace], int]

SETTING_FLAGS = {
    "port": "HEADRACE_EDGE__PORT",
    "engine": "HEADRACE_WORKER__ENGINE",
    "store": "HEADRACE_STORE__URL",
}
"""A flag is a setting that is spelled shorter: it becomes the variable, is checked as one, and child processes inherit it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    if not all(map(_is_text, given)):
        return _fail(CommandError("an argument is not UTF-8"), EXIT_USAGE)
    arguments = parser().parse_args(given)
    try:
        command: Command = arguments.run
        return command(arguments)
    except SettingsError as error:
        return _fail(error, EXIT_USAGE)
    except (CommandError, ModelError, OSError) as error:  # a full disk says it well enough itself
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="headrace", description="Disaggregated LLM inference over NATS.")
    commands = top.add_subparsers(metavar="command", required=True)

    up = _command(commands, "up", "start everything on this machine", _up)
    up.add_argument("--prefill", type=_processes, metavar="N", help="prefill workers (1; 0 with --both)")
    up.add_argument("--decode", type=_processes, metavar="N", help="decode workers (1; 0 with --both)")
    up.add_argument("--both", type=_processes, default=0, metavar="N", help="workers that prefill and decode (0)")
    up.add_argument("--router", type=_processes, default=1, metavar="N", help="routers (1)")
    up.add_argument("--edge", type=_processes, default=1, metavar="N", help="HTTP edges, on ports one after another (1)")
    up.add_argument(
        "--model",
        action="append",
        help="a known model, or a folder in Hugging Face layout; again for another one, with as many workers (HEADRACE_MODELS)",
    )
    up.add_argument("--port", help="the HTTP port, 0 for a free one (HEADRACE_EDGE__PORT)")
    up.add_argument("--engine", help="torch, scripted or trtllm (HEADRACE_WORKER__ENGINE)")
    up.add_argument("--nats-port", type=_port, default=0, metavar="PORT", help="the NATS port (a free one)")
    up.add_argument("--verbose", action="store_true", help="show everything the processes say, not only warnings")

    chat = _command(commands, "chat", "talk to a running Headrace (HEADRACE_URL)", _chat)
    chat.add_argument("prompt", nargs="*", help="one question; without it, a conversation")
    chat.add_argument("--model", help="the model to ask (the first that the server lists)")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="end an answer after so many tokens")
    chat.add_argument("--temperature", type=float, metavar="T")
    chat.add_argument("--seed", type=int, metavar="N")

    worker = _service(commands, "worker", "run one worker", _worker)
    worker.add_argument("--role", type=Role, choices=list(Role), required=True)
    _service(commands, "router", "run one router", _router)
    _service(commands, "edge", "run one HTTP edge", _edge)

    _model_commands(commands)
    verify = _command(commands, "verify", "compare an installed engine with what its adapter relies on", _verify)
    verify.add_argument("engine", choices=["trtllm"])
    verify.add_argument("--package", metavar="FOLDER", help="of the package (where Python would find it)")
    _key_commands(commands)
    return top


def _model_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "models on this machine, and in the store (HEADRACE_STORE__URL)"
    models = commands.add_parser("models", help=about, description=about).add_subparsers(metavar="action", required=True)
    pull = _command(models, "pull", "put a model on this machine unless it is here", _models("pull"))
    known = "a model of the store; without a store, one that Headrace knows (HEADRACE_MODEL, or all of HEADRACE_MODELS)"
    pull.add_argument("which", nargs="?", metavar="model", help=known)
    push = _command(models, "push", "put a model of this machine into the store", _models("push"))
    push.add_argument("which", nargs="?", metavar="model", help="its name, or a folder in Hugging Face layout (HEADRACE_MODEL)")
    push.add_argument("--name", help="what to call it there (its own name)")
    listing = _command(models, "list", "list them, with their size and the identity of their weights", _models("show"))
    for command in (pull, push, listing):
        command.add_argument("--store", metavar="URL", help="such as s3://bucket/models (HEADRACE_STORE__URL)")


def _key_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser("keys", help="API keys").add_subparsers(metavar="action", required=True)
    create = _command(keys, "create", "make a key and print it, this once", _keys("create"))
    create.add_argument("--tenant", required=True, help="whose key it is")
    create.add_argument("--name", default="", help="what to call it in the list")
    create.add_argument("--expires", type=_duration, metavar="30d", help="how long it is valid (for ever)")
    _rights_flags(create)
    shown = _command(keys, "list", "list the keys, without their secrets", _keys("show"))
    shown.add_argument("--tenant", help="of this tenant only")
    _command(keys, "revoke", "end a key at once", _keys("revoke")).add_argument("id")
    rotate = _command(keys, "rotate", "make a key in another's place and print it", _keys("rotate"))
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace", type=_duration, default=0.0, metavar="1h", help="how long the old one still works (not at all)"
    )

    tenants = commands.add_parser("tenants", help="limits of tenants").add_subparsers(metavar="action", required=True)
    limit = _command(tenants, "limit", "limit all keys of a tenant together", _keys("limit_tenant"))
    limit.add_argument("tenant")
    _limit_flags(limit)
    _command(tenants, "list", "list the tenants that have limits", _keys("show_tenants"))

    accounts = commands.add_parser("accounts", help="limits of callers over NATS").add_subparsers(metavar="action", required=True)
    told = _command(accounts, "limit", "say what an account's callers together may do", _accounts("limit"))
    told.add_argument("account", help="a NATS account, or '*' for all that were told nothing")
    _rights_flags(told)
    _command(accounts, "forget", "treat an account as any other again", _accounts("forget")).add_argument("account")
    _command(accounts, "list", "list the accounts that were told something", _accounts("show"))


def _rights_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tier", type=_tier, default=Tier.PAID, metavar="|".join(Tier), help=f"({Tier.PAID})")
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
        command.add_argument(flag, type=_limit, metavar="N", help=f"{what}, at most (no limit)")


def _up(arguments: argparse.Namespace) -> int:
    from services.cli.up.command import run

    return run(arguments, _settings(arguments))


def _chat(arguments: argparse.Namespace) -> int:
    from services.cli.chat import run

    return run(arguments)


def _verify(arguments: argparse.Namespace) -> int:
    from services.cli.verify import run

    return run(arguments)


def _worker(arguments: argparse.Namespace) -> int:
    from services.cli.process import run
    from services.cli.worker import serve

    async def serve_role(settings: Settings, process: str, stop: asyncio.Event) -> None:
        await serve(settings, process, arguments.role, stop)

    return run(serve_role, _settings(arguments), _process(arguments))


def _router(arguments: argparse.Namespace) -> int:
    from services.cli.process import run
    from services.router.service import serve

    return run(serve, _settings(arguments), _process(arguments))


def _edge(arguments: argparse.Namespace) -> int:
    from services.cli.process import run
    from services.edge.service import serve

    return run(serve, _settings(arguments), _process(arguments))


def _keys(action: str) -> Command:
    def run(arguments: argparse.Namespace) -> int:
        from services.cli import keys

        command: Callable[[argparse.Namespace, Settings], int] = getattr(keys, action)
        return command(arguments, _settings(arguments))

    return run


def _models(action: str) -> Command:
    def run(arguments: argparse.Namespace) -> int:
        from services.cli import models

        command: Callable[[argparse.Namespace, Settings], int] = getattr(models, action)
        return command(arguments, _settings(arguments))

    return run


def _accounts(action: str) -> Command:
    def run(arguments: argparse.Namespace) -> int:
        from services.cli import accounts

        command: Callable[[argparse.Namespace, Settings], int] = getattr(accounts, action)
        return command(arguments, _settings(arguments))

    return run


def _settings(arguments: argparse.Namespace) -> Settings:
    """The settings of this process, its flags included. Raises `SettingsError`."""
    for flag, variable in SETTING_FLAGS.items():
        value = getattr(arguments, flag, None)
        if value is not None:
            os.environ[variable] = value
    if models := getattr(arguments, "model", None):
        os.environ |= {"HEADRACE_MODEL": models[0], "HEADRACE_MODELS": json.dumps(models)}
    return load()


def _process(arguments: argparse.Namespace) -> str:
    """The id we were given by whoever watches us, or a new one. Raises `CommandError`."""
    if arguments.id:
        if not is_process(arguments.id):
            raise CommandError(f"--id {arguments.id}: not a process id; leave it out and one is made")
        return str(arguments.id)
    try:
        return process_id(arguments.name, SystemClock().wall(), SystemRandom())
    except ValueError as error:
        raise CommandError(f"--name: {error}") from None


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


def _processes(text: str) -> int:
    return _number(text, 0, 256)


def _port(text: str) -> int:
    return _number(text, 0, 65535)


def _limit(text: str) -> int:
    return _number(text, 1, 10**15)  # sums of such numbers fit into any database


def _number(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from {least} to {most}")
    return int(text)


def _duration(text: str) -> float:
    """`90s`, `30m`, `12h` or `7d` in seconds."""
    amount, unit = text[:-1], {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if unit is None or not amount.isdecimal() or len(amount) > 10 or int(amount) * unit > _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no duration such as 90s, 30m, 12h or 7d, a century at most")
    return float(int(amount) * unit)


def _is_text(argument: str) -> bool:
    """Bytes that are no UTF-8 come as half characters, which nothing can print or store."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _tier(text: str) -> Tier:
    try:
        return Tier(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Tier)}") from None


def _fail(error: Exception, code: int) -> int:
    print(f"headrace: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
