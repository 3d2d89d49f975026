"""Services and engines as processes that start at once: forks of one that has imported them.

Importing torch and a service takes seconds of processor time, and a run of the tests starts them
hundreds of times. One process imports, for all workers of a run. It forks on request, over a
socket, and reports how each fork ended. Settings, logs, signals and exit codes are the same as with
`python -m`. Only the parent differs: an engine is a child of this process, not of its service.

__main__  serves as the process that forks
callers   the callers' side: processes that are forks, started, awaited and ended
cli       `loadout`, whose downloads and the parts of whose systems are forks
program   `loadout` in shells, which has a fork run the command
replaced  processes of the product that are forks meanwhile
request   what a caller sends to the process that forks
server    the process that forks
"""

from tests.support.forks.callers import (
    ADDRESS,
    Fork,
    ForkedProcess,
    address,
    engine_of,
    engines_of,
    piped,
    programs,
    run,
    start,
    variables,
)
from tests.support.forks.replaced import (
    fork_engines,
    forked_commands,
    forked_downloads,
    forked_engines,
    forked_ranks,
    forked_system,
    rank_command,
)
from tests.support.forks.request import CLI, EXECUTED_RANKS, WATCHFUL, Request

__all__ = [
    "ADDRESS",
    "CLI",
    "EXECUTED_RANKS",
    "WATCHFUL",
    "Fork",
    "ForkedProcess",
    "Request",
    "address",
    "engine_of",
    "engines_of",
    "fork_engines",
    "forked_commands",
    "forked_downloads",
    "forked_engines",
    "forked_ranks",
    "forked_system",
    "piped",
    "programs",
    "rank_command",
    "run",
    "start",
    "variables",
]
