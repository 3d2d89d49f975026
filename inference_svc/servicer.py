"""InferenceService: let in, convert, call, convert. Errors become statuses in `status`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from inference_svc import convert
from inference_svc.access import Action, Principal
from inference_svc.accounts import Account, Accounts
from inference_svc.audit import Audit, AuditLine
from inference_svc.core import Request, ResidentAdapter
from inference_svc.errors import InferenceError
from inference_svc.frontend import Frontend
from inference_svc.gate import Gate
from inference_svc.names import Binding, Directory
from inference_svc.refs import parse_ref
from inference_svc.text.prompt import PromptEncoder
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc

Context: TypeAlias = grpc.aio.ServicerContext

AUDITED = frozenset({"LoadAdapter", "UnloadAdapter", "PinAdapter", "UnpinAdapter"})


def audit_refusal(audit: Audit, method: str, peer: str, error: InferenceError) -> None:
    """Writes down who was refused before anything of the call was read."""
    if method in AUDITED:
        line = AuditLine(peer, method)
        line.end(error)
        audit.write(line)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What GetServerInfo says that never changes."""

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


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    def __init__(
        self,
        facts: ServerFacts,
        frontend: Frontend,
        directory: Directory,
        prompts: PromptEncoder,
        accounts: Accounts,
        gate: Gate,
        audit: Audit,
    ) -> None:
        self._facts = facts
        self._frontend = frontend
        self._directory = directory
        self._prompts = prompts
        self._accounts = accounts
        self._gate = gate
        self._audit = audit

    # Writing instead of yielding: a cancelled call then always ends inside this frame, and the
    # request with it.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        with self._accounts.open(request.request_id, request.adapter) as account:
            who = self._gate.identify(context.invocation_metadata())
            account.admit(who)
            who.require(Action.GENERATE)
            call = convert.from_generate_request(request, self._facts.vocab_size)
            account.request_id, account.prompt = call.request_id, call.prompt
            binding = await self._bind(who, call.adapter, call.min_revision)
            account.bind(binding)
            prompt = await self._prompts.encode(call.prompt)
            to_run = call.to_request(
                prompt,
                binding,
                who.home_tenant,
                self._facts.max_model_len,
                context.time_remaining(),
            )
            account.start(to_run)
            await self._stream(account, to_run, convert.to_identity(binding), context)

    async def _stream(
        self,
        account: Account,
        request: Request,
        identity: pb.AdapterIdentity | None,
        context: Context,
    ) -> None:
        async with aclosing(self._frontend.generate(request, account.tenant)) as deltas:
            async for delta in deltas:
                account.note(delta)
                await context.write(
                    convert.to_generate_response(request.request_id, delta, identity)
                )

    async def _bind(self, who: Principal, ref: str, min_revision: int) -> Binding | None:
        return await self._directory.resolve(who, ref, min_revision) if ref else None

    async def _digest(self, who: Principal, ref: str) -> str:
        """An owner's digest is taken as it is: what is resident may be gone from the store."""
        digest = parse_ref(ref, subject="ref", home=who.home_tenant).digest
        if digest and self._directory.is_owner(who, digest):
            return digest
        return (await self._directory.resolve(who, ref, subject="ref")).digest

    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        with self._audited(context, "LoadAdapter", request.ref) as (who, line):
            line.digest = (await self._directory.resolve(who, request.ref, subject="ref")).digest
            adapter = await self._frontend.load(line.digest, request.pin)
        return pb.LoadAdapterResponse(adapter=self._to_resident(who, adapter))

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        with self._audited(context, "UnloadAdapter", request.ref) as (who, line):
            line.digest = await self._digest(who, request.ref)
            freed_bytes = await self._frontend.unload(line.digest)
        return pb.UnloadAdapterResponse(freed_bytes=freed_bytes)

    async def PinAdapter(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: Context
    ) -> pb.PinAdapterResponse:
        with self._audited(context, "PinAdapter", request.ref) as (who, line):
            line.digest = await self._digest(who, request.ref)
            adapter = await self._frontend.pin(line.digest)
        return pb.PinAdapterResponse(adapter=self._to_resident(who, adapter))

    async def UnpinAdapter(  # noqa: N802
        self, request: pb.UnpinAdapterRequest, context: Context
    ) -> pb.UnpinAdapterResponse:
        with self._audited(context, "UnpinAdapter", request.ref) as (who, line):
            line.digest = await self._digest(who, request.ref)
            adapter = await self._frontend.unpin(line.digest)
        return pb.UnpinAdapterResponse(adapter=self._to_resident(who, adapter))

    async def ListResidentAdapters(  # noqa: N802
        self, request: pb.ListResidentAdaptersRequest, context: Context
    ) -> pb.ListResidentAdaptersResponse:
        who = self._admit(context, Action.OPERATE)
        adapters = await self._frontend.list_resident()
        owned = await self._directory.owned(who, [adapter.digest for adapter in adapters])
        return pb.ListResidentAdaptersResponse(
            adapters=[
                self._to_resident(who, adapter) for adapter in adapters if adapter.digest in owned
            ]
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        self._admit(context, Action.INFO)
        facts = self._facts
        status = await self._frontend.describe()
        return pb.GetServerInfoResponse(
            base_model=facts.base_model,
            architecture=facts.architecture,
            dtype=facts.dtype,
            device=facts.device,
            layout_id=self._directory.layout_id,
            limits=pb.ServerLimits(
                max_model_len=facts.max_model_len,
                max_loras=facts.max_loras,
                max_lora_rank=facts.max_lora_rank,
                max_sequences=facts.max_sequences,
                max_batch_tokens=facts.max_batch_tokens,
                max_queue=facts.max_queue,
                memory_bytes=status.memory_limit_bytes,
            ),
            memory=convert.to_memory(status.memory),
            versions=facts.versions,
            kernels=status.kernels,
        )

    def _to_resident(self, who: Principal, adapter: ResidentAdapter) -> pb.ResidentAdapter:
        return convert.to_resident_adapter(adapter, self._directory.names_of(who, adapter.digest))

    def _admit(self, context: Context, action: Action) -> Principal:
        """The caller. Raises as Gate.admit: the first thing that a call does."""
        return self._gate.admit(context.invocation_metadata(), action)

    @contextmanager
    def _audited(
        self, context: Context, what: str, name: str
    ) -> Iterator[tuple[Principal, AuditLine]]:
        """Lets an operator in, as `_admit`, and writes down how the call ended."""
        assert what in AUDITED
        with self._audit.watching(AuditLine(context.peer(), what, name)) as line:
            who = self._gate.identify(context.invocation_metadata())
            line.identify(who)
            who.require(Action.OPERATE)
            yield who, line
