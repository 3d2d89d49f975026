"""How a command says that it failed."""

from __future__ import annotations


class CommandFailed(Exception):
    """Ends the command with exit code 1; the message is what the user reads."""
