"""Loads and unloads, until the engine has what the catalog has.

SGLang cannot replace an adapter under its name, so each version is loaded under a name of its own,
`tenant/name@version`: the new one first, then the old one is unloaded, after its requests.
SGLang's prefix cache is by load, so no version reads another's.

The sidecar compares all of both sides, after each change and every few seconds: so it also fills an
engine that has started anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from contract.base_model_names import may_mean
from loadout import types
from loadout.aio import AsyncClient
from loadout.errors import FailedPrecondition, LoadoutError, NotFound, ResourceExhausted
from loadout.integrations.adapter_folders import AdapterFolders
from loadout.integrations.following import follow
from loadout_sglang.engine import Engine, EngineAway, EngineError

logger = logging.getLogger(__name__)

COMPARE_SECONDS = 5.0
"""How often both sides are compared without a change."""
RETRY_SECONDS = 60.0
"""After which time an adapter that the engine refused is loaded again."""
PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one name: the version that the catalog has, the version that is loaded, 0 for
    none, and why they differ, "" if they do not."""

    version: int
    digest: str
    loaded_version: int
    error: str

    @property
    def is_current(self) -> bool:
        return self.version == self.loaded_version


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version is not loaded, and when it is tried again, in monotonic time."""

    why: str
    retry_s: float


@dataclass(slots=True)
class Wish:
    """What the sidecar keeps loaded: the adapters of a filter that are for the model."""

    filter: str
    base_models: Collection[str]
    max_adapters: int
    table: dict[str, Entry] = field(default_factory=dict)


class Sidecar:
    """Keeps one engine current. For one event loop; `run` ends by cancelling it."""

    def __init__(
        self, client: AsyncClient, folders: AdapterFolders, engine: Engine, wish: Wish
    ) -> None:
        self._client = client
        self._folders = folders
        self._engine = engine
        self._wish = wish
        self._held: dict[str, str] = {}
        """Digests whose folders are held, by the name under which each is loaded."""
        self._refused: dict[str, Refusal] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Compares and changes until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(follow(self._client, self._note))
            group.create_task(self._keep())

    async def _note(self, event: types.AdapterEvent | None) -> None:
        self._changed.set()

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self.compare()
            except (LoadoutError, EngineAway, EngineError) as error:
                logger.warning("the engine is compared again soon: %s", error)
            try:
                async with asyncio.timeout(COMPARE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def compare(self) -> None:
        """Makes the engine's adapters those of the catalog. Raises LoadoutError, EngineAway and
        EngineError, as far as it has come."""
        wanted = await self._wanted()
        loaded = await asyncio.to_thread(self._engine.loaded)
        for name in [name for name in self._held if name not in loaded]:
            self._release(name)  # the engine has started anew
        now_s = time.monotonic()
        self._refused = {
            name: refusal
            for name, refusal in self._refused.items()
            if name in wanted and refusal.retry_s > now_s
        }
        for name, adapter in wanted.items():
            if name in loaded and loaded[name] != str(self._folders.path_of(adapter.digest)):
                await self._unload(name, loaded)  # of a catalog that is no more
            if name not in self._held and name not in self._refused:
                await self._load(name, adapter, is_loaded=name in loaded)
        for name in sorted(loaded.keys() - wanted.keys()):
            await self._unload(name, loaded)
        self._wish.table = self._table(wanted, await asyncio.to_thread(self._engine.loaded))

    async def _wanted(self) -> dict[str, types.Adapter]:
        """Returns the adapters to load, by the names of their versions. Raises LoadoutError."""
        wanted: dict[str, types.Adapter] = {}
        async for adapter in self._client.list(self._wish.filter, page_size=PAGE_SIZE):
            if may_mean(adapter.base_model, self._wish.base_models):
                wanted[f"{adapter.name}@{adapter.version}"] = adapter
                if len(wanted) == self._wish.max_adapters:
                    logger.warning("only %d adapters are loaded: --max-adapters", len(wanted))
                    break
        return wanted

    async def _load(self, name: str, adapter: types.Adapter, *, is_loaded: bool) -> None:
        """Loads an adapter, and holds its folder. One that an earlier sidecar has loaded gets its
        folder again, from which SGLang may read it once more."""
        try:
            path = await self._folders.take(adapter.digest)
        except FailedPrecondition as error:
            self._refuse(name, error.message, float("inf"))
            return
        except (NotFound, ResourceExhausted) as error:
            self._refuse(name, error.message, RETRY_SECONDS)
            return
        try:
            if not is_loaded:
                await asyncio.to_thread(self._engine.load, name, str(path))
        except EngineError as error:
            self._folders.release(adapter.digest)
            self._refuse(name, f"SGLang: {error}", RETRY_SECONDS)
        except BaseException:
            self._folders.release(adapter.digest)
            raise
        else:
            logger.info("loaded %s, %s", name, adapter.digest)
            self._held[name] = adapter.digest

    async def _unload(self, name: str, loaded: dict[str, str]) -> None:
        """Unloads one of the sidecar's adapters; others are left alone."""
        if self._folders.has_path(loaded[name]):
            await asyncio.to_thread(self._engine.unload, name)
            logger.info("unloaded %s", name)
            del loaded[name]
            self._release(name)

    def _refuse(self, name: str, why: str, retry_after_s: float) -> None:
        logger.warning("%s is not loaded: %s", name, why)
        self._refused[name] = Refusal(why, time.monotonic() + retry_after_s)

    def _release(self, name: str) -> None:
        digest = self._held.pop(name, "")
        if digest:
            self._folders.release(digest)

    def _table(self, wanted: dict[str, types.Adapter], loaded: dict[str, str]) -> dict[str, Entry]:
        versions: dict[str, int] = {}
        for name, path in loaded.items():
            base, _, version = name.partition("@")
            if self._folders.has_path(path) and version.isdecimal():
                versions[base] = max(versions.get(base, 0), int(version))
        return {
            adapter.name: Entry(
                adapter.version,
                adapter.digest,
                versions.get(adapter.name, 0),
                refused.why if (refused := self._refused.get(name)) else "",
            )
            for name, adapter in wanted.items()
        }
