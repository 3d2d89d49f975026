"""The routes, and what surrounds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from inference_svc.access import Action
from inference_svc.api.http.adapters import Adapters
from inference_svc.api.http.chat import ChatBody, ChatCompletions
from inference_svc.api.http.completions import CompletionBody, Completions
from inference_svc.api.http.errors import answer_error
from inference_svc.api.http.generate import Generating
from inference_svc.api.http.middleware import Counting
from inference_svc.api.http.models import Models
from inference_svc.api.http.request import recognising
from inference_svc.api.service import Service
from inference_svc.debug.last_errors import CallEnd
from inference_svc.metrics.metrics import Metrics
from inference_svc.text.pieces import Pieces, Vocabulary
from servicekit.errors import ServiceError
from servicekit.telemetry.tracing import Tracing


class Operations:
    """What orchestrators and scrapers ask for."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        is_serving: Callable[[], bool],
        opens_metrics: bool,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._is_serving = is_serving
        self._opens_metrics = opens_metrics

    async def health(self, request: Request) -> Response:
        """Needs no token: probes have none."""
        return Response(status_code=200 if self._is_serving() else 503)

    async def metrics(self, request: Request) -> Response:
        """Names of all tenants' adapters are in it, and callers may come here."""
        tell = self._metrics.exposition
        if self._opens_metrics and "authorization" not in request.headers:
            tell = self._metrics.gateway_exposition  # gateways have no token
        else:
            with recognising(request) as caller:
                who = self._service.admit(caller, Action.OPERATE)
            who.require_all_tenants("the metrics tell")
        text, media_type = await asyncio.to_thread(tell)
        return Response(text, headers={"content-type": media_type})


def make_app(
    service: Service,
    vocabulary: Vocabulary,
    metrics: Metrics,
    on_end: Callable[[CallEnd], None],
    load: Callable[[], str],
    *,
    is_serving: Callable[[], bool],
    opens_metrics: bool = False,
    tracing: Tracing | None = None,
) -> Counting:
    """To be served on the event loop of `service`. `on_end` and `load` are Counting's.
    `opens_metrics`: who has no token learns what gateways route by."""
    pieces = Pieces(vocabulary)
    models, adapters = Models(service), Adapters(service)
    operations = Operations(service, metrics, is_serving, opens_metrics)
    chat: Generating[ChatBody] = Generating(service, pieces, ChatCompletions())
    completions: Generating[CompletionBody] = Generating(service, pieces, Completions())
    routes = [
        Route("/v1/chat/completions", chat.handle, methods=["POST"]),
        Route("/v1/completions", completions.handle, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.show),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/health", operations.health),
        Route("/metrics", operations.metrics),
    ]
    handled = (ServiceError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, answer_error))
    app.router.redirect_slashes = False
    return Counting(app, [route.path for route in routes], on_end, load, tracing)
