"""InferenceService: convert, call, convert. Errors become statuses in `status`."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from inference_svc import convert
from inference_svc.core import Request
from inference_svc.frontend import Frontend
from inference_svc.metrics import Metrics
from inference_svc.names import Binding, Directory
from inference_svc.refs import parse_ref
from inference_svc.text.prompt import PromptEncoder
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc

Context: TypeAlias = grpc.aio.ServicerContext


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
        metrics: Metrics,
    ) -> None:
        self._facts = facts
        self._frontend = frontend
        self._directory = directory
        self._prompts = prompts
        self._metrics = metrics

    # Writing instead of yielding: a cancelled call then always ends inside this frame, and the
    # request with it.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        call = convert.from_generate_request(request, self._facts.vocab_size)
        binding = await self._bind(call.adapter, call.min_revision)
        prompt = await self._prompts.encode(call.prompt)
        remaining_s = context.time_remaining()
        to_run = call.to_request(prompt, binding, self._facts.max_model_len, remaining_s)
        await self._stream(to_run, convert.to_identity(binding), context)

    async def _stream(
        self, request: Request, identity: pb.AdapterIdentity | None, context: Context
    ) -> None:
        num_tokens = 0
        try:
            async with aclosing(self._frontend.generate(request)) as deltas:
                async for delta in deltas:
                    num_tokens += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        total_s = time.monotonic() - request.arrival_s
                        self._metrics.count_finished(
                            delta.finish_reason, delta.usage, delta.timings, total_s
                        )
                    await context.write(
                        convert.to_generate_response(request.request_id, delta, identity)
                    )
        finally:
            self._metrics.generated_tokens.inc(num_tokens)

    async def _bind(self, ref: str, min_revision: int) -> Binding | None:
        return await self._directory.resolve(ref, min_revision) if ref else None

    async def _digest(self, ref: str) -> str:
        """A digest is taken as it is: what is resident may be gone from the store."""
        parsed = parse_ref(ref, subject="ref")
        return parsed.digest or (await self._directory.resolve(ref, subject="ref")).digest

    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        binding = await self._directory.resolve(request.ref, subject="ref")
        adapter = await self._frontend.load(binding.digest, request.pin)
        names = self._directory.names_of(binding.digest)
        return pb.LoadAdapterResponse(adapter=convert.to_resident_adapter(adapter, names))

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        digest = await self._digest(request.ref)
        return pb.UnloadAdapterResponse(freed_bytes=await self._frontend.unload(digest))

    async def PinAdapter(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: Context
    ) -> pb.PinAdapterResponse:
        adapter = await self._frontend.pin(await self._digest(request.ref))
        names = self._directory.names_of(adapter.digest)
        return pb.PinAdapterResponse(adapter=convert.to_resident_adapter(adapter, names))

    async def UnpinAdapter(  # noqa: N802
        self, request: pb.UnpinAdapterRequest, context: Context
    ) -> pb.UnpinAdapterResponse:
        adapter = await self._frontend.unpin(await self._digest(request.ref))
        names = self._directory.names_of(adapter.digest)
        return pb.UnpinAdapterResponse(adapter=convert.to_resident_adapter(adapter, names))

    async def ListResidentAdapters(  # noqa: N802
        self, request: pb.ListResidentAdaptersRequest, context: Context
    ) -> pb.ListResidentAdaptersResponse:
        adapters = await self._frontend.list_resident()
        return pb.ListResidentAdaptersResponse(
            adapters=[
                convert.to_resident_adapter(adapter, self._directory.names_of(adapter.digest))
                for adapter in adapters
            ]
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
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
            ),
            memory=convert.to_memory(status.memory),
            versions=facts.versions,
        )
