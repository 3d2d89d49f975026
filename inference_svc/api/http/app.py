"""The application: its routes, its error handlers and its middleware."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from inference_svc.api.http.adapters import Adapters
from inference_svc.api.http.chat.endpoint import ChatBody, ChatCompletions
from inference_svc.api.http.completions import CompletionBody, Completions
from inference_svc.api.http.errors import handle_error
from inference_svc.api.http.generate import GenerateRoute
from inference_svc.api.http.life_cycle import LifeCycleRoutes
from inference_svc.api.http.messages.route import MessagesRoute
from inference_svc.api.http.models import Models
from inference_svc.api.http.pooling.embeddings import Embeddings
from inference_svc.api.http.pooling.pooling import Classify, PoolingTasks
from inference_svc.api.http.pooling.route import Endpoint, PoolRoute
from inference_svc.api.http.pooling.scores import Rerank, Score
from inference_svc.api.http.pooling.tei import (
    Embed,
    EmbedAll,
    Predict,
    Similarity,
    TeiRoutes,
)
from inference_svc.api.http.request import admit, authenticated
from inference_svc.api.http.responses.route import ResponsesRoute
from inference_svc.api.http.serving.middleware import RequestMiddleware
from inference_svc.api.http.tokenizer import TokenizerRoutes
from inference_svc.api.http.tokens import Tokens, TokensBody
from inference_svc.api.http.trainers import WEIGHT_ROUTES, Trainers
from inference_svc.api.service import Service
from inference_svc.core import Action
from inference_svc.metrics.requests import Metrics
from servicekit.errors import ServiceError
from servicekit.shares import Shares
from servicekit.telemetry.recent_errors import CallEnd
from servicekit.telemetry.tracing import Tracing

POOLING: Mapping[str, Endpoint[Any]] = {
    "/v1/embeddings": Embeddings(),
    **dict.fromkeys(("/v1/score", "/score"), Score()),
    "/classify": Classify(),
    "/pooling": PoolingTasks(),
    "/embed": Embed(),
    "/embed_all": EmbedAll(),
    "/predict": Predict(),
    "/similarity": Similarity(),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), Rerank()),
}
"""The routes that pool, with their names in vLLM and text-embeddings-inference."""
CURRENT_SECONDS = 0.05
"""How long metrics are current: as often as gateways scrape them."""


class Operations:
    """The routes of orchestrators and scrapers."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        is_serving: Callable[[], bool],
        opens_metrics: bool,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._gateways = SharedExposition(metrics.gateway_exposition)
        self._is_serving = is_serving
        self._opens_metrics = opens_metrics

    async def health(self, request: Request) -> Response:
        """Requires no token: probes have none."""
        return Response(status_code=200 if self._is_serving() else 503)

    async def metrics(self, request: Request) -> Response:
        """Requires an operator of all tenants, whose adapters' names the metrics contain."""
        if self._opens_metrics and "authorization" not in request.headers:
            text, media_type = await self._gateways.get()  # gateways have no token
        else:
            with authenticated(request) as caller:
                principal = self._service.access.authorize(caller, Action.OPERATE)
                admit(request, principal)
            principal.require_all_tenants()
            text, media_type = await asyncio.to_thread(self._metrics.exposition)
        return Response(text, headers={"content-type": media_type})


class SharedExposition:
    """Metrics for callers without a token: however many ask, one thread renders, and each text is
    for all that ask while it is current."""

    def __init__(self, expose: Callable[[], tuple[bytes, str]]) -> None:
        self._expose = expose
        self._rendering: asyncio.Task[tuple[bytes, str]] | None = None
        self._end_s = 0.0

    async def get(self) -> tuple[bytes, str]:
        """Returns the text and its media type."""
        now_s = time.monotonic()
        rendering = self._rendering
        if rendering is None or (rendering.done() and now_s >= self._end_s):
            rendering = asyncio.create_task(asyncio.to_thread(self._expose))
            self._rendering, self._end_s = rendering, now_s + CURRENT_SECONDS
        return await asyncio.shield(rendering)


def _pool_routes(service: Service, answers: Shares) -> Iterator[Route]:
    for path, endpoint in POOLING.items():
        yield Route(path, PoolRoute(service, endpoint, answers).handle, methods=["POST"])
    tei = TeiRoutes(service)
    yield Route("/embed_sparse", tei.refuse_sparse, methods=["POST"])
    yield Route("/info", tei.info)


def make_app(
    service: Service,
    metrics: Metrics,
    on_end: Callable[[CallEnd], None],
    load: Callable[[], str],
    answers: Shares,
    *,
    is_serving: Callable[[], bool],
    opens_metrics: bool = False,
    tracing: Tracing | None = None,
) -> RequestMiddleware:
    """Returns the application, for the event loop of `service`. See RequestMiddleware for `on_end`
    and `load`, AnswerMemory for `answers`. `opens_metrics`: callers without a token get the metrics
    that gateways route by."""
    models, adapters, trainers = Models(service, answers), Adapters(service), Trainers(service)
    life_cycle, tokenizer = LifeCycleRoutes(service), TokenizerRoutes(service, answers)
    operations = Operations(service, metrics, is_serving, opens_metrics)
    chat: GenerateRoute[ChatBody] = GenerateRoute(service, ChatCompletions(), answers)
    completions: GenerateRoute[CompletionBody] = GenerateRoute(service, Completions(), answers)
    tokens: GenerateRoute[TokensBody] = GenerateRoute(service, Tokens(), answers)
    responses, messages = ResponsesRoute(service, answers), MessagesRoute(service, answers)
    routes = [
        Route("/v1/chat/completions", chat.handle, methods=["POST"]),
        Route("/v1/completions", completions.handle, methods=["POST"]),
        Route("/v1/responses", responses.handle, methods=["POST"]),
        Route("/v1/messages", messages.handle, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
        *_pool_routes(service, answers),
        Route("/inference/v1/generate", tokens.handle, methods=["POST"]),
        Route("/tokenize", tokenizer.tokenize, methods=["POST"]),
        Route("/detokenize", tokenizer.detokenize, methods=["POST"]),
        Route("/version", tokenizer.version),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.show),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/server_info", trainers.server_info),
        Route("/get_world_size", trainers.world_size),
        Route("/reset_prefix_cache", trainers.reset_prefix_cache, methods=["POST"]),
        *(Route(path, trainers.refuse_weights, methods=["POST"]) for path in WEIGHT_ROUTES),
        Route("/pause", life_cycle.pause, methods=["POST"]),
        Route("/resume", life_cycle.resume, methods=["POST"]),
        Route("/is_paused", life_cycle.is_paused),
        Route("/sleep", life_cycle.sleep, methods=["POST"]),
        Route("/wake_up", life_cycle.wake, methods=["POST"]),
        Route("/is_sleeping", life_cycle.is_sleeping),
        Route("/health", operations.health),
        Route("/metrics", operations.metrics),
    ]
    handled = (ServiceError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, handle_error))
    app.router.redirect_slashes = False
    return RequestMiddleware(app, [route.path for route in routes], on_end, load, tracing)
