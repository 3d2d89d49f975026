"""/pause, /resume, /is_paused, /sleep, /wake_up and /is_sleeping, as trainers know them from vLLM.

Their parameters are in the query. Where vLLM's would lose requests, ours do only when asked to.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.api.access import Caller
from inference_svc.api.generate_call import checked_resume
from inference_svc.api.http.errors import set_names
from inference_svc.api.http.request import admit, authenticated
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from inference_svc.api.service import Service
from inference_svc.core import Action
from inference_svc.engine.control.status_types import EngineStatus
from inference_svc.engine.transport.messages import PauseMode
from servicekit.errors import InvalidArgument

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_PAUSE_NAMES = ("mode", "wait_for_inflight_requests", "resume_after_seconds", "clear_cache")
"""`clear_cache` has no effect: pages are found by the version that made them, and never stale."""
_TAGS = frozenset({"weights", "kv_cache"})
"""The parts that vLLM can wake one by one; here all wake at once."""
LEVELS = {"0": False, "1": True, "2": True}
"""Whether vLLM's level frees the weights; here they are read again whichever it was."""


class LifeCycleRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def pause(self, request: Request) -> Response:
        """Takes ?mode=keep (default), wait or abort, and ?resume_after_seconds=. Raises
        InvalidArgument."""
        caller = self._authorize(request, "PauseGeneration")
        query = _query(request, _PAUSE_NAMES)
        waits = _flag(query, "wait_for_inflight_requests")  # vLLM's, before it had modes
        mode = query.get("mode", (PauseMode.WAIT if waits else PauseMode.KEEP).value)
        if mode not in {each.value for each in PauseMode}:
            raise InvalidArgument("mode must be keep, wait or abort", subject="mode")
        _flag(query, "clear_cache")
        seconds = query.get("resume_after_seconds")
        resume_after_s = 0.0 if seconds is None else checked_resume(_number(seconds))
        pausing = self._service.life_cycle.pause(caller, PauseMode(mode), resume_after_s)
        num_held = await cancel_on_disconnect(request.receive, pausing)
        return JSONResponse({"status": "paused", "held_requests": num_held})

    async def resume(self, request: Request) -> Response:
        caller = self._authorize(request, "ResumeGeneration")
        _query(request, ())
        await self._service.life_cycle.resume(caller)
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: Request) -> Response:
        """Takes ?level=0, pages only, 1 (default) or 2, weights too; ?mode=keep, which alone
        loses nothing. Raises InvalidArgument."""
        caller = self._authorize(request, "Sleep")
        query = _query(request, ("level", "mode"))
        level = query.get("level", "1")
        if level not in LEVELS:
            raise InvalidArgument("level must be 0, 1 or 2", subject="level")
        if query.get("mode", "keep") != "keep":
            message = "mode must be keep: running requests continue when the server is woken"
            raise InvalidArgument(message, subject="mode")
        sleeping = self._service.life_cycle.sleep(caller, frees_weights=LEVELS[level])
        freed_bytes = await cancel_on_disconnect(request.receive, sleeping)
        return JSONResponse({"status": "asleep", "freed_bytes": freed_bytes})

    async def wake(self, request: Request) -> Response:
        """Takes ?tags=weights and ?tags=kv_cache, without effect. Raises InvalidArgument."""
        caller = self._authorize(request, "Wake")
        _query(request, ("tags",))
        if not _TAGS.issuperset(request.query_params.getlist("tags")):
            raise InvalidArgument("tags must be weights or kv_cache", subject="tags")
        seconds = await cancel_on_disconnect(request.receive, self._service.life_cycle.wake(caller))
        return JSONResponse({"status": "awake", "seconds": seconds})

    async def is_paused(self, request: Request) -> Response:
        status = await self._status(request)
        return JSONResponse({"is_paused": bool(status.gauges["generation_paused"])})

    async def is_sleeping(self, request: Request) -> Response:
        status = await self._status(request)
        return JSONResponse({"is_sleeping": status.generation == "asleep"})

    def _authorize(self, request: Request, method: str) -> Caller:
        set_names(request, {})
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize_change(caller, method))
        return caller

    async def _status(self, request: Request) -> EngineStatus:
        set_names(request, {})
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.INFO))
        return await self._service.describe()


def _query(request: Request, names: tuple[str, ...]) -> Mapping[str, str]:
    """Returns the query. Raises InvalidArgument for any other value."""
    for name in request.query_params:
        if name not in names:
            allowed = ", ".join(names) or "nothing"
            raise InvalidArgument(f"{name[:64]}: unknown; this takes {allowed}", subject=name[:64])
    return request.query_params


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = _FLAGS.get(query.get(name, "false").lower())
    if value is None:
        raise InvalidArgument(f"{name} must be true or false", subject=name)
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = "resume_after_seconds must be a number"
        raise InvalidArgument(message, subject="resume_after_seconds") from None
