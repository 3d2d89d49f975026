"""Names to requests of vLLM's, which follow the catalog.

vLLM keeps the request that a name was resolved to, for ever. So this module replaces it when the
name moves: the new version is loaded first, under a number and a name of its own,
`tenant/name@version`, and then takes the name's place. Requests that run finish with the version
that they began with.
vLLM's prefix cache has the versioned name and the digest's folder in its keys, so no version ever
reads another's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from contract.base_model_names import may_mean
from loadout import types
from loadout.aio import AsyncClient
from loadout.errors import (
    FailedPrecondition,
    InvalidArgument,
    LoadoutError,
    NotFound,
    ResourceExhausted,
)
from loadout.integrations.adapter_folders import AdapterFolders, is_named_by
from loadout_vllm.model_shapes import ModelShapes

logger = logging.getLogger(__name__)

MAX_NAMES = 10_000
"""Names that are followed at once."""


class Counter(Protocol):
    def inc(self, num: int) -> int: ...


class Engine(Protocol):
    async def add_lora(self, lora_request: Any) -> Any: ...


class Models(Protocol):
    """The attributes of vLLM's OpenAIServingModels that are used here."""

    lora_requests: dict[str, Any]
    lora_resolver_lock: dict[str, Any]
    lora_id_counter: Counter
    engine_client: Engine


MakeRequest = Callable[[str, int, str], Any]
"""Makes vLLM's LoRARequest of a name, a number and a path."""


class Resolver:
    """Resolves names for one server of vLLM, and keeps its `models` current. For its event loop.

    Args:
        client: Client of the store.
        folders: The adapters' folders.
        models: vLLM's loaded adapters.
        make_request: Makes requests of vLLM's.
        base_models: Names of the model that vLLM serves.
        max_rank: The highest rank that vLLM takes.
        shapes: The layers and matrices of the model that vLLM serves.
    """

    def __init__(
        self,
        client: AsyncClient,
        folders: AdapterFolders,
        models: Models,
        make_request: MakeRequest,
        base_models: Collection[str],
        max_rank: int,
        shapes: ModelShapes,
    ) -> None:
        self._client = client
        self._folders = folders
        self._models = models
        self._make_request = make_request
        self._base_models = base_models
        self._max_rank = max_rank
        self._shapes = shapes
        self._digests: dict[str, str] = {}
        """The digest whose folder each followed name holds; "" while it is resolved."""

    @property
    def num_names(self) -> int:
        """The number of names that are followed."""
        return len(self._digests)

    async def resolve(self, name: str) -> Any | None:
        """Returns a request of vLLM's for a reference, `[tenant/]name[@version]` or a digest; None
        if the store has no such adapter for this server's token. vLLM calls it with the name's lock
        held, and gives the request a number of its own.

        Raises FailedPrecondition for an adapter that this server cannot apply wholly, and
        LoadoutError if the store cannot be asked.
        """
        if name not in self._digests and len(self._digests) >= MAX_NAMES:
            raise ResourceExhausted(f"{MAX_NAMES} names are in use", subject="name")
        self._digests.setdefault(name, "")  # changes from here on are followed
        try:
            adapter = await self._client.get(name)
            return await self._request(name, adapter)
        except (NotFound, InvalidArgument):
            self._forget(name)
            return None
        except BaseException:
            self._forget(name)
            raise

    async def changed(self, event: types.AdapterEvent | None) -> None:
        """Makes the names that an event may mean current; without one, all. Raises LoadoutError if
        some are left as they were, because the store did not answer."""
        names = [name for name in self._digests if event is None or is_named_by(name, event)]
        outcomes = await asyncio.gather(*map(self._refresh, names), return_exceptions=True)
        for error in outcomes:
            if isinstance(error, BaseException):
                raise error

    async def _refresh(self, name: str) -> None:
        """Replaces the request of a name that points to another digest now, or removes it."""
        lock: AbstractAsyncContextManager[Any] = self._models.lora_resolver_lock[name]
        async with lock:  # a resolution that runs has ended
            if name not in self._models.lora_requests:
                self._forget(name)
                return
            try:
                adapter = await self._client.get(name)
                if adapter.digest == self._digests.get(name):
                    return
                request = await self._request(name, adapter)
                await self._models.engine_client.add_lora(request)
            except (NotFound, FailedPrecondition) as error:
                logger.warning("%s is removed: %s", name, error)
                self._remove(name)
            except LoadoutError:  # the last known version serves
                raise
            except Exception:
                logger.exception("%s is removed: vLLM does not load its new version", name)
                self._remove(name)
            else:
                self._models.lora_requests[name] = request

    async def _request(self, name: str, adapter: types.Adapter) -> Any:
        """Returns a request for an adapter, whose folder the name holds from now on."""
        self._check(adapter)
        path = await self._folders.take(adapter.digest)
        try:
            await asyncio.to_thread(self._shapes.check, adapter.name, path)
        except BaseException:
            self._folders.release(adapter.digest)
            raise
        held = self._digests.get(name)
        self._digests[name] = adapter.digest
        if held:
            self._folders.release(held)
        versioned = f"{adapter.name}@{adapter.version}"
        logger.info("%s is %s, %s", name, versioned, adapter.digest)
        number = self._models.lora_id_counter.inc(1)
        return self._make_request(versioned, number, str(path))

    def _check(self, adapter: types.Adapter) -> None:
        """Raises FailedPrecondition."""
        if not may_mean(adapter.base_model, self._base_models):
            raise FailedPrecondition(
                f"{adapter.name} is registered for base model {adapter.base_model}; this server "
                f"has {', '.join(self._base_models)} (LOADOUT_BASE_MODEL names it otherwise)",
                subject="base_model",
            )
        if adapter.rank > self._max_rank:
            raise FailedPrecondition(
                f"{adapter.name} has rank {adapter.rank}; this server takes up to "
                f"{self._max_rank} (--max-lora-rank)",
                subject="rank",
            )

    def _remove(self, name: str) -> None:
        self._models.lora_requests.pop(name, None)
        self._forget(name)

    def _forget(self, name: str) -> None:
        held = self._digests.pop(name, "")
        if held:
            self._folders.release(held)
