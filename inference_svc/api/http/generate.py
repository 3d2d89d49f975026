"""The routes that generate: from a body to an answer, whole or in events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from inference_svc import core
from inference_svc.access import Principal
from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.http.attending import attend
from inference_svc.api.http.bounds import bounded
from inference_svc.api.http.choices import run_all, to_usage
from inference_svc.api.http.errors import Names, set_names
from inference_svc.api.http.fields import GenerationBody
from inference_svc.api.http.models import adapter_of, label_of
from inference_svc.api.http.request import (
    REQUEST_ID_HEADER,
    check_request_id,
    read_body,
    recognising,
    request_id_of,
)
from inference_svc.api.http.response import NO_USAGE, Choice, Teller, WholeAnswer
from inference_svc.api.http.sse import DONE, EventStream, to_event, to_json
from inference_svc.api.request_record import Account
from inference_svc.api.sampling import NUM_SEEDS, checked_sampling
from inference_svc.api.service import Service
from inference_svc.core import SamplingParams
from inference_svc.text.pieces import Pieces
from inference_svc.text.prompt import Prompt

B = TypeVar("B", bound=GenerationBody)
B_contra = TypeVar("B_contra", bound=GenerationBody, contravariant=True)


class Kind(Protocol[B_contra]):
    """What such a route has of its own. `names` are its names for the subjects of errors."""

    body: ClassVar[Any]
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    names: ClassVar[Names]

    def prompts(self, body: B_contra) -> tuple[Prompt, ...]: ...
    def sampling(self, body: B_contra, max_model_len: int) -> SamplingParams: ...
    def teller(self, index: int, body: B_contra, pieces: Pieces) -> Teller: ...


@dataclass(frozen=True, slots=True)
class Asked(Generic[B]):
    """A body that can be answered: `requests` of all choices, in order, and `head`, which every
    object of the answer begins with but for its type."""

    body: B
    requests: list[core.Request]
    head: dict[str, Any]
    per_prompt: int
    account: Account


class Generating(Generic[B]):
    """One route."""

    def __init__(self, service: Service, pieces: Pieces, kind: Kind[B]) -> None:
        self._service = service
        self._pieces = pieces
        self._kind = kind

    async def handle(self, request: Request) -> Response:
        set_names(request, self._kind.names)
        request_id = request_id_of(request)
        with self._service.accounts.asking(request_id, "") as account:
            with recognising(request) as caller:
                who = self._service.admit_request(caller, account)
            check_request_id(request)
            body: B = await read_body(request, self._kind.body)
            account.adapter = adapter_of(body.model, self._service.facts)
            asked = await attend(request.receive, self._ask(who, body, account))
        headers = {REQUEST_ID_HEADER: request_id}
        if body.stream:
            return EventStream(self._events(asked), self._kind.names, headers)
        return WholeAnswer(await attend(request.receive, self._whole(asked)), headers)

    async def _ask(self, who: Principal, body: B, account: Account) -> Asked[B]:
        """Raises InvalidArgument, and as Service.bind."""
        service, facts, request_id = self._service, self._service.facts, account.request_id
        body.check_streaming()
        prompts = self._kind.prompts(body)
        sampling = checked_sampling(
            self._kind.sampling(body, facts.max_model_len), facts.vocab_size
        )
        adapter = account.adapter
        binding = await service.bind(who, adapter, body.min_revision or 0, "model")
        account.bind(binding)
        account.prompt = prompts[0]
        requests: list[core.Request] = []
        for prompt in prompts:
            call = GenerateCall(
                request_id=request_id,
                adapter=adapter,
                min_revision=0,
                prompt=prompt,
                sampling=sampling,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
            requests += _choices_of(await service.prepare(who, call, binding), body.n or 1)
        head = {
            "id": f"{self._kind.id_prefix}-{request_id}",
            "created": int(time.time()),
            "model": label_of(binding, who, facts),
            "system_fingerprint": None if binding is None else binding.digest,
        }
        requests = bounded(_numbered(requests), body.limit_field)
        return Asked(body, requests, head, body.n or 1, account)

    async def _whole(self, asked: Asked[B]) -> list[bytes]:
        """JSON in parts."""
        choices = [Choice(teller) for teller in self._tellers(asked)]
        async with aclosing(run_all(self._service, asked.requests, asked.account)) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        usage = to_usage([choice.usage for choice in choices], asked.per_prompt)
        facts = {**asked.head, "object": self._kind.object, "usage": usage}
        parts = [to_json(facts)[:-1].encode() + b',"choices":[']
        for choice in choices:
            parts += (choice.written(), b",")
            await asyncio.sleep(0)
        parts[-1] = b"]}"
        return parts

    async def _events(self, asked: Asked[B]) -> AsyncGenerator[bytes, None]:
        head = {**asked.head, "object": self._kind.chunk_object}
        wants_usage = asked.body.includes_usage
        # All but the choice is the same in every event: written once.
        before = f'data: {to_json(head)[:-1]},"choices":['
        after = '],"usage":null}\n\n' if wants_usage else "]}\n\n"
        tellers = self._tellers(asked)
        usages = [NO_USAGE] * len(tellers)
        async with aclosing(run_all(self._service, asked.requests, asked.account)) as deltas:
            async for index, delta in deltas:
                usages[index] = delta.usage or usages[index]
                part = tellers[index].part(delta)
                if part is not None:
                    yield f"{before}{to_json(part)}{after}".encode()
        if wants_usage:
            usage = to_usage(usages, asked.per_prompt)
            yield to_event({**head, "choices": [], "usage": usage})
        yield DONE

    def _tellers(self, asked: Asked[B]) -> list[Teller]:
        return [
            self._kind.teller(index, asked.body, self._pieces)
            for index in range(len(asked.requests))
        ]


def _choices_of(request: core.Request, count: int) -> list[core.Request]:
    """The first has the seed itself, so that it is what one choice alone would be; the others
    have the next ones."""
    first = request.sampling.seed
    return [
        replace(request, sampling=replace(request.sampling, seed=(first + index) % NUM_SEEDS))
        for index in range(count)
    ]


def _numbered(requests: list[core.Request]) -> list[core.Request]:
    """With ids of their own, where there are several."""
    if len(requests) == 1:
        return requests
    return [
        replace(request, request_id=f"{request.request_id}-{index}")
        for index, request in enumerate(requests)
    ]
