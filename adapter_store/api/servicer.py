"""The AdapterStoreService: authorize, convert, call, convert. The interceptor answers errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TypeAlias

from adapter_store.api import convert
from adapter_store.api.bounds import REQUESTS
from adapter_store.api.pull_messages import to_pull_response
from adapter_store.core import Action, AdapterRecord, Principal, Recorded, SourceFile
from adapter_store.debug import DebugInfo
from adapter_store.errors import RevisionTooOld
from adapter_store.service.changes import Change
from adapter_store.service.exporting import ExportHeader, ExportMessage, ExportTrailer
from adapter_store.service.use_cases import UseCases
from adapter_store.sources.upload import FileChunk
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.authenticator import Authenticator
from servicekit.rpc import call_context
from servicekit.rpc.call import Call
from servicekit.rpc.interceptor import CallRules

Context: TypeAlias = Call

AUDITED = frozenset(
    {
        "RegisterAdapter",
        "UploadAdapter",
        "DeleteAdapter",
        "RollbackAdapter",
        "PruneVersions",
        "PinAdapter",
        "UnpinAdapter",
        "RegisterLayout",
        "ForgetLayout",
    }
)
"""The RPCs that are audited."""

CALL_RULES = CallRules(
    domain="adapter_store.loadout",
    requests=REQUESTS,
    polled=frozenset(
        {"GetAdapter", "ListAdapters", "ListVersions", "ListLayouts", "GetStoreStatus"}
    ),
    long_lived=frozenset({"WatchAdapters"}),
    facts=("tenant", "adapter", "digest"),
    traced_facts=("request_id", "tenant", "adapter", "digest", "layout_id"),
)


@dataclass(slots=True)
class StoreAuditEntry(AuditEntry):
    """Adds the version that was changed, the revision of the catalog, the older versions that were
    deleted, and the unknown keys of the config that the operator lets pass."""

    version: int = field(default=0, init=False)
    revision: int = field(default=0, init=False)
    deleted_versions: tuple[int, ...] = field(default=(), init=False)
    ignored_config_keys: tuple[str, ...] = field(default=(), init=False)

    def describe(self, record: AdapterRecord, revision: int) -> None:
        """Notes the changed record, as it is now."""
        self.name, self.version = str(record.name), record.version
        self.digest, self.revision = record.digest, revision

    def set_outcome(self, outcome: Recorded) -> None:
        self.describe(outcome.record, outcome.revision)
        self.deleted_versions = outcome.deleted_versions
        self.ignored_config_keys = outcome.ignored_config_keys


class AdapterStoreServicer(pb_grpc.AdapterStoreServiceServicer):
    """The RPCs. Layouts, which may be large, are converted by an account's `parsers_of`."""

    def __init__(
        self,
        use_cases: UseCases,
        authenticator: Authenticator[Action],
        audit: Audit[StoreAuditEntry],
        parsers_of: Callable[[str], Executor],
        debug: DebugInfo,
    ) -> None:
        self._registering = use_cases.registering
        self._editing = use_cases.editing
        self._reading = use_cases.reading
        self._exporting = use_cases.exporting
        self._watching = use_cases.watching
        self._layouts = use_cases.layouts
        self._pulls = use_cases.pulls
        self._status = use_cases.status
        self._calls = use_cases.calls
        self._debug = debug
        self._authenticator = authenticator
        self._audit = audit
        self._parsers_of = parsers_of

    async def RegisterAdapter(  # noqa: N802
        self, request: pb.RegisterAdapterRequest, context: Context
    ) -> pb.RegisterAdapterResponse:
        with self._audited(context, "RegisterAdapter", Action.PUBLISH, request.name) as (
            caller,
            entry,
        ):
            registration = convert.from_registration(request, caller.home_tenant)
            recorded = await _finish(
                entry,
                await self._registering.register(caller, registration, request.source_uri),
            )
        return convert.to_registered(recorded, pb.RegisterAdapterResponse)

    async def UploadAdapter(  # noqa: N802
        self, requests: AsyncIterator[pb.UploadAdapterRequest | FileChunk], context: Context
    ) -> pb.UploadAdapterResponse:
        with (
            self._audited(context, "UploadAdapter", Action.PUBLISH) as (caller, entry),
            self._registering.upload_place(caller),
        ):
            opening = convert.from_upload(requests, caller.home_tenant)
            registration, chunks = await self._registering.in_time(opening)
            entry.name = str(registration.name)
            recorded = await _finish(
                entry, await self._registering.upload(caller, registration, chunks)
            )
        return convert.to_registered(recorded, pb.UploadAdapterResponse)

    async def GetAdapter(  # noqa: N802
        self, request: pb.GetAdapterRequest, context: Context
    ) -> pb.GetAdapterResponse:
        caller = self._authorize(context, Action.READ).on_behalf_of(request.tenants)
        call_context.note(adapter=request.ref)
        ref = convert.from_ref(request, caller.home_tenant)
        record, revision = await self._reading.get(caller, ref)
        call_context.note(adapter=str(record.name), digest=record.digest)
        return pb.GetAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def ListAdapters(  # noqa: N802
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        caller = self._authorize(context, Action.READ).on_behalf_of(request.tenants)
        page = await self._reading.page(
            caller, request.page_size, request.page_token, request.filter
        )
        return await self._calls.make_answer(caller, convert.to_page, *page)

    async def DeleteAdapter(  # noqa: N802
        self, request: pb.DeleteAdapterRequest, context: Context
    ) -> pb.DeleteAdapterResponse:
        with self._audited(context, "DeleteAdapter", Action.PUBLISH, request.name) as (
            caller,
            entry,
        ):
            name = convert.from_name(request, caller.home_tenant)
            entry.name, entry.version = str(name), request.version
            entry.digest, entry.revision = await self._editing.delete(caller, name, request.version)
        return pb.DeleteAdapterResponse(revision=entry.revision)

    async def ListVersions(  # noqa: N802
        self, request: pb.ListVersionsRequest, context: Context
    ) -> pb.ListVersionsResponse:
        caller = self._authorize(context, Action.READ)
        call_context.note(adapter=request.name)
        name = convert.from_name(request, caller.home_tenant)
        page = await self._reading.versions(caller, name, request.page_size, request.page_token)
        return await self._calls.make_answer(caller, convert.to_versions, page)

    async def RollbackAdapter(  # noqa: N802
        self, request: pb.RollbackAdapterRequest, context: Context
    ) -> pb.RollbackAdapterResponse:
        with self._audited(context, "RollbackAdapter", Action.PUBLISH, request.name) as (
            caller,
            entry,
        ):
            name, version, required = convert.from_rollback(request, caller.home_tenant)
            entry.name, entry.version = str(name), version
            recorded = await _finish(
                entry, await self._editing.rollback(caller, name, version, required)
            )
        return pb.RollbackAdapterResponse(
            adapter=convert.to_adapter(recorded.record), revision=recorded.revision
        )

    async def PruneVersions(  # noqa: N802
        self, request: pb.PruneVersionsRequest, context: Context
    ) -> pb.PruneVersionsResponse:
        with self._audited(context, "PruneVersions", Action.PUBLISH, request.name) as (
            caller,
            entry,
        ):
            name, keep = convert.from_prune(request, caller.home_tenant)
            entry.name = str(name)
            pruned = await self._editing.prune(caller, name, keep)
            entry.deleted_versions, entry.revision = pruned.deleted_versions, pruned.revision
        return pb.PruneVersionsResponse(
            deleted_versions=pruned.deleted_versions,
            revision=pruned.revision,
            has_more=pruned.has_more,
        )

    async def PinAdapter(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: Context
    ) -> pb.PinAdapterResponse:
        with self._audited(context, "PinAdapter", Action.PIN, request.ref) as (caller, entry):
            ref = convert.from_ref(request, caller.home_tenant)
            record, revision = await self._editing.set_pinned(caller, ref, True)
            entry.describe(record, revision)
        return pb.PinAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def UnpinAdapter(  # noqa: N802
        self, request: pb.UnpinAdapterRequest, context: Context
    ) -> pb.UnpinAdapterResponse:
        with self._audited(context, "UnpinAdapter", Action.PIN, request.ref) as (caller, entry):
            ref = convert.from_ref(request, caller.home_tenant)
            record, revision = await self._editing.set_pinned(caller, ref, False)
            entry.describe(record, revision)
        return pb.UnpinAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def RegisterLayout(  # noqa: N802
        self, request: pb.RegisterLayoutRequest, context: Context
    ) -> pb.RegisterLayoutResponse:
        base_model = request.layout.base_model
        with self._audited(context, "RegisterLayout", Action.REGISTER_LAYOUT, base_model) as (
            caller,
            entry,
        ):
            # A large layout has a hundred thousand targets: off the event loop.
            parsers = self._parsers_of(caller.account)
            converting = parsers.submit(convert.from_layout, request.layout)
            layout = await asyncio.wrap_future(converting)
            announcement = convert.from_announcement(request)
            accepted = await self._layouts.register(
                layout, list(request.layout.image_formats), caller, announcement
            )
            entry.digest = accepted.layout_id
        return pb.RegisterLayoutResponse(
            layout_id=accepted.layout_id,
            image_format=accepted.image_format,
            announcement_id=accepted.announcement_id,
        )

    async def ListLayouts(  # noqa: N802
        self, request: pb.ListLayoutsRequest, context: Context
    ) -> pb.ListLayoutsResponse:
        caller = self._authorize(context, Action.STATUS)
        after = convert.from_layout_page(request)
        layouts, token = await self._layouts.page(caller, after)
        return pb.ListLayoutsResponse(
            layouts=map(convert.to_layout_info, layouts), next_page_token=token
        )

    async def ForgetLayout(  # noqa: N802
        self, request: pb.ForgetLayoutRequest, context: Context
    ) -> pb.ForgetLayoutResponse:
        with self._audited(context, "ForgetLayout", Action.FORGET_LAYOUT) as (caller, entry):
            caller.require_all_tenants()
            entry.digest = convert.from_forget_layout(request)
            num_images = await self._layouts.forget(caller, entry.digest)
        return pb.ForgetLayoutResponse(images=num_images)

    async def PullAdapter(  # noqa: N802
        self, request: pb.PullAdapterRequest, context: Context
    ) -> None:
        caller = self._authorize(context, Action.PULL)
        call_context.note(digest=request.digest, layout_id=request.layout_id)
        key = convert.from_pull(request)
        pull = self._pulls.stream(
            key,
            request.offset,
            request.image_id,
            caller.tenants,
            caller.account,
            request.share_id,
            wants_ends=request.wants_ends,
        )
        async with aclosing(pull) as messages:
            async for message in messages:
                await context.write(to_pull_response(message))

    async def ExportAdapter(  # noqa: N802
        self, request: pb.ExportAdapterRequest, context: Context
    ) -> AsyncIterator[pb.ExportAdapterResponse]:
        caller = self._authorize(context, Action.PULL)
        call_context.note(adapter=request.ref)
        ref = convert.from_ref(request, caller.home_tenant)
        async with aclosing(self._exporting.stream(caller, ref)) as messages:
            async for message in messages:
                if isinstance(message, ExportHeader):
                    record = message.record
                    call_context.note(adapter=str(record.name), digest=record.digest)
                yield _to_export_response(message)

    async def GetText(  # noqa: N802
        self, request: pb.GetTextRequest, context: Context
    ) -> pb.GetTextResponse:
        caller = self._authorize(context, Action.PULL)
        digest = convert.from_text_request(request)
        return pb.GetTextResponse(content=await self._reading.text(caller, digest))

    async def WatchAdapters(  # noqa: N802
        self, request: pb.WatchAdaptersRequest, context: Context
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        """Yields the events that the caller may see. Raises RevisionTooOld once its token is for
        other tenants."""
        call = self._authenticator.long_lived(context.invocation_metadata(), Action.READ)
        call_context.note_caller(call.caller)
        watch = self._watching.stream(
            call.caller, request.since_revision, convert.from_watch(request)
        )
        async with aclosing(watch) as events:
            async for event in events:
                if not call.revalidate():  # only a list finds the records passed over until now
                    raise RevisionTooOld(
                        "since_revision: this token is for other tenants now; list again",
                        subject="since_revision",
                    )
                yield convert.to_event(event)

    async def GetStoreStatus(  # noqa: N802
        self, request: pb.GetStoreStatusRequest, context: Context
    ) -> pb.GetStoreStatusResponse:
        caller = self._authorize(context, Action.STATUS)
        status = await self._status.read(caller)
        catalog, work = status.catalog, status.work
        return pb.GetStoreStatusResponse(
            version=version("loadout"),
            revision=catalog.revision,
            adapters=catalog.adapters,
            layouts=catalog.layouts,
            memory=convert.to_tier_status(work.memory),
            disk=convert.to_tier_status(work.disk),
            shared=None if work.shared is None else convert.to_tier_status(work.shared),
            blob_bytes=catalog.blob_bytes,
            active_pulls=work.active_pulls,
            memory_locked=work.lock.is_locked,
            memory_unlocked_reason=work.lock.reason,
        )

    async def GetDebugInfo(  # noqa: N802
        self, request: pb.GetDebugInfoRequest, context: Context
    ) -> AsyncIterator[pb.GetDebugInfoResponse]:
        self._authorize(context, Action.INSPECT).require_all_tenants()
        async with aclosing(self._debug.parts()) as parts:
            async for part in parts:
                yield pb.GetDebugInfoResponse(
                    name=part.name, content=part.content, error=part.error
                )

    def _authorize(self, context: Context, action: Action) -> Principal:
        """Returns the caller. Raises as Authenticator.authorize: the first thing that a call
        does."""
        caller = self._authenticator.authenticate(context.invocation_metadata())
        call_context.note_caller(caller)
        caller.require(action)
        return caller

    @contextmanager
    def _audited(
        self, context: Context, what: str, action: Action, name: str = ""
    ) -> Iterator[tuple[Principal, StoreAuditEntry]]:
        """Authorizes the caller, as `_authorize`, and writes down how the call ended."""
        assert what in AUDITED
        entry = self._audit.entry(what, name, context.peer())
        try:
            with self._audit.record(entry):
                caller = self._authenticator.authenticate(context.invocation_metadata())
                entry.set_caller(caller)
                call_context.note_caller(caller)
                caller.require(action)
                self._audit.begin(entry)
                yield caller, entry
        finally:  # the audit has noted the change
            if action in (Action.REGISTER_LAYOUT, Action.FORGET_LAYOUT):
                call_context.note(base_model=entry.name, layout_id=entry.digest)
            else:
                call_context.note(adapter=entry.name, digest=entry.digest)


async def _finish(entry: StoreAuditEntry, change: Change) -> Recorded:
    """Waits for a change. Its audit entry is written when it is recorded, also if the caller
    leaves."""
    entry.pending = change.recorded
    recorded = await change.wait()
    entry.set_outcome(recorded)
    return recorded


def _to_export_response(message: ExportMessage) -> pb.ExportAdapterResponse:
    """Returns the response. A chunk's bytes are copied."""
    match message:
        case ExportHeader(record, revision, files):
            header = pb.ExportHeader(
                adapter=convert.to_adapter(record), revision=revision, files=_to_files(files)
            )
            return pb.ExportAdapterResponse(header=header)
        case ExportTrailer(files):
            return pb.ExportAdapterResponse(trailer=pb.ExportTrailer(files=_to_files(files)))
        case FileChunk(file_name, offset, data):
            part = pb.FileChunk(file_name=file_name, offset=offset, data=bytes(data))
            return pb.ExportAdapterResponse(chunk=part)


def _to_files(files: Iterable[SourceFile]) -> list[pb.SourceFile]:
    return [
        pb.SourceFile(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
        for file in files
    ]
