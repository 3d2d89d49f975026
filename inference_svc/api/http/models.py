"""/v1/models: the base model and its adapters, each of which is a model to callers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.api.http.errors import set_names
from inference_svc.api.http.request import admit, authenticated
from inference_svc.api.http.response import AnswerMemory, FullResponse
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from inference_svc.api.http.sse import to_json
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.service import Service
from inference_svc.core import Action, Principal
from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.store.adapter_resolver import Binding
from servicekit.errors import InvalidArgument, ServiceError
from servicekit.refs import short_name
from servicekit.shares import Shares

Card: TypeAlias = dict[str, Any]

MAX_PAGE_SIZE = 1000
OWNER = "loadout"
RESIDENT_SECONDS = 2.0
"""How long resident adapters are listed while the store is unreachable: names that are not cached
take time to fail."""


def adapter_of(model: str, facts: ServerFacts) -> str:
    """Returns the adapter reference that a model's name stands for; "" for the base model, whose
    names take precedence.

    Raises AdapterNotFound for "base:adapter", as other servers name adapters: here an adapter has
    one name, by which it is routed, counted and allowed."""
    bases = (facts.base_model, *facts.aliases)
    if model in bases:
        return ""
    base, _, adapter = model.rpartition(":")
    if adapter and base in bases:
        raise AdapterNotFound(
            f"model: {model!r} is no model: write {adapter!r}, the adapter's name alone",
            subject="model",
        )
    return model


def label_of(binding: Binding | None, principal: Principal, facts: ServerFacts) -> str:
    """Returns the name of the model or adapter that answered, with its version: a valid model name.
    Of several adapters it is the base model's."""
    if binding is None or binding.parts:
        return facts.base_model
    return short_name(binding.label, principal.home_tenant)


class Models:
    def __init__(self, service: Service, answers: Shares) -> None:
        self._service = service
        self._answers = answers
        self._start_time_s = int(time.time())

    async def list(self, request: Request) -> Response:
        """Returns a page; the first begins with the base model. Takes ?limit= and ?page_token=."""
        set_names(request, {"adapter": "page_token"})
        with authenticated(request) as caller:
            principal = self._service.access.authorize(caller, Action.INFO)
            admit(request, principal)
        page_size = _limit(request.query_params.get("limit", str(MAX_PAGE_SIZE)))
        token = request.query_params.get("page_token", "")
        listing = self._service.list_adapters(principal, page_size, token)
        try:
            page = await cancel_on_disconnect(request.receive, listing)
        except StoreUnavailable:
            if token:
                raise
            resident = await cancel_on_disconnect(
                request.receive, self._resident(principal, page_size)
            )
            return self._list_response(principal, [self._base(), *resident], incomplete=True)
        cards = [] if token else [self._base()]
        for record in page.records:
            name = short_name(record.name, principal.home_tenant)
            cards.append(self._adapter(name, record.digest, record.create_time_s))
        more = {"next_page_token": page.next_token} if page.next_token else {}
        return self._list_response(principal, cards, has_more=bool(page.next_token), **more)

    async def _resident(self, principal: Principal, limit: int) -> Sequence[Card]:
        """Returns the resident adapters that the caller can use while the store is unreachable: by
        the names that point to them or, where none is cached, by versions. Old versions are not
        listed, as they would not be if the store answered."""
        cards: dict[str, Card] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESIDENT_SECONDS):
                for resident in await self._service.residents.list_resident(principal):
                    if resident.is_superseded:
                        continue
                    names = [name for name in resident.names if "@" not in name]
                    for name in names or resident.names:
                        binding = await self._resolve(principal, name)
                        if binding is not None:
                            own = short_name(name, principal.home_tenant)
                            cards[own] = self._adapter(own, binding.digest, binding.create_time_s)
                    if len(cards) >= limit:
                        break
                    await asyncio.sleep(0)
        return [cards[name] for name in sorted(cards)][:limit]

    async def _resolve(self, principal: Principal, name: str) -> Binding | None:
        try:
            return await self._service.resolve(principal, name)
        except ServiceError:
            return None

    async def show(self, request: Request) -> Response:
        set_names(request, {"adapter": "model"})
        with authenticated(request) as caller:
            principal = self._service.access.authorize(caller, Action.INFO)
            admit(request, principal)
        model = request.path_params["model"]
        adapter = adapter_of(model, self._service.facts)
        resolving = self._service.resolve(principal, adapter, subject="model")
        binding = await cancel_on_disconnect(request.receive, resolving)
        if binding is None:
            return JSONResponse(self._base())
        return JSONResponse(self._adapter(model, binding.digest, binding.create_time_s))

    def _list_response(
        self, principal: Principal, cards: Sequence[Card], *, has_more: bool = False, **more: Any
    ) -> Response:
        """Raises ShareExceeded if too much of the caller's is not read yet."""
        listed = {"object": "list", "data": cards, "has_more": has_more, **more}
        body = to_json(listed).encode()
        memory = AnswerMemory(self._answers, principal.account)
        memory.add(len(body))
        return FullResponse([body], {}, memory)

    def _base(self) -> Card:
        name = self._service.facts.base_model
        return self._card(name, self._start_time_s, root=name, parent=None)

    def _adapter(self, name: str, digest: str, create_time_s: float) -> Card:
        """Its root is its digest, which is a valid model name as well."""
        parent = self._service.facts.base_model
        return self._card(name, int(create_time_s), root=digest, parent=parent)

    def _card(self, name: str, created: int, root: str, parent: str | None) -> Card:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": OWNER,
            "root": root,
            "parent": parent,
            "max_model_len": self._service.facts.max_model_len,
        }


def _limit(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_PAGE_SIZE:
        raise InvalidArgument(f"limit must be from 1 to {MAX_PAGE_SIZE}", subject="limit")
    return int(text)
