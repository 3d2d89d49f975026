"""What callers can ask for, whatever they come by: gRPC and HTTP are two ways in here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from inference_svc.access import Action, Principal
from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.request_record import Account, Accounts
from inference_svc.api.request_trace import begin_generation
from inference_svc.audit import AUDITED, Audit, AuditLine
from inference_svc.core import Request
from inference_svc.engine.status_types import EngineStatus, ResidentAdapter
from inference_svc.errors import AdapterNotFound
from inference_svc.frontend.async_engine import Frontend
from inference_svc.frontend.output_stream import Delta
from inference_svc.gate import Gate, Metadata, bearer_token
from inference_svc.store.catalog import AdapterPage, Registry, Source
from inference_svc.store.directory import Binding, Directory
from inference_svc.text.prompt import PromptEncoder
from servicekit.errors import InvalidArgument, Unauthenticated
from servicekit.refs import parse_ref
from servicekit.telemetry.spans import child_span

TRACE_CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What never changes while a server runs."""

    base_model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    max_sequences: int
    max_batch_tokens: int
    max_queue: int
    versions: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """What a transport knows of who calls: `metadata` by lower-case names, and the address."""

    metadata: Metadata
    peer: str


class Resident(NamedTuple):
    """An adapter, and the names that its caller may know to point to it."""

    adapter: ResidentAdapter
    names: list[str]


class TraceFile(NamedTuple):
    """Of a trace of steps."""

    num_steps: int
    file: BinaryIO

    async def chunks(self) -> AsyncIterator[bytes]:
        """What is in it, read off the event loop."""
        while chunk := await asyncio.to_thread(self.file.read, TRACE_CHUNK_BYTES):
            yield chunk


