"""What a process is told at its command line: its settings and its id."""

from __future__ import annotations

import argparse
import json
import os
from random import SystemRandom

from schemas.identity import is_process, process_id
from services.cli.failure import CommandError
from services.clock import SystemClock
from services.settings.load import load
from services.settings.settings import Settings

SETTING_FLAGS = {
    "port": "HEADRACE_EDGE__PORT",
    "engine": "HEADRACE_WORKER__ENGINE",
    "store": "HEADRACE_STORE__URL",
}
"""A flag is a setting that is spelled shorter: it becomes the variable, is checked as one, and child processes inherit it."""


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings of this process, its flags included. Raises `SettingsError`."""
    for flag, variable in SETTING_FLAGS.items():
        value = getattr(arguments, flag, None)
        if value is not None:
            os.environ[variable] = value
    if models := getattr(arguments, "model", None):
        os.environ |= {"HEADRACE_MODEL": models[0], "HEADRACE_MODELS": json.dumps(models)}
    return load()


def process_of(arguments: argparse.Namespace) -> str:
    """The id we were given by whoever watches us, or a new one. Raises `CommandError`."""
    if arguments.id:
        if not is_process(arguments.id):
            raise CommandError(f"--id {arguments.id}: not a process id; leave it out and one is made")
        return str(arguments.id)
    try:
        return process_id(arguments.name, SystemClock().wall(), SystemRandom())
    except ValueError as error:
        raise CommandError(f"--name: {error}") from None
