# Generated from loadout/_client/async_store.py by `make client`: change that file.
"""Calls of the adapter store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loadout import types
from loadout._client.export import Export
from loadout._rpc import calls, threads
from loadout._rpc.caller import Caller
from loadout._rpc.convert import from_store
from loadout._rpc.stream import Stream
from loadout.retry import Attempts
from loadout.upload import Progress, Sent, Upload, is_uri, open_folder


class StoreCalls(Caller):
    """The client's methods that call the adapter store."""

    def register(
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
        """Records an adapter. The record is durable when this returns.

        Args:
            name: Name of the adapter, "[tenant/]name".
            source: A local folder to upload, or a URI that the store fetches: "file:///path",
                "s3://bucket/prefix", "hf://org/name@revision" or, for a folder in a repository,
                "hf://org/name/folder@revision".
            base_model: Name of the base model. "": the store chooses; `base_model_reason` of the
                result says how.
            expected_digest: Refuse content with another digest.
            if_current_digest: Refuse unless the name points to this digest now.
            pinned: Keep the adapter's images in the store's memory.
            labels: Labels for filters, at most 64.
            description: Free text, at most 4096 characters.
            signature: Signature from `loadout.signing`. The store checks it against its own digest.
            keep: Delete the name's versions beyond this many newest ones. The current version,
                pinned versions and versions in use stay. 0: as many as the store's policy says.
            ttl: Seconds after which the store deletes this version. None: never.
            ephemeral: Keep an upload's content only in the store's memory; see `push`.
            progress: Called with sent and total bytes after each chunk of an upload.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The recorded adapter and its catalog revision.

        Raises:
            InvalidArgument: A field, file, tensor or config key is invalid; `subject` names it.
            FailedPrecondition: The digest is not as expected, or the signature is missing.
            Conflict: The name does not point to `if_current_digest`.
        """
        new = calls.NewAdapter(
            name,
            base_model,
            expected_digest,
            if_current_digest,
            pinned,
            labels,
            description,
            signature,
            keep,
            ttl,
        )
        if is_uri(source):
            calls.check_upload(ephemeral)
            return self._call(calls.register(new, str(source)), timeout_s)
        folder = threads.run(open_folder, source, name)
        upload = Upload(folder, progress, calls.upload_meta(new, ephemeral=ephemeral))
        return self._upload(upload, timeout_s)

    def _upload(self, upload: Sent, timeout_s: float | None) -> types.Registration:
        route = self._channels.upload_route()

        def send(timeout: float | None) -> Any:
            try:
                return route.send(threads.iterate(upload.messages()), timeout)
            except BaseException:
                # gRPC reports a request stream that raised as cancelled or lost.
                if upload.failure is not None:
                    raise upload.failure from None
                raise

        repeatable = upload.repeatable
        response = self._attempt(route, send, repeatable=repeatable, timeout_s=timeout_s)
        return from_store.registration(response)

    def get(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        """Returns one adapter with the state of its images.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Raises:
            NotFound: The store has no such adapter.
        """
        return self._call(calls.get(ref), timeout_s)

    def export(
        self,
        ref: str,
        folder: str | os.PathLike[str],
        *,
        admit: Callable[[int], object] | None = None,
        timeout_s: float | None = None,
    ) -> types.Adapter:
        """Writes an adapter into a new folder, as a plain LoRA in PEFT's format.

        All modules have one rank, and their scales are folded into B, so that every engine that
        reads PEFT's LoRA computes the same. The folder appears when every byte is checked.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            folder: Folder to make.
            admit: Called with the bytes of all files before the first arrives, maybe in another
                thread. An error that it raises ends the export. None: any size.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The adapter that the reference pointed to.

        Raises:
            NotFound: The store has no such adapter.
            FailedPrecondition: The adapter is more than a plain LoRA; the message names each part.
            DataLoss: Bytes fail their hash.
            InvalidArgument: The folder exists.
        """
        files = threads.run(Export, Path(folder), admit)
        try:
            call = calls.export(ref)
            route = self._channels.route(call)
            with Stream(route, call, self._attempts(timeout_s)) as messages:
                for message in messages:
                    threads.run(files.add, message)
            return threads.run(files.finish)
        finally:
            threads.run(files.close)

    def list(
        self,
        filter: str = "",  # noqa: A002  the contract's word
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[types.Adapter]:
        """Yields all adapters in order of tenant and name. Pages are fetched as you iterate.

        Args:
            filter: Space-separated terms that must all hold: "tenant=T", "base_model=B",
                "name=PREFIX", "label.KEY=VALUE".
            page_size: Adapters per page, at most 1000. 0: 100.
            timeout_s: Deadline of each page in seconds. None: the client's.

        Raises:
            InvalidArgument: The filter is invalid.
        """
        page_token = ""
        while True:
            page = self.list_page(filter, page_size, page_token, timeout_s=timeout_s)
            for adapter in page.adapters:
                yield adapter
            page_token = page.next_page_token
            if not page_token:
                return

    def list_page(
        self,
        filter: str = "",  # noqa: A002
        page_size: int = 0,
        page_token: str = "",
        *,
        timeout_s: float | None = None,
    ) -> types.AdapterPage:
        """Returns one page of adapters, and the revision from which `watch` continues without gaps.

        Args:
            filter: As in `list`.
            page_size: Adapters per page, at most 1000. 0: 100.
            page_token: `next_page_token` of the previous page. "": the first page.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Raises:
            InvalidArgument: The filter or the token is invalid.
        """
        return self._call(calls.list_page(page_size, page_token, filter), timeout_s)

    def delete(self, name: str, version: int = 0, *, timeout_s: float | None = None) -> int:
        """Deletes a name or one of its versions. Running requests finish.

        Args:
            name: Name of the adapter, "[tenant/]name".
            version: Version to delete. 0: the name with all its versions.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The catalog revision of the deletion.

        Raises:
            NotFound: The store has no such name or version.
        """
        return self._call(calls.delete(name, version), timeout_s)

    def versions(
        self, name: str, *, page_size: int = 0, timeout_s: float | None = None
    ) -> Iterator[types.Adapter]:
        """Yields a name's versions, newest first, with deleted ones that can still be restored.

        Args:
            name: Name of the adapter, "[tenant/]name".
            page_size: Versions per page, at most 1000. 0: 100.
            timeout_s: Deadline of each page in seconds. None: the client's.

        Raises:
            NotFound: The store has no such name.
        """
        page_token = ""
        while True:
            page = self.version_page(name, page_size, page_token, timeout_s=timeout_s)
            for adapter in page.adapters:
                yield adapter
            page_token = page.next_page_token
            if not page_token:
                return

    def version_page(
        self, name: str, page_size: int = 0, page_token: str = "", *, timeout_s: float | None = None
    ) -> types.VersionPage:
        """Returns one page of a name's versions, and the current version.

        Args:
            name: Name of the adapter, "[tenant/]name".
            page_size: Versions per page, at most 1000. 0: 100.
            page_token: `next_page_token` of the previous page. "": the first page.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Raises:
            NotFound: The store has no such name.
        """
        return self._call(calls.version_page(name, page_size, page_token), timeout_s)

    def rollback(
        self,
        name: str,
        version: int,
        *,
        if_current_digest: str = "",
        timeout_s: float | None = None,
    ) -> types.Registration:
        """Makes an older version current again. It may have been deleted within the grace period.

        Args:
            name: Name of the adapter, "[tenant/]name".
            version: Version to make current.
            if_current_digest: Refuse unless the name points to this digest now.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The current version and the catalog revision.

        Raises:
            NotFound: The store has no such name or version.
            FailedPrecondition: The version lacks a signature that the policy requires.
            Conflict: The name does not point to `if_current_digest`.
        """
        return self._call(calls.rollback(name, version, if_current_digest), timeout_s)

    def prune(self, name: str, keep: int, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """Deletes a name's old versions. The current version and pinned versions stay.

        Args:
            name: Name of the adapter, "[tenant/]name".
            keep: Number of newest versions to keep, at least 1.
            timeout_s: Deadline in seconds of each call, which deletes up to 1000 versions. None:
                the client's.

        Returns:
            The numbers of the deleted versions, ascending.

        Raises:
            NotFound: The store has no such name.
        """
        deleted: tuple[int, ...] = ()
        while True:
            page = self._call(calls.prune(name, keep), timeout_s)
            deleted += page.deleted_versions
            if not page.has_more:
                return deleted

    def pin(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        """Pins an adapter: its images stay in the store's memory.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>". A name's pin moves with it.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The pinned adapter.

        Raises:
            NotFound: The store has no such adapter.
            ResourceExhausted: The images do not fit into the store's memory.
        """
        return self._call(calls.pin(ref), timeout_s)

    def unpin(self, ref: str, *, timeout_s: float | None = None) -> types.Adapter:
        """Removes an adapter's pin. Its images stay in memory until others need their space.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The adapter, no longer pinned.

        Raises:
            NotFound: The store has no such adapter.
        """
        return self._call(calls.unpin(ref), timeout_s)

    def watch(
        self, since_revision: int = 0, *, timeout_s: float | None = None
    ) -> Stream[types.AdapterEvent]:
        """Streams every catalog change in order, at least once, with bookmarks in between.

        A lost stream resumes after the last event.

        Args:
            since_revision: Last revision that you know. 0: from the beginning.
            timeout_s: Seconds after which the stream ends with DeadlineExceeded. None: it never
                ends by itself.

        Returns:
            A stream of events.

        Raises:
            OutOfRange: The revision is too old: list again. Iterating raises this.
        """
        call = calls.watch(since_revision)
        return Stream(self._channels.route(call), call, Attempts(self._retry, timeout_s))

    def layouts(self, *, timeout_s: float | None = None) -> Iterator[types.Layout]:
        """Yields the layouts that the store knows. Pages are fetched as you iterate.

        Args:
            timeout_s: Deadline of each page in seconds. None: the client's.

        Raises:
            PermissionDenied: The token has neither the role admin nor server.
        """
        page_token = ""
        while True:
            page = self._call(calls.layout_page(page_token), timeout_s)
            for layout in page.layouts:
                yield layout
            page_token = page.next_page_token
            if not page_token:
                return

    def forget_layout(self, layout_id: str, *, timeout_s: float | None = None) -> int:
        """Forgets a layout and its images. A connected server registers its layout again.

        Args:
            layout_id: Id of the layout, "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The number of images that the layout had.

        Raises:
            NotFound: The store has no such layout.
            PermissionDenied: The token does not have the role admin for all tenants.
        """
        return self._call(calls.forget_layout(layout_id), timeout_s)

    def store_status(self, *, timeout_s: float | None = None) -> types.StoreStatus:
        """Returns counts over all tenants, and how full the store's tiers are.

        Args:
            timeout_s: Deadline of the call in seconds. None: the client's.

        Raises:
            PermissionDenied: The token has neither the role admin nor server.
        """
        return self._call(calls.store_status(), timeout_s)

    def store_debug_info(self, *, timeout_s: float | None = None) -> Stream[types.DebugPart]:
        """Streams the store's diagnostics.

        Args:
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            A stream of files.

        Raises:
            PermissionDenied: The token does not have the role admin for all tenants. Iterating
                raises this.
        """
        call = calls.store_debug_info()
        return Stream(self._channels.route(call), call, self._attempts(timeout_s))
