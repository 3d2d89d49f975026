"""Debug bundle of a running server, without secrets.

The size of each part is bounded, for any load.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import asdict, dataclass
from typing import Any

from inference_svc.config import InferenceSettings
from inference_svc.core import ANYONE
from inference_svc.engine.control.status_types import EngineDetails, MemoryDetails
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.host.cpus import cpu_name, usable_cores, usable_cpus
from inference_svc.host.device_info import torch_versions
from inference_svc.metrics.engine import MAX_NAMES
from inference_svc.metrics.requests import Metrics
from inference_svc.store.adapter_resolver import Directory
from inference_svc.store.replicas import Replicas
from servicekit.settings.secrets import environment_secrets
from servicekit.telemetry.debug_bundle import (
    MAX_ROWS,
    PART_SECONDS,
    Part,
    PartMaker,
    describe_runtime,
    describe_settings,
    make_parts,
)
from servicekit.telemetry.recent_errors import RecentErrors, format_time
from servicekit.telemetry.stacks import thread_stacks


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Makes the service's debug bundle. Lives on the event loop."""

    config: InferenceSettings
    engine: AsyncEngine
    directory: Directory
    metrics: Metrics
    replicas: Replicas
    errors: RecentErrors

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yields one part after the other; the engine is inspected once for all of them."""
        inspected = asyncio.ensure_future(self.engine.calls.inspect(MAX_ROWS))
        # The caller may leave first; then nothing else retrieves the error.
        inspected.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def details() -> EngineDetails:
            async with asyncio.timeout(PART_SECONDS):
                return await asyncio.shield(inspected)

        makers: dict[str, PartMaker] = {
            "config.json": self._config,
            "versions.json": lambda: asyncio.to_thread(_versions),
            "errors.json": self._errors,
            "store.json": self._store,
            "engine.json": self._engine,
            "slots.json": lambda: _slots(details()),
            "residency.json": lambda: self._residency(details()),
            "queue.json": lambda: self._queue(details()),
            "metrics.txt": self._metrics_text,
            "stacks.txt": self._stacks,
        }
        try:
            async for part in make_parts(makers, secrets_of(self.config)):
                yield part
        finally:
            inspected.cancel()

    async def _config(self) -> dict[str, Any]:
        return describe_settings(self.config)

    async def _errors(self) -> dict[str, Any]:
        return self.errors.describe()

    async def _store(self) -> dict[str, Any]:
        return {
            "layout_id": self.directory.layout_id,
            "is_watch_live": self.directory.is_live,
            "replicas": [asdict(each) for each in self.replicas.statuses()[:MAX_ROWS]],
        }

    async def _engine(self) -> dict[str, Any]:
        status = asdict(await self.engine.calls.describe())
        # These are in metrics.txt and queue.json.
        for key in ("histograms", "phases", "waiting_digests", "running_digests"):
            del status[key]
        return {"num_requests": self.engine.num_requests} | status

    async def _residency(self, pending: Awaitable[EngineDetails]) -> dict[str, Any]:
        details = await pending
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
                        "last_used_time": format_time(image.last_used_time_s),
                        "load_seconds": image.load_seconds,
                    }
                    for image in memory.images
                ],
            }
        loads = [asdict(load) | {"names": self._names(load.digest)} for load in details.loads]
        return {"tiers": found, "num_loads": details.num_loads, "loads": loads}

    async def _queue(self, pending: Awaitable[EngineDetails]) -> dict[str, Any]:
        details = await pending
        digests = {each.digest for each in (*details.running, *details.waiting)} - {""}
        names = {digest: self._names(digest) for digest in digests}
        running = [asdict(each) | {"names": names.get(each.digest)} for each in details.running]
        waiting = [asdict(each) | {"names": names.get(each.digest)} for each in details.waiting]
        return {"running": running, "num_waiting": details.num_waiting, "waiting": waiting}

    async def _stacks(self) -> str:
        """Returns where all threads are, of the processes of all ranks."""
        own = {f"process {os.getpid()}, the server": thread_stacks()}
        try:
            async with asyncio.timeout(PART_SECONDS / 2):
                own |= await self.engine.calls.stacks()
        except TimeoutError:
            own["the engine"] = "no answer\n"
        return "\n".join(f"=== {name}\n\n{text}" for name, text in own.items())

    async def _metrics_text(self) -> str:
        text, _ = await asyncio.to_thread(self.metrics.exposition)
        return text.decode()

    def _names(self, digest: str) -> list[str]:
        return self.directory.names_of(ANYONE, digest, MAX_NAMES)


def secrets_of(config: InferenceSettings) -> list[str]:
    """Returns the secrets in the environment and the token for the store."""
    found = environment_secrets()
    if config.store_token_file is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(config.store_token_file.read_text().strip())
    return found


async def _slots(pending: Awaitable[EngineDetails]) -> dict[str, Any]:
    """Returns a map of each memory: which adapter has which bytes."""
    details = await pending
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
    return describe_runtime() | {
        "torch": torch_versions(),
        "processor": cpu_name(),
        "num_usable_cores": usable_cores(),
        "num_usable_processors": usable_cpus(),
    }
