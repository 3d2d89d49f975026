"""Suggestions for an adapter that is not there: close names of the same tenant, or the versions
that there are. The services themselves say only that it is not there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from itertools import islice

from loadout.cli.output import CommandFailed, number_ranges
from loadout.client import Client
from loadout.errors import LoadoutError, NotFound

MAX_NAMES = 100
"""How many names are compared of all that begin alike."""

_MISSING = re.compile(r"no adapter ([a-z0-9._-]+)/([A-Za-z0-9._-]+)(?:@([0-9]+))?\b")


def suggest(error: NotFound, open_client: Callable[[], Client]) -> str:
    """Returns an addition to the error, "" for none: also if the store does not answer, or the
    caller may not read there."""
    found = _MISSING.search(error.message)
    if found is None:
        return ""
    tenant, name, version = found.groups()
    try:
        with open_client() as client:
            versions = _versions(client, f"{tenant}/{name}") if version else ""
            return versions or _names(client, tenant, name)
    except (LoadoutError, CommandFailed):
        return ""


def _versions(client: Client, name: str) -> str:
    try:
        page = client.version_page(name)
    except NotFound:
        return ""
    numbers = sorted(each.version for each in page.adapters if each.delete_time is None)
    more = "the newest are" if page.next_page_token else "there are"
    return f"{more} versions {number_ranges(numbers)}" if numbers else ""


def _names(client: Client, tenant: str, name: str) -> str:
    for prefix in dict.fromkeys((name[: len(name) // 2], name[:1])):
        known = list(islice(_begin_with(client, tenant, prefix), MAX_NAMES))
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            return f"did you mean {tenant}/{close[0]}?"
    return ""


def _begin_with(client: Client, tenant: str, prefix: str) -> Iterator[str]:
    filtered = f"tenant={tenant} name={prefix}".removesuffix(" name=")
    for adapter in client.list(filtered, page_size=MAX_NAMES):
        yield adapter.name.partition("/")[2]
