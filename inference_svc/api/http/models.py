"""/v1/models: the base model and its adapters, each of which can be asked for as a model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.access import Action, Principal
from inference_svc.api.http.attending import attend
from inference_svc.api.http.errors import set_names
from inference_svc.api.http.request import recognising
from inference_svc.api.service import ServerFacts, Service
from inference_svc.errors import StoreUnavailable
from inference_svc.store.directory import Binding
from servicekit.errors import InvalidArgument, ServiceError
from servicekit.refs import short_name

Card: TypeAlias = dict[str, Any]

MAX_PAGE_SIZE = 1000
OWNER = "loadout"
KNOWN_SECONDS = 2.0
"""For what is known without the store, of which some names may have to be asked for in vain."""


def adapter_of(model: str, facts: ServerFacts) -> str:
    """The reference of the adapter that a caller means by a model; "" for the base model, whose
    names go before those of adapters."""
    return "" if model in (facts.base_model, *facts.aliases) else model


def label_of(binding: Binding | None, who: Principal, facts: ServerFacts) -> str:
    """What has answered: it can be asked for again, and stays the same."""
    return facts.base_model if binding is None else short_name(binding.label, who.home_tenant)


class Models:
    """The routes that list and show them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._start_time_s = int(time.time())

    async def list(self, request: Request) -> Response:
        """A page, which the base model begins. ?limit= and ?page_token= ask for more."""
        set_names(request, {"adapter": "page_token"})
        with recognising(request) as caller:
            who = self._service.admit(caller, Action.INFO)
        page_size = _limit(request.query_params.get("limit", str(MAX_PAGE_SIZE)))
        token = request.query_params.get("page_token", "")
        asking = self._service.list_adapters(who, page_size, token)
        try:
            page = await attend(request.receive, asking)
        except StoreUnavailable:
            if token:
                raise
            known = await attend(request.receive, self._known(who, page_size))
            return _listed([self._base(), *known], incomplete=True)
        cards = [] if token else [self._base()]
        for record in page.records:
            name = short_name(record.name, who.home_tenant)
            cards.append(self._adapter(name, record.digest, record.create_time_s))
        more = {"next_page_token": page.next_token} if page.next_token else {}
        return _listed(cards, has_more=bool(page.next_token), **more)

    async def _known(self, who: Principal, limit: int) -> Sequence[Card]:
        """While the store does not answer: of the adapters in memory those that the caller can
        still ask for: by the names that point to them or, where none is known, by versions."""
        cards: dict[str, Card] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_SECONDS):
                for resident in await self._service.list_resident(who):
                    names = [name for name in resident.names if "@" not in name]
                    for name in names or resident.names:
                        found = await self._found(who, name)
                        if found is not None:
                            own = short_name(name, who.home_tenant)
                            cards[own] = self._adapter(own, found.digest, found.create_time_s)
                    if len(cards) >= limit:
                        break
                    await asyncio.sleep(0)
        return [cards[name] for name in sorted(cards)][:limit]

    async def _found(self, who: Principal, name: str) -> Binding | None:
        try:
            return await self._service.bind(who, name)
        except ServiceError:
            return None

    async def show(self, request: Request) -> Response:
        set_names(request, {"adapter": "model"})
        with recognising(request) as caller:
            who = self._service.admit(caller, Action.INFO)
        model = request.path_params["model"]
        adapter = adapter_of(model, self._service.facts)
        found = await attend(request.receive, self._service.bind(who, adapter, subject="model"))
        if found is None:
            return JSONResponse(self._base())
        return JSONResponse(self._adapter(model, found.digest, found.create_time_s))

    def _base(self) -> Card:
        name = self._service.facts.base_model
        return _card(name, self._start_time_s, root=name, parent=None)

    def _adapter(self, name: str, digest: str, create_time_s: float) -> Card:
        """Its root is its content, which can be asked for as well."""
        parent = self._service.facts.base_model
        return _card(name, int(create_time_s), root=digest, parent=parent)


def _listed(cards: list[Card], *, has_more: bool = False, **more: Any) -> Response:
    return JSONResponse({"object": "list", "data": cards, "has_more": has_more, **more})


def _card(name: str, created: int, root: str, parent: str | None) -> Card:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
    }


def _limit(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_PAGE_SIZE:
        raise InvalidArgument(f"limit must be from 1 to {MAX_PAGE_SIZE}", subject="limit")
    return int(text)
