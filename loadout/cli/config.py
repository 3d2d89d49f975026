"""Settings that commands read from the environment, in addition to their options."""

from __future__ import annotations

import os


def environment_token() -> str:
    """Returns LOADOUT_TOKEN, "" if it is not set. A token is no option: options show in `ps`."""
    return os.environ.get("LOADOUT_TOKEN", "").strip()


def environment_store() -> str:
    """Returns LOADOUT_STORE, "" if it is not set, for commands that have no --store."""
    return os.environ.get("LOADOUT_STORE", "").strip()
