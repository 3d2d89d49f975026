"""The Python client for asyncio: registers adapters and generates with them.

async with AsyncClient(inference="127.0.0.1:7080", store="127.0.0.1:7070") as client:
    registration = await client.register("french", "s3://adapters/french")
    async for chunk in client.generate("Bonjour", adapter="french", max_tokens=32):
        print(chunk.text, end="")
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar, Unpack

from loadout import types
from loadout._push.async_push import Push, Wait, check_wait
from loadout._push.result import Pushed
from loadout._push.upload import push_meta
from loadout._routing.fleet import RESOLVE_TIMEOUT_S
from loadout._rpc import calls, convert, tasks
from loadout._rpc.async_caller import AsyncCaller
from loadout._rpc.async_stream import AsyncStream
from loadout._rpc.calls import Adapters, Prompt
from loadout.errors import StreamLost
from loadout.retry import Attempts
from loadout.upload import Progress, Sent, Upload, is_uri, open_folder

T = TypeVar("T")


class AsyncClient(AsyncCaller):
    """Client of one or both services for one event loop.

    `inference` may be several addresses, with commas or as a sequence, or a name that resolves to
    several: replicas. An adapter's calls go to the replica that its key belongs to, past unhealthy
    ones; its generations also past those that have more than their share of the load; calls
    without an adapter go to the least loaded. `store` may be several addresses, too: replicas of
    one store, of which another takes the calls that one fails. `tenant` completes adapter names
    without one: it is the token's, so that all callers agree on the key.

    `timeout_s` is the deadline of every call that is given none of its own, over all its attempts
    (None: no deadline). `token` is sent to the services with every call. `tls=True` trusts the
    public authorities, a TlsConfig names others and this client's own certificate. Without TLS a
    token goes only to this machine, unless `allow_insecure_token` says that the network is trusted.
    `tracing` True makes each call a span of the application's OpenTelemetry; a provider, of that
    one. `channel_factory` opens the gRPC channels, for interceptors or options of one's own.
    All methods, and the constructor, raise LoadoutError.
    """

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
        keep: int = 0,
        ttl: float | None = None,
        ephemeral: bool = False,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> types.Registration:
        """Records an adapter; durable when it returns.

        A `source` with a scheme ("s3://bucket/prefix", "file:///path") is fetched by the store; any
        other is a local folder and is uploaded, and `progress` is called after every chunk.
        `base_model` is only needed where neither the adapter's own config, nor the name's current
        version, nor what servers have registered says which one it is: the answer says what
        decided. The store checks `signature` (from loadout.signing) against the digest that it
        computes itself.

        With `keep` the name's versions beyond the newest so many are deleted once this one is
        recorded: never the current one, pinned ones, or what requests use that run by then. 0: the
        store keeps as many as its policy says. After `ttl` seconds this version is deleted by
        itself. An `ephemeral` upload stays in the store's memory; see `push`.
        """
        labels = labels or {}
        if is_uri(source):
            calls.check_upload(ephemeral)
            call = calls.register(
                *(name, str(source), base_model, expected_digest, if_current_digest, pinned),
                *(labels, description, signature, keep, ttl),
            )
            return await self._call(call, timeout_s)
        upload = Upload(
            await tasks.run(open_folder, source, name),
            progress,
            name=name,
            base_model=base_model,
            expected_digest=expected_digest,
            if_current_digest=if_current_digest,
            pinned=pinned,
            labels=labels,
            description=description,
            signature=signature,
            keep=keep,
            ttl_s=ttl,
            ephemeral=ephemeral,
        )
        return await self._upload(upload, timeout_s)

    async def push(
        self,
        name: str,
        tensors: Mapping[str, Any],
        config: Any,
        *,
        wait: Wait = None,
        keep: int | None = None,
        ttl: float | None = None,
        ephemeral: bool = True,
        base_model: str = "",
        if_current_digest: str = "",
        labels: Mapping[str, str] | None = None,
        description: str = "",
        group: Any = None,
        timeout_s: float | None = None,
    ) -> Pushed:
        """Records an adapter from memory, and has replicas load it.

        `tensors` are of torch or numpy, by PEFT's names or those of the model's state dict; they
        are sent one after the other, without a file and without a second copy of all. `config` is
        PEFT's LoraConfig, a mapping, or JSON. Of DTensors, as FSDP2 shards them, all ranks of
        `group` (None: all there are) call this: each tensor is gathered when it is sent, the first
        rank sends, and all return the same or raise the same. Name the `group` where a rank may
        have no DTensor, or no tensor at all: without it such a rank cannot know of the others.

        With `wait` "all" it returns once every replica that is up and serves the base model has
        loaded it: a request for the name gets this version there, or a later one. "any": once one
        has. Raises NotLoaded, naming the replica; the version is recorded nevertheless.

        An `ephemeral` version is kept in the store's memory: it is gone when the store ends, and
        soon after it is deleted, but no version or revision is given twice. `keep` is as in
        `register`; after `ttl` seconds the version is deleted by itself, also the current one.
        """
        check_wait(wait)
        if wait is not None:
            await tasks.wait(self._channels.fleet.refresh(), RESOLVE_TIMEOUT_S)
        meta = push_meta(
            name,
            keep=keep or 0,
            ttl_s=ttl,
            ephemeral=ephemeral,
            base_model=base_model,
            if_current_digest=if_current_digest,
            labels=labels or {},
            description=description,
        )
        seconds = self._timeout_s if timeout_s is None else timeout_s
        push = Push(meta, wait, seconds, self._upload, self._load_at, self.replicas)
        return await push.run(tensors, config, group)

    async def _load_at(
        self, address: str, name: str, revision: int, timeout_s: float | None
    ) -> types.ResidentAdapter:
        """Loads at one replica, also at one that seemed to be down; does not wait for one that
        refuses because it drains or sleeps."""
        call = calls.load(name, False, revision)
        route = self._channels.replica_route(call, address)
        loaded = await self._finish(call, route, timeout_s, waits_if_gone=False)
        self._channels.fleet.replicas.mark_healthy(address)
        return loaded

    async def _upload(self, upload: Sent, timeout_s: float | None) -> types.Registration:
        route = self._channels.upload_route()

        async def send(timeout: float | None) -> Any:
            try:
                return await route.send(tasks.iterate(upload.messages()), timeout)
            except BaseException:
                # gRPC reports a request stream that raised as cancelled or lost.
                if upload.failure is not None:
                    raise upload.failure from None
                raise

        repeatable = upload.repeatable
        response = await self._attempt(route, send, repeatable=repeatable, timeout_s=timeout_s)
        return convert.registration(response)

    async def get(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        return await self._call(calls.get(ref), timeout_s)

    async def list(
        self,
        filter: str = "",  # noqa: A002  the contract's word
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[types.Adapter]:
        """Yields all adapters in order of tenant and name, fetched page by page.

        `filter`: space-separated terms that must all hold: tenant=T, base_model=B, name=PREFIX,
        label.KEY=VALUE. `timeout_s` counts for each page.
        """
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
        """Returns one page and the revision it reflects, from which `watch` goes on without
        gaps."""
        return await self._call(calls.list_page(page_size, page_token, filter), timeout_s)

    async def delete(self, name: str, version: int = 0, *, timeout_s: float | None = None) -> int:
        """Deletes one version, or with 0 the name with all of them; returns the revision."""
        return await self._call(calls.delete(name, version), timeout_s)

    async def versions(
        self, name: str, *, page_size: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[types.Adapter]:
        """Yields a name's versions, newest first, with those whose deletion can still be undone."""
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
        """Returns one page, and which version is current."""
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

    async def prune(
        self, name: str, keep: int, *, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Deletes a name's versions beyond the newest `keep`, but neither the current one nor
        pinned ones; returns their numbers. `timeout_s` counts for each thousand of them."""
        deleted: tuple[int, ...] = ()
        while True:
            page = await self._call(calls.prune(name, keep), timeout_s)
            deleted += page.deleted_versions
            if not page.has_more:
                return deleted

    async def pin(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        """Keeps the adapter's images in the store's memory."""
        return await self._call(calls.pin(ref), timeout_s)

    async def unpin(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        return await self._call(calls.unpin(ref), timeout_s)

    def watch(
        self, since_revision: int = 0, *, timeout_s: float | None = None
    ) -> AsyncStream[types.AdapterEvent]:
        """Streams every catalog change after `since_revision`, in order, and bookmarks; at least
        once.

        A lost stream resumes after the last event. Raises OutOfRange if that is too long ago: list
        again. Without `timeout_s` it never ends by itself.
        """
        call = calls.watch(since_revision)
        return AsyncStream(self._channels.route(call), call, Attempts(self._retry, timeout_s))

    async def layouts(self, *, timeout_s: float | None = None) -> AsyncIterator[types.Layout]:
        """Yields the layouts that the store knows, fetched page by page; needs the role admin or
        server. `timeout_s` counts for each page."""
        page_token = ""
        while True:
            page = await self._call(calls.layout_page(page_token), timeout_s)
            for layout in page.layouts:
                yield layout
            page_token = page.next_page_token
            if not page_token:
                return

    async def forget_layout(self, layout_id: str, *, timeout_s: float | None = None) -> int:
        """Forgets a layout, and returns how many images it had. A server that is connected
        registers it again. Needs the role admin for all tenants."""
        return await self._call(calls.forget_layout(layout_id), timeout_s)

    async def store_status(self, *, timeout_s: float | None = None) -> types.StoreStatus:
        return await self._call(calls.store_status(), timeout_s)

    def store_debug_info(self, *, timeout_s: float | None = None) -> AsyncStream[types.DebugPart]:
        """Streams the store's diagnostics; needs the role admin for all tenants."""
        call = calls.store_debug_info()
        return AsyncStream(self._channels.route(call), call, self._attempts(timeout_s))

    # --- the inference service ------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        return_routed_experts: bool = False,
        version_policy: types.VersionPolicy = "pin",
        echo: bool = False,
        packed_logprobs: bool = False,
        n: int = 1,
        timeout_s: float | None = None,
        **sampling: Unpack[types.SamplingParams],
    ) -> AsyncStream[types.Chunk]:
        """Starts a generation and streams its chunks.

        `adapter` is a reference, "" or None the base model; `adapters` are up to 8 references, or
        pairs of one and a scale, whose sum takes its place; `min_revision` is a registration's
        revision that must be taken into account; `return_routed_experts` returns the experts that
        tokens of the prompt and the output have chosen; `echo` begins the answer with the prompt;
        `packed_logprobs` returns log probabilities as arrays; `n` answers come mixed, each chunk
        with its answer's index. A lost request is sent again only while nothing was received.
        """
        call = calls.generate(
            *(prompt, adapter, min_revision, request_id, priority, cache_salt, sampling),
            adapters=adapters,
            return_routed_experts=return_routed_experts,
            version_policy=version_policy,
            echo=echo,
            packed_logprobs=packed_logprobs,
            n=n,
        )
        return AsyncStream(self._channels.route(call), call, self._attempts(timeout_s))

    async def complete(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        return_routed_experts: bool = False,
        version_policy: types.VersionPolicy = "pin",
        echo: bool = False,
        packed_logprobs: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[types.SamplingParams],
    ) -> types.Completion:
        """Generates as `generate`, and returns the joined chunks."""
        [completion] = await self.sample(
            prompt,
            1,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            return_routed_experts=return_routed_experts,
            version_policy=version_policy,
            echo=echo,
            packed_logprobs=packed_logprobs,
            timeout_s=timeout_s,
            **sampling,
        )
        return completion

    async def sample(
        self,
        prompt: Prompt,
        n: int,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        return_routed_experts: bool = False,
        version_policy: types.VersionPolicy = "pin",
        echo: bool = False,
        packed_logprobs: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[types.SamplingParams],
    ) -> tuple[types.Completion, ...]:
        """Generates `n` answers to a prompt that is computed once, unless the server runs without a
        prefix cache, and returns the joined chunks of each."""
        stream = self.generate(
            prompt,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            return_routed_experts=return_routed_experts,
            version_policy=version_policy,
            echo=echo,
            packed_logprobs=packed_logprobs,
            n=n,
            timeout_s=timeout_s,
            **sampling,
        )
        chunks: list[types.Chunk] = []
        async for chunk in stream:
            chunks.append(chunk)
        completions = convert.completions(chunks, n)
        if completions is None:
            raise StreamLost("the generation ended without its last response")
        return completions

    async def load(
        self, ref: str, *, pin: bool = False, min_revision: int = 0, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        """Loads an adapter ahead of its first request; returns when it is resident. `min_revision`
        is as in `generate`."""
        return await self._call(calls.load(ref, pin, min_revision), timeout_s)

    async def pause(
        self,
        mode: str = "keep",
        *,
        resume_after_s: float | None = None,
        replica: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Pauses generation at every replica, or at the one of this address; returns how many
        requests are held, once nothing is computed. `mode` "keep" holds what runs where it is,
        "wait" lets it end first, "abort" ends everything. Generation resumes by itself after
        `resume_after_s`, if that is given: whatever becomes of this process."""
        call = calls.pause(mode, resume_after_s)
        return sum(await self._at_each(call, replica, timeout_s))

    async def resume(self, *, replica: str = "", timeout_s: float | None = None) -> None:
        """Goes on with what was paused, at every replica or at one."""
        await self._at_each(calls.resume(), replica, timeout_s)

    async def sleep(
        self, *, weights: bool = False, replica: str = "", timeout_s: float | None = None
    ) -> int:
        """Frees the memory of keys and values, and with `weights` of the weights, until `wake`, at
        every replica or at one; returns the freed bytes. Nothing that runs is lost."""
        return sum(await self._at_each(calls.sleep(weights), replica, timeout_s))

    async def wake(self, *, replica: str = "", timeout_s: float | None = None) -> float:
        """Takes back what `sleep` has freed, at every replica or at one; returns the seconds that
        the slowest took."""
        return max(await self._at_each(calls.wake(), replica, timeout_s), default=0.0)

    async def unload(self, ref: str, *, timeout_s: float | None = None) -> int:
        """Drains an adapter and frees it; returns the freed bytes."""
        return await self._call(calls.unload(ref), timeout_s)

    async def pin_resident(
        self, ref: str, *, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        """Keeps the adapter in the inference service's device memory."""
        return await self._call(calls.pin_resident(ref), timeout_s)

    async def unpin_resident(
        self, ref: str, *, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        return await self._call(calls.unpin_resident(ref), timeout_s)

    async def residents(
        self, limit: int = 0, *, timeout_s: float | None = None
    ) -> tuple[types.ResidentAdapter, ...]:
        """Returns the resident adapters, those on the device first; `limit` 0: all."""
        return await self._call(calls.residents(limit), timeout_s)

    async def inspect(self, ref: str, *, timeout_s: float | None = None) -> types.InspectedAdapter:
        """Returns what a resident adapter consists of, where it lies in memory, and what a step
        launches for it."""
        return await self._call(calls.inspect(ref), timeout_s)

    async def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        return await self._call(calls.server_info(), timeout_s)

    def server_debug_info(self, *, timeout_s: float | None = None) -> AsyncStream[types.DebugPart]:
        """Streams the inference service's diagnostics; needs the role operator for all tenants."""
        call = calls.server_debug_info()
        return AsyncStream(self._channels.route(call), call, self._attempts(timeout_s))

    def profile(
        self, num_steps: int, *, wait_s: float | None = None, timeout_s: float | None = None
    ) -> AsyncStream[types.TracePiece]:
        """Streams the trace of the server's next steps, in pieces; closing it ends the tracing.
        `wait_s` is how long the server waits for steps."""
        call = calls.profile(num_steps, wait_s)
        return AsyncStream(self._channels.route(call), call, self._attempts(timeout_s))

    def replicas(self) -> tuple[types.Replica, ...]:
        """Returns the replicas of the inference service as they are known now; starts probes of
        those whose last one is old, without waiting for them."""
        fleet = self._channels.fleet
        fleet.refresh()
        return fleet.replicas.statuses()
