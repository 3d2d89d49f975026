"""The Python client for asyncio: `Client`, method for method.

async with AsyncClient(inference="127.0.0.1:7080") as client:
    async for chunk in client.generate("Bonjour", adapter="french", max_tokens=32):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from loadout import types
from loadout._routing.metadata import DEFAULT_TENANT
from loadout._routing.route import Route, delay_after
from loadout._rpc import calls, convert
from loadout._rpc.calls import Call, Prompt
from loadout._rpc.channel import DEFAULT_TIMEOUT_S, Address, Stubs
from loadout._rpc.stream import AsyncStream
from loadout._rpc.tracing import Tracing
from loadout.errors import StreamLost
from loadout.retry import Attempts, RetryPolicy
from loadout.security import Security, TlsConfig
from loadout.upload import Progress, Upload, is_uri, open_folder

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

T = TypeVar("T")


class AsyncClient:
    """Client of one or both services for one event loop; arguments, results and errors are
    `Client`'s."""

    def __init__(
        self,
        inference: Address | None = None,
        store: str | None = None,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        allow_insecure_token: bool = False,
        tenant: str = DEFAULT_TENANT,
        tracing: TracerProvider | bool = False,
    ) -> None:
        security = Security(token, tls, allow_insecure_token)
        traced = Tracing(tracing) if tracing else None
        self._stubs = Stubs(grpc.aio, inference, store, security, tenant, traced)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()

    async def close(self) -> None:
        """Ends the connections; calls still running end Cancelled."""
        await self._stubs.end_probes()
        for channel in self._stubs.open_channels():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, call: Call[T], timeout_s: float | None = None) -> T:
        route = self._stubs.route(call)
        answer = await self._attempt(
            route,
            lambda timeout: route.send(call.request, timeout),
            repeatable=call.repeatable,
            timeout_s=timeout_s,
        )
        return call.convert(answer)

    async def _attempt(
        self,
        route: Route,
        send: Callable[[float | None], Any],
        *,
        repeatable: bool,
        timeout_s: float | None,
    ) -> Any:
        attempts = self._attempts(timeout_s)
        try:
            await route.ready()
            while True:
                try:
                    answer = await send(attempts.remaining_s)
                    route.done(())
                    return answer
                except grpc.RpcError as error:
                    delay_s = delay_after(error, route, attempts, repeatable=repeatable)
                await asyncio.sleep(delay_s)
        finally:
            route.done()

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)

    # --- the adapter store ----------------------------------------------------------------------

    async def register(
        self,
        name: str,
        source: str | os.PathLike[str],
        *,
        base_model: str = "",
        expected_digest: str = "",
        if_current_digest: str = "",
        pinned: bool = False,
        labels: Mapping[str, str] | None = None,
        description: str = "",
        signature: types.Signature | None = None,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> types.Registration:
        """As `Client.register`; files are read, and `progress` called, in a worker thread."""
        labels = labels or {}
        if is_uri(source):
            call = calls.register(
                name,
                str(source),
                base_model,
                expected_digest,
                if_current_digest,
                pinned,
                labels,
                description,
                signature,
            )
            return await self._call(call, timeout_s)
        upload = Upload(
            await asyncio.to_thread(open_folder, source),
            progress,
            name=name,
            base_model=base_model,
            expected_digest=expected_digest,
            if_current_digest=if_current_digest,
            pinned=pinned,
            labels=labels,
            description=description,
            signature=signature,
        )
        return await self._upload(upload, timeout_s)

    async def _upload(self, upload: Upload, timeout_s: float | None) -> types.Registration:
        route = self._stubs.to_upload()

        async def send(timeout: float | None) -> Any:
            try:
                return await route.send(_in_thread(upload), timeout)
            except (grpc.RpcError, asyncio.CancelledError):
                if upload.failure is not None:
                    raise upload.failure from None
                raise

        answer = await self._attempt(route, send, repeatable=upload.repeatable, timeout_s=timeout_s)
        return convert.registration(answer)

    async def get(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        return await self._call(calls.get(ref), timeout_s)

    async def list(
        self,
        filter: str = "",  # noqa: A002  the contract's word
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[types.Adapter]:
        page_token = ""
        while True:
            page = await self.list_page(filter, page_size, page_token, timeout_s=timeout_s)
            for adapter in page.adapters:
                yield adapter
            page_token = page.next_page_token
            if not page_token:
                return

    async def list_page(
        self,
        filter: str = "",  # noqa: A002
        page_size: int = 0,
        page_token: str = "",
        *,
        timeout_s: float | None = None,
    ) -> types.AdapterPage:
        return await self._call(calls.list_page(page_size, page_token, filter), timeout_s)

    async def delete(self, name: str, version: int = 0, *, timeout_s: float | None = None) -> int:
        return await self._call(calls.delete(name, version), timeout_s)

    async def versions(
        self, name: str, *, page_size: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[types.Adapter]:
        """A name's versions, newest first, with those whose deletion can still be undone."""
        page_token = ""
        while True:
            page = await self.version_page(name, page_size, page_token, timeout_s=timeout_s)
            for adapter in page.adapters:
                yield adapter
            page_token = page.next_page_token
            if not page_token:
                return

    async def version_page(
        self, name: str, page_size: int = 0, page_token: str = "", *, timeout_s: float | None = None
    ) -> types.VersionPage:
        """One page, and which version is current."""
        return await self._call(calls.version_page(name, page_size, page_token), timeout_s)

    async def rollback(
        self,
        name: str,
        version: int,
        *,
        if_current_digest: str = "",
        timeout_s: float | None = None,
    ) -> types.Registration:
        """Makes an older version current again, also one deleted a short while ago."""
        return await self._call(calls.rollback(name, version, if_current_digest), timeout_s)

    async def pin(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        return await self._call(calls.pin(ref), timeout_s)

    async def unpin(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        return await self._call(calls.unpin(ref), timeout_s)

    def watch(
        self, since_revision: int = 0, *, timeout_s: float | None = None
    ) -> AsyncStream[types.AdapterEvent]:
        call = calls.watch(since_revision)
        return AsyncStream(self._stubs.route(call), call, Attempts(self._retry, timeout_s))

    async def store_status(self, *, timeout_s: float | None = None) -> types.StoreStatus:
        return await self._call(calls.store_status(), timeout_s)

    def store_debug_info(self, *, timeout_s: float | None = None) -> AsyncStream[types.DebugPart]:
        """What the store tells those who look for what is wrong; its callers are admins of all
        tenants."""
        call = calls.store_debug_info()
        return AsyncStream(self._stubs.route(call), call, self._attempts(timeout_s))

    # --- the inference service ------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[types.SamplingParams],
    ) -> AsyncStream[types.Chunk]:
        call = calls.generate(
            prompt, adapter, min_revision, request_id, priority, cache_salt, sampling
        )
        return AsyncStream(self._stubs.route(call), call, self._attempts(timeout_s))

    async def complete(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[types.SamplingParams],
    ) -> types.Completion:
        stream = self.generate(
            prompt,
            adapter=adapter,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            **sampling,
        )
        completion = convert.completion([chunk async for chunk in stream])
        if completion is None:
            raise StreamLost("the generation ended without its last response")
        return completion

    async def load(
        self, ref: str, *, pin: bool = False, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        return await self._call(calls.load(ref, pin), timeout_s)

    async def unload(self, ref: str, *, timeout_s: float | None = None) -> int:
        return await self._call(calls.unload(ref), timeout_s)

    async def pin_resident(
        self, ref: str, *, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        return await self._call(calls.pin_resident(ref), timeout_s)

    async def unpin_resident(
        self, ref: str, *, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        return await self._call(calls.unpin_resident(ref), timeout_s)

    async def residents(
        self, limit: int = 0, *, timeout_s: float | None = None
    ) -> tuple[types.ResidentAdapter, ...]:
        """What is resident, those on the device first; `limit` 0: all."""
        return await self._call(calls.residents(limit), timeout_s)

    async def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        return await self._call(calls.server_info(), timeout_s)

    def server_debug_info(self, *, timeout_s: float | None = None) -> AsyncStream[types.DebugPart]:
        """What the inference service tells those who look for what is wrong; its callers are
        operators of all tenants."""
        call = calls.server_debug_info()
        return AsyncStream(self._stubs.route(call), call, self._attempts(timeout_s))

    def profile(
        self, num_steps: int, *, wait_s: float | None = None, timeout_s: float | None = None
    ) -> AsyncStream[types.TracePiece]:
        """The trace of the server's next steps, in pieces; leaving it ends the tracing. `wait_s` is
        how long the server waits for steps."""
        call = calls.profile(num_steps, wait_s)
        return AsyncStream(self._stubs.route(call), call, self._attempts(timeout_s))

    def replicas(self) -> tuple[types.Replica, ...]:
        """The replicas of the inference service as they are known now; asks again, without waiting
        for it, those of which there is no recent news."""
        fleet = self._stubs.fleet
        fleet.look_after()
        return fleet.replicas.statuses()


async def _in_thread(upload: Upload) -> AsyncIterator[Any]:
    """The upload's messages, read off the event loop: the folder may lie on a slow share."""
    messages = upload.messages()
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message
