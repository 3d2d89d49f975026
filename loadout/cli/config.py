"""What a command takes from the environment and must not be an option: those show in `ps`."""

from __future__ import annotations

import os


def environment_token() -> str:
    """LOADOUT_TOKEN, "" if it is not set."""
    return os.environ.get("LOADOUT_TOKEN", "").strip()
