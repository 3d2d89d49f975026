"""InferenceService over gRPC: convert, call the service, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from inference_svc.api.access import Caller
from inference_svc.api.generate_call import MAX_ID_CHARS, GenerateCall, deadline_after
from inference_svc.api.generate_stream import INLINE_TOKENS, GenerateStream
from inference_svc.api.grpc import convert, results
from inference_svc.api.grpc.bounds import request_bounds
from inference_svc.api.grpc.pooling import (
    IncomingPoolCall,
    from_classify_request,
    from_embed_request,
    from_score_request,
    to_classifier_info,
    to_classify_responses,
    to_embed_responses,
    to_embedding_info,
    to_score_responses,
)
from inference_svc.api.grpc.prompts import check, checked_salt, from_tokenize_request
from inference_svc.api.grpc.uploads import PACE, from_upload, upload_stalled
from inference_svc.api.load_report import LOAD_HEADER, REFUSED_HEADER
from inference_svc.api.pooling.classify import (
    Classified,
    ClassifiedTokens,
    classes,
    labels_tokens,
    token_classes,
)
from inference_svc.api.pooling.embed import embeddings
from inference_svc.api.pooling.score import scores
from inference_svc.api.request_record import MAX_NAME_CHARS
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.service import Service
from inference_svc.core import MAX_PARTS, Action, Principal, sum_label
from inference_svc.debug import DebugInfo
from inference_svc.errors import PROMPT_SUBJECTS, Asleep, QueueFull
from inference_svc.pictures.uploads import IDLE_SECONDS
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from servicekit.errors import Draining, InvalidArgument
from servicekit.pace import at_pace
from servicekit.rpc.call import Call, Trailers
from servicekit.rpc.interceptor import CallRules
from servicekit.rpc.requests import INLINE_ENTRIES

Context: TypeAlias = Call
R = TypeVar("R")

TOOL_ENTRIES = 64
"""How many entries the schema of a tool has, at a guess."""

ELSEWHERE = (Draining, QueueFull, Asleep)
"""Errors after which another replica may take the call, because nothing was done here."""


def call_rules(load: Callable[[], str], max_model_len: int) -> CallRules:
    """`load` returns the value of LOAD_HEADER, which is sent with every answer."""

    def trailers(error: Exception | None) -> Trailers:
        refused = ((REFUSED_HEADER, error.reason),) if isinstance(error, ELSEWHERE) else ()
        return ((LOAD_HEADER, load()), *refused)

    return CallRules(
        domain="inference.loadout",
        requests=request_bounds(max_model_len),
        polled=frozenset({"GetServerInfo", "ListResidentAdapters"}),
        logged_elsewhere=frozenset({"Generate", "Embed", "Score", "Classify"}),
        private=PROMPT_SUBJECTS,
        refuse_when_draining=False,  # the engine refuses requests, with when to try again
        trailers=trailers,
    )


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    def __init__(self, service: Service, debug: DebugInfo) -> None:
        self._service = service
        self._debug = debug

    # Writing instead of yielding: a cancelled call then always ends inside this frame, and the
    # request with it.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        incoming = _IncomingCall(request, context, self._service.facts)
        del request  # the call lets go of it once it is converted
        stream = await self._service.generate(_caller(context), incoming)
        context.release_request()  # its prompts are tokens now
        call, identities = stream.call, convert.to_identities(stream.binding)
        identity = convert.to_identity(stream.binding, stream.requests[0])
        answers = [
            convert.Answer(call.request_id, identity, identities, index, call.wanted)
            for index in range(len(stream.requests))
        ]
        async with stream.deltas() as deltas:
            async for index, delta in deltas:
                for response in answers[index].responses(delta):
                    await context.write(response)

    async def UploadImage(  # noqa: N802
        self, requests: AsyncIterator[pb.UploadImageRequest], context: Context
    ) -> pb.UploadImageResponse:
        principal = self._service.access.authorize(_caller(context), Action.GENERATE)
        paced = at_pace(requests, PACE, lambda each: len(each.chunk), upload_stalled)
        async with aclosing(paced) as messages:
            size, cache_salt, pieces = await from_upload(messages)
            async with aclosing(pieces):
                sha256 = await self._service.uploads.receive(principal, size, cache_salt, pieces)
        return pb.UploadImageResponse(sha256=sha256, idle_seconds=int(IDLE_SECONDS))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> None:  # noqa: N802
        rule = self._service.facts.embedding
        incoming = IncomingPoolCall(request, context, partial(from_embed_request, rule=rule))
        del request  # the call lets go of it once it is converted
        await self._answer(incoming, context, partial(embeddings, rule=rule), to_embed_responses)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> None:  # noqa: N802
        facts = self._service.facts
        activation = facts.classifier.activation_of_score(is_raw=request.raw)
        convert_request = partial(from_score_request, facts=facts)
        incoming = IncomingPoolCall(request, context, convert_request)
        del request  # the call lets go of it once it is converted
        results = partial(scores, activation=activation)
        await self._answer(incoming, context, results, to_score_responses)

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> None:  # noqa: N802
        rule, is_raw = self._service.facts.classifier, request.raw

        def labels(stream: GenerateStream) -> AsyncGenerator[Classified | ClassifiedTokens, None]:
            found = token_classes if labels_tokens(stream.call) else classes
            return found(stream, rule, is_raw=is_raw)

        incoming = IncomingPoolCall(request, context, partial(from_classify_request, rule=rule))
        del request  # the call lets go of it once it is converted
        await self._answer(incoming, context, labels, to_classify_responses)

    async def _answer(
        self,
        incoming: IncomingPoolCall[Any],
        context: Context,
        results: Callable[[GenerateStream], AsyncGenerator[R, None]],
        to_responses: Callable[[GenerateStream, R], Iterator[Message]],
    ) -> None:
        """Runs a call that pools, and writes each of its results as it comes."""
        stream = await self._service.generate(_caller(context), incoming)
        context.release_request()  # its inputs are tokens now
        async with aclosing(results(stream)) as found:
            async for each in found:
                for response in to_responses(stream, each):
                    await context.write(response)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        facts = self._service.facts
        principal = self._service.access.authorize(_caller(context), Action.GENERATE)
        # The transport holds the message; only its conversion takes a thread.
        async with self._service.reading(principal, 0) as parsers:
            converting = parsers.submit(from_tokenize_request, request)
            prompt = await asyncio.wrap_future(converting)
            token_ids, _ = await self._service.encode(
                principal, request.adapter, prompt, "adapter", checked_salt(request.cache_salt)
            )
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=facts.max_model_len)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        principal = self._service.access.authorize(_caller(context), Action.GENERATE)
        check(bool(request.token_ids), "token_ids", "at least one id")
        try:
            token_ids, text = await self._service.encode(
                principal, request.adapter, tuple(request.token_ids), subject="adapter"
            )
        except InvalidArgument as error:
            if error.subject != "prompt":
                raise
            raise InvalidArgument(str(error), subject="token_ids") from None
        if len(token_ids) <= INLINE_TOKENS:
            return pb.DetokenizeResponse(text=text.decode_all(token_ids))
        return pb.DetokenizeResponse(text=await asyncio.to_thread(text.decode_all, token_ids))

    async def InspectAdapter(  # noqa: N802
        self, request: pb.InspectAdapterRequest, context: Context
    ) -> pb.InspectAdapterResponse:
        principal = self._service.access.authorize(_caller(context), Action.OPERATE)
        resident, details = await self._service.residents.inspect(principal, request.ref)
        arguments = details, self._service.layout, convert.to_resident_adapter(*resident)
        if len(details.targets) <= INLINE_ENTRIES:
            return convert.to_inspected(*arguments)
        return await asyncio.to_thread(convert.to_inspected, *arguments)

    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        loaded = await self._service.residents.load(
            _caller(context), request.ref, pin=request.pin, min_revision=request.min_revision
        )
        return pb.LoadAdapterResponse(adapter=convert.to_resident_adapter(*loaded.resident))

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        freed_bytes = await self._service.residents.unload(_caller(context), request.ref)
        return pb.UnloadAdapterResponse(freed_bytes=freed_bytes)

    async def PinAdapter(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: Context
    ) -> pb.PinAdapterResponse:
        pinned = await self._service.residents.pin(_caller(context), request.ref)
        return pb.PinAdapterResponse(adapter=convert.to_resident_adapter(*pinned))

    async def UnpinAdapter(  # noqa: N802
        self, request: pb.UnpinAdapterRequest, context: Context
    ) -> pb.UnpinAdapterResponse:
        unpinned = await self._service.residents.unpin(_caller(context), request.ref)
        return pb.UnpinAdapterResponse(adapter=convert.to_resident_adapter(*unpinned))

    async def PauseGeneration(  # noqa: N802
        self, request: pb.PauseGenerationRequest, context: Context
    ) -> pb.PauseGenerationResponse:
        mode, resume_after_s = convert.from_pause_request(request)
        num_held = await self._service.life_cycle.pause(_caller(context), mode, resume_after_s)
        return pb.PauseGenerationResponse(held_requests=num_held)

    async def ResumeGeneration(  # noqa: N802
        self, request: pb.ResumeGenerationRequest, context: Context
    ) -> pb.ResumeGenerationResponse:
        await self._service.life_cycle.resume(_caller(context))
        return pb.ResumeGenerationResponse()

    async def Sleep(  # noqa: N802
        self, request: pb.SleepRequest, context: Context
    ) -> pb.SleepResponse:
        freed_bytes = await self._service.life_cycle.sleep(
            _caller(context), frees_weights=request.free_weights
        )
        return pb.SleepResponse(freed_bytes=freed_bytes)

    async def Wake(  # noqa: N802
        self, request: pb.WakeRequest, context: Context
    ) -> pb.WakeResponse:
        return pb.WakeResponse(seconds=await self._service.life_cycle.wake(_caller(context)))

    async def ListResidentAdapters(  # noqa: N802
        self, request: pb.ListResidentAdaptersRequest, context: Context
    ) -> pb.ListResidentAdaptersResponse:
        principal = self._service.access.authorize(_caller(context), Action.OPERATE)
        residents = await self._service.residents.list_resident(principal, request.limit)
        return pb.ListResidentAdaptersResponse(
            adapters=[convert.to_resident_adapter(*resident) for resident in residents]
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        self._service.access.authorize(_caller(context), Action.INFO)
        facts = self._service.facts
        status = await self._service.describe()
        return pb.GetServerInfoResponse(
            base_model=facts.base_model,
            architecture=facts.architecture,
            dtype=facts.dtype,
            adapter_dtype=facts.adapter_dtype,
            kv_dtype=facts.kv_dtype,
            weight_form=facts.weight_form,
            device=facts.device,
            layout_id=self._service.layout_id,
            limits=pb.ServerLimits(
                max_model_len=facts.max_model_len,
                max_loras=facts.max_loras,
                max_lora_rank=facts.max_lora_rank,
                max_sequences=facts.max_sequences,
                max_batch_tokens=facts.max_batch_tokens,
                max_queue=facts.max_queue,
                memory_bytes=status.memory_limit_bytes,
                lora_targets=facts.lora_targets,
            ),
            memory=convert.to_memory(status.memory),
            versions=facts.versions,
            kernels=status.kernels,
            machine=status.machine,
            sampling_defaults=pb.SamplingDefaults(
                temperature=facts.sampling.temperature,
                top_k=facts.sampling.top_k,
                top_p=facts.sampling.top_p,
                logprobs_mode=results.to_logprobs_mode(facts.sampling.logprobs_mode),
            ),
            metrics_port=facts.metrics_port,
            experts=results.to_expert_layers(facts.experts),
            generation=convert.to_generation_state(status.generation),
            num_threads=facts.num_threads,
            processor=convert.to_processor(facts.processor),
            speed_notes=facts.speed_notes,
            recurrent_states=convert.to_recurrent_states(status.recurrent),
            ranks=[convert.to_rank_status(each) for each in status.ranks],
            weight_formats=[pb.WeightFormat(**each._asdict()) for each in facts.weight_formats],
            generates=facts.generates,
            embedding=to_embedding_info(facts),
            classifier=to_classifier_info(facts),
        )

    async def GetDebugInfo(  # noqa: N802
        self, request: pb.GetDebugInfoRequest, context: Context
    ) -> None:
        self._service.access.authorize_inspection(_caller(context))
        async with aclosing(self._debug.parts()) as parts:
            async for part in parts:
                await context.write(
                    pb.GetDebugInfoResponse(name=part.name, content=part.content, error=part.error)
                )

    async def ProfileSteps(  # noqa: N802
        self, request: pb.ProfileStepsRequest, context: Context
    ) -> None:
        self._service.access.authorize_inspection(_caller(context))
        num_steps, timeout_s = convert.from_profile_request(request)
        async with self._service.profile(num_steps, timeout_s, request.rank) as trace:
            await context.write(pb.ProfileStepsResponse(num_steps=trace.num_steps))
            async for chunk in trace.chunks():
                await context.write(pb.ProfileStepsResponse(chunk=chunk))


class _IncomingCall:
    """A call whose message is here, until it is read; see `service.IncomingCall`."""

    def __init__(self, request: pb.GenerateRequest, context: Context, facts: ServerFacts) -> None:
        self.request_id: str = request.request_id[:MAX_ID_CHARS]
        parts = sum_label(part.ref[:MAX_NAME_CHARS] for part in request.adapters[:MAX_PARTS])
        self.adapter: str = request.adapter[:MAX_NAME_CHARS] or parts
        self.num_read = 0  # the transport has read, and charged, it
        self._request = request
        self._context = context
        self._facts = facts

    def accept(self, caller: Principal) -> int:
        return 0  # held by the transport since before it was read

    async def read(self, parsers: Executor) -> GenerateCall:
        request, self._request = self._request, pb.GenerateRequest()
        deadline_s = deadline_after(self._context.time_remaining())
        chat = request.chat
        num_entries = len(chat.messages) + TOOL_ENTRIES * len(chat.tools)
        if len(request.token_ids.ids) + num_entries <= INLINE_ENTRIES:
            return convert.from_generate_request(
                request, self._facts.vocab_size, deadline_s, self._facts.sampling
            )
        converting = parsers.submit(
            convert.from_generate_request,
            request,
            self._facts.vocab_size,
            deadline_s,
            self._facts.sampling,
        )
        del request  # the parser alone holds it
        return await asyncio.wrap_future(converting)


def _caller(context: Context) -> Caller:
    return Caller(context.invocation_metadata(), context.peer())
