"""One line of a table, and phrases that many lines share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Line(NamedTuple):
    """One line of a table. `of` names its fields or tables."""

    of: tuple[str, ...]
    holds: str
    how_long: str
    for_whom: str
    bounded_by: str
    tests: tuple[str, ...]


def line(of: str, holds: str, how_long: str, for_whom: str, bounded_by: str, tests: str) -> Line:
    """Makes a line. `of` has names, separated by spaces; "{a,b}" in a name means each in turn."""
    names = tuple(name for each in of.split() for name in expanded(each))
    return Line(names, holds, how_long, for_whom, bounded_by, tuple(tests.split()))


def expanded(name: str) -> Iterator[str]:
    """Yields a name for each choice in braces."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        yield name
        return
    for choice in match[1].split(","):
        yield from expanded(name[: match.start()] + choice + name[match.end() :])


ANSWER = "until the answer"
VERSION = "as long as the version, and the grace"
ROW = "as long as the layout's row"
NOTHING = "only a number or a flag"
QUEUED = "as long as the request"
TENANT, ACCOUNT, CALLER, SERVER = "the tenant", "the account", "the caller", "the server"
