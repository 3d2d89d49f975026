"""What helps to find out what is wrong with a running store, in parts: one JSON document each, and
the metrics. Each part is bounded, whatever the catalog holds, and one that cannot be made says
why."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import sqlite3
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from typing import Any, NamedTuple

import torch

from adapter_store.config import StoreSettings
from adapter_store.debug.config import secrets_of, shown_settings
from adapter_store.debug.last_errors import LastErrors, where
from adapter_store.images.plan import COMPILER_REVISION, IMAGE_FORMATS
from adapter_store.metrics.metrics import Metrics
from adapter_store.service import StoreService
from servicekit.telemetry.metrics import exposition
from servicekit.telemetry.redact import Redactor

logger = logging.getLogger(__name__)

MAX_ROWS = 1000
"""Of anything, such as pulls in progress."""
PART_SECONDS = 5.0
"""For one part to be made."""


class Part(NamedTuple):
    """A file of an archive; `error` says why there is no content."""

    name: str
    content: bytes
    error: str = ""


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Lives on the event loop."""

    settings: StoreSettings
    service: StoreService
    metrics: Metrics
    errors: LastErrors

    async def parts(self) -> AsyncGenerator[Part, None]:
        redactor = Redactor(secrets_of(self.settings))
        makers: dict[str, Callable[[], Awaitable[Any]]] = {
            "config.json": self._config,
            "versions.json": lambda: asyncio.to_thread(_versions),
            "errors.json": self._errors,
            "work.json": self._work,
            "catalog.json": self._catalog,
            "metrics.txt": lambda: asyncio.to_thread(self._metrics_text),
        }
        for name, make in makers.items():
            yield await _part(name, make, redactor)

    async def _config(self) -> dict[str, Any]:
        return shown_settings(self.settings)

    async def _errors(self) -> dict[str, Any]:
        return self.errors.describe()

    async def _catalog(self) -> dict[str, Any]:
        """Counts, of whatever size it is, and the tiers."""
        return asdict(await self.service.status())

    async def _work(self) -> dict[str, Any]:
        work, now_s = self.service.work_details(), time.monotonic()
        pulls = sorted(work.pulls, key=lambda pull: pull.start_s)
        return {
            "num_registrations": work.num_registrations,
            "num_uploads": work.num_uploads,
            "num_queued_ahead": work.num_queued,
            "num_images": len(work.images),
            "images": [image._asdict() for image in work.images[:MAX_ROWS]],
            "num_pulls": len(pulls),
            "pulls": [
                {
                    "digest": pull.digest,
                    "layout_id": pull.layout_id,
                    "age_s": now_s - pull.start_s,
                    "sent_bytes": pull.sent_bytes,
                }
                for pull in pulls[:MAX_ROWS]
            ],
        }

    def _metrics_text(self) -> str:
        text, _ = exposition(self.metrics.registry)
        return text.decode()


async def _part(name: str, make: Callable[[], Awaitable[Any]], redactor: Redactor) -> Part:
    try:
        async with asyncio.timeout(PART_SECONDS):
            made = await make()
    except Exception as error:
        logger.info("a part of the debug info is missing", extra={"part": name}, exc_info=error)
        is_late = isinstance(error, TimeoutError)
        why = f"nothing after {PART_SECONDS:g} s" if is_late else f"{where(error)}: {error}"
        return Part(name, b"", redactor.redact(why))
    if isinstance(made, str):
        return Part(name, redactor.redact_known(made).encode())
    return Part(name, json.dumps(redactor.redact_tree(made), indent=1).encode())


def _versions() -> dict[str, Any]:
    packages = {found.name: found.version for found in distributions()}
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "python": sys.version,
        "packages": dict(sorted(packages.items())),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "sqlite": sqlite3.sqlite_version,
        "image_formats": list(IMAGE_FORMATS),
        "compiler_revision": COMPILER_REVISION,
        "system": platform.platform(),
        "kernel": f"{platform.release()} {platform.version()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": platform.processor() or platform.machine(),
        "num_processors": os.cpu_count(),
    }
