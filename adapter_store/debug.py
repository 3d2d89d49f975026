"""Debug bundle of a running store: facts that help to find a fault, without secrets.

The size of each part is bounded, for any catalog.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sqlite3
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote

from sqlalchemy import make_url

from adapter_store.config import StoreSettings
from adapter_store.images.plan.plan import COMPILER_REVISION, IMAGE_FORMATS
from adapter_store.images.tiers.buffers import torch_versions
from adapter_store.metrics.registry import Metrics
from adapter_store.service.status import StatusReader
from servicekit.settings.secrets import URL_PASSWORD, environment_secrets
from servicekit.telemetry.debug_bundle import (
    MAX_ROWS,
    Part,
    PartMaker,
    describe_runtime,
    describe_settings,
    make_parts,
)
from servicekit.telemetry.exposition import exposition
from servicekit.telemetry.recent_errors import RecentErrors


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Makes the store's debug bundle. Lives on the event loop."""

    settings: StoreSettings
    status: StatusReader
    metrics: Metrics
    errors: RecentErrors

    def parts(self) -> AsyncGenerator[Part, None]:
        makers: dict[str, PartMaker] = {
            "config.json": self._config,
            "versions.json": lambda: asyncio.to_thread(_versions),
            "errors.json": self._errors,
            "work.json": self._work,
            "catalog.json": self._catalog,
            "metrics.txt": lambda: asyncio.to_thread(self._metrics_text),
        }
        return make_parts(makers, secrets_of(self.settings))

    async def _config(self) -> dict[str, Any]:
        return shown_settings(self.settings)

    async def _errors(self) -> dict[str, Any]:
        return self.errors.describe()

    async def _catalog(self) -> dict[str, Any]:
        """Returns counts and the tiers, whose size does not depend on the catalog's."""
        return asdict(await self.status.read())

    async def _work(self) -> dict[str, Any]:
        work, now_s = self.status.work_details(), time.monotonic()
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


def shown_settings(settings: StoreSettings) -> dict[str, Any]:
    """Returns the settings with only scheme, host and name of the catalog's address."""
    found = describe_settings(settings)
    found["settings"]["catalog_dsn"] = _shown_dsn(settings)
    return found


def _shown_dsn(settings: StoreSettings) -> str | None:
    if settings.catalog_dsn is None:
        return None
    url = make_url(settings.catalog_dsn.get_secret_value())
    return f"{url.drivername}://{url.host or ''}/{url.database or ''}"


def secrets_of(settings: StoreSettings) -> list[str]:
    """Returns the secrets in the environment and in the catalog's address."""
    found = environment_secrets()
    if settings.catalog_dsn is not None:
        text = settings.catalog_dsn.get_secret_value()
        url = make_url(text)
        found += [text, str(url.password or ""), *URL_PASSWORD.findall(text)]
        found += [unquote(str(value)) for value in url.query.values()]
    return found


def _versions() -> dict[str, Any]:
    return describe_runtime() | {
        "torch": torch_versions(),
        "sqlite": sqlite3.sqlite_version,
        "image_formats": list(IMAGE_FORMATS),
        "compiler_revision": COMPILER_REVISION,
        "processor": platform.processor() or platform.machine(),
        "num_processors": os.cpu_count(),
    }
