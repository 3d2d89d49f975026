"""What helps to find out what is wrong with a running server, in parts: one JSON document each, and
the metrics. Each part is bounded, whatever runs, and one that cannot be made says why."""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from typing import Any, NamedTuple

import torch

from inference_svc.config import InferenceSettings
from inference_svc.core import ANYONE
from inference_svc.debug.config import secrets_of, shown_settings
from inference_svc.debug.last_errors import LastErrors, where
from inference_svc.engine.status_types import EngineDetails, MemoryDetails
from inference_svc.frontend.async_engine import Frontend
from inference_svc.host.cpus import usable_cpus
from inference_svc.host.device_info import cpu_name
from inference_svc.metrics.engine import MAX_NAMES
from inference_svc.metrics.metrics import Metrics
from inference_svc.store.directory import Directory
from inference_svc.store.replicas import Replicas
from servicekit.telemetry.redact import Redactor

log = logging.getLogger(__name__)

MAX_ROWS = 1000
"""Of anything, such as waiting requests: the engine tells them between two steps."""
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

    config: InferenceSettings
    frontend: Frontend
    directory: Directory
    metrics: Metrics
    replicas: Replicas
    errors: LastErrors

    async def parts(self) -> AsyncGenerator[Part, None]:
        """One after the other; the engine is asked once for those that it has to tell."""
        redactor = Redactor(secrets_of(self.config))
        examined = asyncio.ensure_future(self.frontend.inspect(MAX_ROWS))
        # Somebody who waits for it may leave; it is then nobody's to look at.
        examined.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def details() -> EngineDetails:
            async with asyncio.timeout(PART_SECONDS):
                return await asyncio.shield(examined)

        makers: dict[str, Callable[[], Awaitable[Any]]] = {
            "config.json": self._config,
            "versions.json": lambda: asyncio.to_thread(_versions),
            "errors.json": self._errors,
            "store.json": self._store,
            "engine.json": self._engine,
            "slots.json": lambda: _slots(details()),
            "residency.json": lambda: self._residency(details()),
            "queue.json": lambda: self._queue(details()),
            "metrics.txt": self._metrics_text,
        }
        try:
            for name, make in makers.items():
                yield await _part(name, make, redactor)
        finally:
            examined.cancel()

    async def _config(self) -> dict[str, Any]:
        return shown_settings(self.config)

    async def _errors(self) -> dict[str, Any]:
        return self.errors.describe()

    async def _store(self) -> dict[str, Any]:
        return {
            "layout_id": self.directory.layout_id,
            "is_watch_live": self.directory.is_live,
            "replicas": [asdict(each) for each in self.replicas.statuses()[:MAX_ROWS]],
        }

    async def _engine(self) -> dict[str, Any]:
        status = asdict(await self.frontend.describe())
        # The metrics have these; and the queue who waits.
        for key in ("histograms", "phases", "waiting_digests", "running_digests"):
            del status[key]
        return {"num_requests": self.frontend.num_requests} | status

    async def _residency(self, asked: Awaitable[EngineDetails]) -> dict[str, Any]:
        details = await asked
        found: dict[str, Any] = {}
        for tier, memory in details.memories.items():
            found[tier] = {
                "num_images": memory.num_images,
                "images": [
                    {
                        "digest": image.digest,
                        "names": self._names(image.digest),
                        "bytes": sum(size for _, size in image.extents),
                        "rank": image.rank,
                        "is_ready": image.is_ready,
                        "pinned": image.pinned,
                        "draining": image.draining,
                        "users": image.users,
                        "last_used_time": _time(image.last_used_time_s),
                        "load_seconds": image.load_seconds,
                    }
                    for image in memory.images
                ],
            }
        loads = [asdict(load) | {"names": self._names(load.digest)} for load in details.loads]
        return {"tiers": found, "num_loads": details.num_loads, "loads": loads}

    async def _queue(self, asked: Awaitable[EngineDetails]) -> dict[str, Any]:
        details = await asked
        digests = {each.digest for each in (*details.running, *details.waiting)} - {""}
        names = {digest: self._names(digest) for digest in digests}
        running = [asdict(each) | {"names": names.get(each.digest)} for each in details.running]
        waiting = [asdict(each) | {"names": names.get(each.digest)} for each in details.waiting]
        return {"running": running, "num_waiting": details.num_waiting, "waiting": waiting}

    async def _metrics_text(self) -> str:
        text, _ = await asyncio.to_thread(self.metrics.exposition)
        return text.decode()

    def _names(self, digest: str) -> list[str]:
        return self.directory.names_of(ANYONE, digest, MAX_NAMES)


async def _part(name: str, make: Callable[[], Awaitable[Any]], redactor: Redactor) -> Part:
    try:
        async with asyncio.timeout(PART_SECONDS):
            made = await make()
    except Exception as error:
        log.info("a part of the debug info is missing", extra={"part": name}, exc_info=error)
        is_late = isinstance(error, TimeoutError)
        why = f"nothing after {PART_SECONDS:g} s" if is_late else redactor.redact(_why(error))
        return Part(name, b"", why)
    if isinstance(made, str):
        return Part(name, redactor.redact_known(made).encode())
    return Part(name, json.dumps(redactor.redact_tree(made), indent=1).encode())


def _why(error: Exception) -> str:
    return f"{where(error)}: {error}"


async def _slots(asked: Awaitable[EngineDetails]) -> dict[str, Any]:
    """The map of each memory: who holds which bytes."""
    details = await asked
    return {
        "device": details.device,
        "memories": {tier: _map(memory) for tier, memory in details.memories.items()},
    }


def _map(memory: MemoryDetails) -> dict[str, Any]:
    held = [
        {
            "start": start,
            "bytes": size,
            "slot": image.slot,
            "digest": image.digest,
            "part": f"{index + 1} of {len(image.extents)}",
        }
        for image in memory.images
        for index, (start, size) in enumerate(image.extents)
    ]
    free = [{"start": start, "bytes": size} for start, size in memory.free_ranges]
    return {
        "capacity_bytes": memory.capacity_bytes,
        "used_bytes": memory.used_bytes,
        "num_slots": memory.max_images,
        "num_used_slots": memory.num_images,
        "num_images_left_out": memory.num_images - len(memory.images),
        "num_free_ranges": memory.num_free_ranges,
        "largest_admissible_bytes": memory.largest_admissible_bytes,
        "extents": sorted(held, key=lambda extent: int(str(extent["start"]))),
        "free_ranges": free,
    }


def _versions() -> dict[str, Any]:
    packages = {found.name: found.version for found in distributions()}
    return {
        "time": _time(time.time()),
        "python": sys.version,
        "packages": dict(sorted(packages.items())),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "system": platform.platform(),
        "kernel": f"{platform.release()} {platform.version()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": cpu_name(),
        "num_usable_processors": usable_cpus(),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