class Service:
    """Everything here lives on one event loop. `registry` None: there is no store."""

    def __init__(
        self,
        facts: ServerFacts,
        frontend: Frontend,
        directory: Directory,
        registry: Registry | None,
        prompts: PromptEncoder,
        accounts: Accounts,
        gate: Gate,
        audit: Audit,
    ) -> None:
        self.facts = facts
        self.accounts = accounts
        self._frontend = frontend
        self._directory = directory
        self._registry = registry
        self._prompts = prompts
        self._gate = gate
        self._audit = audit

    def admit(self, caller: Caller, action: Action) -> Principal:
        """Raises as Gate.admit: the first thing that a call does."""
        return self._gate.admit(caller.metadata, action)

    def admit_inspector(self, caller: Caller) -> None:
        """As `admit`, for what tells of everybody's requests."""
        self.admit(caller, Action.INSPECT).require_all_tenants("this tells")

    def recognise(self, caller: Caller, what: str) -> None:
        """For a call that is admitted once more of it is read. Raises Unauthenticated, and writes
        it down if `what` is audited."""
        try:
            self._gate.identify(caller.metadata)
        except Unauthenticated as error:
            self._audit.refuse(what, caller.peer, error)
            raise

    # --- generating -----------------------------------------------------------------------------

    def admit_request(self, caller: Caller, account: Account) -> Principal:
        """As `admit`, for who wants to generate: the account knows whom, also if it is refused."""
        who = self._gate.identify(caller.metadata)
        account.admit(who)
        who.require(Action.GENERATE)
        return who

    async def bind(
        self, who: Principal, ref: str, min_revision: int = 0, subject: str = "adapter"
    ) -> Binding | None:
        """The adapter of a call, None for the base model: `ref` "". Raises as
        Directory.resolve."""
        if not ref:
            return None
        with child_span("resolve"):
            return await self._directory.resolve(who, ref, min_revision, subject)

    async def prepare(
        self,
        who: Principal,
        call: GenerateCall,
        binding: Binding | None,
        remaining_s: float | None = None,
    ) -> Request:
        """What `run` takes. Raises InvalidArgument for what is no prompt."""
        with child_span("tokenize"):
            prompt = await self._prompts.encode(call.prompt)
        return call.to_request(
            prompt, binding, who.home_tenant, self.facts.max_model_len, remaining_s
        )

    async def run(self, request: Request, account: Account) -> AsyncGenerator[Delta, None]:
        """The request's deltas; to be closed, and raising, as Frontend.generate."""
        account.start(request)
        trace = account.trace = begin_generation(request, account.prompt, self.facts.base_model)
        if trace is not None:
            request = replace(request, trace=trace.span.context)
        async with aclosing(self._frontend.generate(request, request.tenant, trace)) as deltas:
            async for delta in deltas:
                account.note(delta)
                yield delta

    # --- operating ------------------------------------------------------------------------------

    async def load(
        self,
        caller: Caller,
        ref: str,
        *,
        pin: bool,
        source: Source | None = None,
        subject: str = "ref",
    ) -> Resident:
        """Returns once it is resident. With a source the store is asked before to record it under
        this name, on behalf of the caller. `subject` is what the caller knows `ref` as."""
        with self._audited(caller, "LoadAdapter", ref) as (who, line):
            revision = 0
            if source is not None:
                revision = await self._register(caller, who, ref, source, subject)
            found = await self._directory.resolve(who, ref, revision, subject)
            line.digest = found.digest
            return self._named(who, await self._frontend.load(line.digest, pin))

    async def unload(self, caller: Caller, ref: str, *, subject: str = "ref") -> int:
        """Returns the bytes freed, once they are free."""
        with self._audited(caller, "UnloadAdapter", ref) as (who, line):
            line.digest = await self._digest(who, ref, subject)
            return await self._frontend.unload(line.digest)

    async def pin(self, caller: Caller, ref: str) -> Resident:
        with self._audited(caller, "PinAdapter", ref) as (who, line):
            line.digest = await self._digest(who, ref)
            return self._named(who, await self._frontend.pin(line.digest))

    async def unpin(self, caller: Caller, ref: str) -> Resident:
        with self._audited(caller, "UnpinAdapter", ref) as (who, line):
            line.digest = await self._digest(who, ref)
            return self._named(who, await self._frontend.unpin(line.digest))

    async def list_resident(self, who: Principal, limit: int = 0) -> list[Resident]:
        """Those of the caller's tenants, at most `limit` if that is not 0."""
        # Who is not for all may have no part in the first so many.
        adapters = await self._frontend.list_resident(limit if who.tenants is None else 0)
        owned = await self._directory.owned(who, [adapter.digest for adapter in adapters])
        own = (adapter for adapter in adapters if adapter.digest in owned)
        return [self._named(who, adapter) for adapter in islice(own, limit or None)]

    # --- telling --------------------------------------------------------------------------------

    @property
    def layout_id(self) -> str:
        """Empty until the store has accepted the layout."""
        return self._directory.layout_id

    async def describe(self) -> EngineStatus:
        return await self._frontend.describe()

    @asynccontextmanager
    async def profile(self, num_steps: int, timeout_s: float) -> AsyncIterator[TraceFile]:
        """The trace of the next steps, readable while the context lasts. Raises ProfileRunning,
        NoSteps."""
        trace = await self._frontend.profile(num_steps, timeout_s)
        try:
            with Path(trace.path).open("rb") as file:
                yield TraceFile(trace.num_steps, file)
        finally:
            trace.remove()

    async def list_adapters(self, who: Principal, page_size: int, page_token: str) -> AdapterPage:
        """Of a page of the catalog what the caller can generate with here. Raises
        StoreUnavailable, and InvalidArgument for a token of another list."""
        if self._registry is None:
            return AdapterPage([], "")
        tenants = () if who.tenants is None else who.tenants
        page = await self._registry.list_adapters(tenants, page_size, page_token)
        servable = [record for record in page.records if self._directory.is_servable(record)]
        return AdapterPage(servable, page.next_token)

    # --------------------------------------------------------------------------------------------

    async def _register(
        self, caller: Caller, who: Principal, text: str, source: Source, subject: str
    ) -> int:
        ref = parse_ref(text, subject, who.home_tenant)
        if not ref.name or ref.version:
            raise InvalidArgument(f"{subject} must be a name without a version", subject=subject)
        if self._registry is None:
            raise AdapterNotFound("this server has no adapter store", subject=subject)
        return await self._registry.register(str(ref.name), source, bearer_token(caller.metadata))

    async def _digest(self, who: Principal, ref: str, subject: str = "ref") -> str:
        """An owner's digest is taken as it is: what is resident may be gone from the store."""
        digest = parse_ref(ref, subject, who.home_tenant).digest
        if digest and self._directory.is_owner(who, digest):
            return digest
        return (await self._directory.resolve(who, ref, subject=subject)).digest

    def _named(self, who: Principal, adapter: ResidentAdapter) -> Resident:
        return Resident(adapter, self._directory.names_of(who, adapter.digest))

    @contextmanager
    def _audited(
        self, caller: Caller, what: str, name: str
    ) -> Iterator[tuple[Principal, AuditLine]]:
        """Lets an operator in, as `admit`, and writes down how the call ended."""
        assert what in AUDITED
        with self._audit.watching(AuditLine(caller.peer, what, name)) as line:
            who = self._gate.identify(caller.metadata)
            line.identify(who)
            who.require(Action.OPERATE)
            yield who, line
