"""Makes the parts of a debug bundle: one JSON document each, and the metrics, without secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from importlib.metadata import distributions
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel

from servicekit.telemetry.recent_errors import describe_bug, format_time
from servicekit.telemetry.redact import Redactor

logger = logging.getLogger(__name__)

MAX_ROWS = 1000
"""Rows of anything, such as pulls in progress, in one part."""
PART_SECONDS = 5.0
"""Time limit for making one part."""

PartMaker: TypeAlias = Callable[[], Awaitable[Any]]
"""Returns a part's content: text, or an object that JSON can express."""


class Part(NamedTuple):
    """Holds a file of the bundle; `error` says why it has no content."""

    name: str
    content: bytes
    error: str = ""


async def make_parts(
    makers: Mapping[str, PartMaker], secrets: Iterable[str]
) -> AsyncGenerator[Part, None]:
    """Yields one part after the other, by file name. A part that cannot be made says why."""
    redactor = Redactor(secrets)
    for name, make in makers.items():
        yield await _make_part(name, make, redactor)


async def _make_part(name: str, make: PartMaker, redactor: Redactor) -> Part:
    try:
        async with asyncio.timeout(PART_SECONDS):
            made = await make()
    except Exception as error:
        logger.info("a part of the debug bundle is missing", extra={"part": name}, exc_info=error)
        if isinstance(error, TimeoutError):
            return Part(name, b"", f"not made within {PART_SECONDS:g} s")
        return Part(name, b"", redactor.redact(f"{describe_bug(error)}: {error}"))
    if isinstance(made, str):
        return Part(name, redactor.redact_known(made).encode())
    return Part(name, json.dumps(redactor.redact_tree(made), indent=1).encode())


def describe_settings(settings: BaseModel) -> dict[str, Any]:
    """Returns all settings in force, and the names of the changed ones. Files are named, their
    contents are not read."""
    return {"settings": settings.model_dump(mode="json"), "set": sorted(settings.model_fields_set)}


def describe_runtime() -> dict[str, Any]:
    """Returns the versions of Python, all packages, and the system. Blocks on the disk."""
    packages = {found.name: found.version for found in distributions()}
    return {
        "time": format_time(time.time()),
        "python": sys.version,
        "packages": dict(sorted(packages.items())),
        "system": platform.platform(),
        "kernel": f"{platform.release()} {platform.version()}",
        "libc": " ".join(platform.libc_ver()),
    }
