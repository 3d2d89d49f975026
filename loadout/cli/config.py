"""Settings that commands read from the environment, in addition to their options."""

from __future__ import annotations

import os

from loadout.cli.output import CommandFailed

_FORMER_VARIABLES = ("LOADOUT_TLS_CA", "LOADOUT_TLS_CERT", "LOADOUT_TLS_KEY")


def environment_token() -> str:
    """Returns LOADOUT_TOKEN, "" if it is not set. A token is no option: options show in `ps`."""
    return os.environ.get("LOADOUT_TOKEN", "").strip()


def environment_store() -> str:
    """Returns LOADOUT_STORE, "" if it is not set, for commands that have no --store."""
    return os.environ.get("LOADOUT_STORE", "").strip()


def check_environment() -> None:
    """Raises CommandFailed for a variable that is called otherwise now: without it a command might
    connect without TLS."""
    for name in _FORMER_VARIABLES:
        if name in os.environ:
            raise CommandFailed(f"{name} is now called {name}_FILE")
