"""What a caller sends to the process that forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENGINE, RANK = "engine", "rank"
CLI = "loadout.cli"
MAX_FILES = 64
"""The descriptors that travel with a request, at most."""
WATCHFUL = "LOADOUT_TEST_WATCHFUL=1"
"""The variable of services that strangers attack. Others look at their sockets ten times less often
while they are called, and fifty times less often while they are idle: the looks are up to 5 % of a
core, for as long as tests share a service."""
EXECUTED_RANKS = "LOADOUT_TEST_EXECUTED_RANKS"
"""Where this variable is set, engines and nodes that are forks start programs as ranks, as
elsewhere."""


@dataclass(frozen=True, slots=True)
class Request:
    """The program of a fork: `python -m module arguments`, a file, or an engine. The descriptors
    of its standard streams travel with it."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    volume_pid: int | None = None
    max_files: int = 1024
    imports: Sequence[str] = ()
    """Modules that the process which forks imports first, for this fork and all later ones."""
    files: Sequence[int] = ()
    """Further descriptors, which have the same numbers in the fork."""
    ends_with_caller: bool = False
    """The fork is killed once nobody can wait for it any more."""
