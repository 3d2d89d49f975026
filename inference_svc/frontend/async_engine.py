"""The engine as coroutines: turns its outputs into one stream of text per request. Knows asyncio,
and no transport.

Everything here runs on one event loop; the engine's thread, or the thread that reads from its
process, only hands over its outputs, once per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, Protocol

from inference_svc.core import Request
from inference_svc.engine.transport.messages import (
    Cancel,
    Message,
    Move,
    Output,
    StepOutputs,
    Submit,
)
from inference_svc.errors import DuplicateRequest, EngineFailed
from inference_svc.frontend.engine_calls import EngineCalls
from inference_svc.frontend.output_stream import UNREAD_BYTES, Delta, Generation
from inference_svc.text.detokenizer import TokenDecoder
from servicekit.errors import Draining, ServiceError
from servicekit.shares import Shares

logger = logging.getLogger(__name__)

END_S = 5.0
"""The end of a grace, at most half of it, that a server keeps for itself if its engine hangs."""
ANSWER_S = 1.0
"""How long an engine may take to answer before it is believed to hang."""


class EngineHandle(Protocol):
    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None: ...
    def send(self, message: Message) -> None: ...


class RequestObserver(Protocol):
    """Observes one request until the engine has finished it."""

    def submitted(self) -> None:
        """Called when the engine gets the request; `finished` follows, once."""
        ...

    def finished(self, last: Output | None) -> None:
        """Called with the last output, even when its caller has left; None if the engine died."""
        ...


class AsyncEngine:
    """Requests as streams; `calls` has the calls of operators and of this server itself.

    `failed` is set when the engine has died, of `failure`: nothing works then. `on_spans` is called
    with the spans that the engine has recorded. `unread_bytes` bounds accounts' unread outputs.
    """

    def __init__(self, engine: EngineHandle, decoder: TokenDecoder, unread_bytes: Shares) -> None:
        self.failed = asyncio.Event()
        self.failure: EngineFailed | None = None
        self._engine = engine
        self._decoder = decoder
        self._unread_bytes = unread_bytes
        self._loop = asyncio.get_running_loop()
        self._generations: dict[str, Generation] = {}
        self._observers: dict[str, RequestObserver] = {}
        self.on_spans: Callable[[tuple[Any, ...]], None] = lambda spans: None
        self.calls = EngineCalls(engine.send)
        self._engine_ids: dict[tuple[str, str], str] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Starts the engine; called once, on the loop of all other calls."""
        self._engine.start(self._on_outputs)

    # --- requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait."""
        return len(self._engine_ids)

    async def generate(
        self,
        request: Request,
        tenant: str = "",
        account: str = "",
        observer: RequestObserver | None = None,
        decoder: TokenDecoder | None = None,
        *,
        withholds_parts: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """Yields the request's deltas; the last one has a finish reason. Ids are unique within a
        tenant: no tenant can find out another's. `decoder` is an adapter's own. See Generation.

        A slow reader gets several steps in one delta. A reader that stops early must close the
        iterator (`contextlib.aclosing`): that cancels the request. Raises DuplicateRequest,
        Draining, EngineFailed, the engine's errors, and ShareExceeded if the account has not read
        too much.
        """
        own_id = tenant, request.request_id
        self._admit(own_id)
        # The outputs of a whole prompt are reserved before anything is computed.
        prompt_bytes = request.wanted.prompt_bytes(len(request.prompt_token_ids))
        least_bytes = UNREAD_BYTES + prompt_bytes
        place = self._unread_bytes.reserve(account, least_bytes)
        # An id of our own: the caller's is free again as soon as it has left, while the engine may
        # still have outputs for it.
        engine_id = f"{request.request_id}#{next(self._numbers)}"
        generation = Generation(
            request, decoder or self._decoder, place, withholds_parts=withholds_parts
        )
        self._generations[engine_id] = generation
        self._engine_ids[own_id] = engine_id
        self._idle.clear()
        if observer is not None:
            self._observers[engine_id] = observer
            observer.submitted()
        try:
            self._engine.send(Submit(replace(request, request_id=engine_id)))
            while True:
                delta = await generation.next_delta()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            place.release()
            del self._engine_ids[own_id]
            if not self._engine_ids:
                self._idle.set()
            if self._generations.pop(engine_id, None) is not None:
                self._engine.send(Cancel(engine_id))

    def move(self, tenant: str, request_id: str, digest: str, adapter: str) -> None:
        """Lets a request go on with this version of its adapter, which errors call `adapter`, as
        soon as it is resident; does nothing for a request that does not run."""
        engine_id = self._engine_ids.get((tenant, request_id))
        if engine_id is not None:
            self._engine.send(Move(engine_id, digest, adapter))

    def _admit(self, own_id: tuple[str, str]) -> None:
        """Raises the error of a request that cannot start."""
        self._check_serving()
        if own_id in self._engine_ids:
            raise DuplicateRequest(
                f"a request with id {own_id[1]!r} is running", subject="request_id"
            )

    def _check_serving(self) -> None:
        self.calls.check_engine()
        if self._draining:
            raise Draining("the server is shutting down", retry_after_s=1.0)

    def send(self, message: Message) -> None:
        """Sends a message that has no reply."""
        self._engine.send(message)

    # --- drain ----------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> bool:
        """Accepts no new requests; returns when none runs. Requests that run after the grace end
        with Draining; if the engine hangs, a little before. Returns whether it does not."""
        self._draining = True
        end_s = min(END_S, grace_s / 2)
        is_idle = await self._become_idle(grace_s - end_s)
        answers = is_idle or await self._answers()
        if answers and not is_idle:
            await self._become_idle(end_s)
        if self._generations:
            logger.warning("the grace is over", extra={"requests": len(self._generations)})
        for engine_id, generation in list(self._generations.items()):
            self._engine.send(Cancel(engine_id))
            generation.fail(Draining("the server is shutting down", retry_after_s=1.0))
            del self._generations[engine_id]
        return answers

    async def _become_idle(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    async def _answers(self) -> bool:
        """Returns whether the engine makes steps."""
        try:
            await asyncio.wait_for(self.calls.describe(), ANSWER_S)
        except (TimeoutError, ServiceError):
            return False
        return True

    # --- outputs --------------------------------------------------------------------------------

    def _on_outputs(self, outputs: StepOutputs) -> None:
        """Called in the engine's thread, or the thread that reads from its process."""
        # The loop is closed only if the process ends without stopping the engine first.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: StepOutputs) -> None:
        if outputs.spans:
            self.on_spans(outputs.spans)
        for output in outputs.outputs:
            generation = self._generations.get(output.request_id)
            if self._observers and output.is_last:
                self._notify_finished(output)
            if generation is None:
                continue
            try:
                is_stopped = generation.push(output)
            except Exception as error:
                # A text that cannot be decoded must not stop the step's other requests. Its reader
                # gets the error, which cancels the request.
                generation.fail(error)
                continue
            if is_stopped:
                self._engine.send(Cancel(output.request_id))
            if output.is_last:
                del self._generations[output.request_id]
        for reply in outputs.replies:
            self.calls.reply(reply)
        if outputs.failure is not None:
            self.fail(outputs.failure)

    def _notify_finished(self, output: Output) -> None:
        observer = self._observers.pop(output.request_id, None)
        if observer is not None:
            observer.finished(output)

    def fail(self, failure: EngineFailed) -> None:
        """Ends everything that is open: the engine has died, or is given up. The first failure
        counts."""
        if self.failure is not None:
            return
        self.failure = failure
        self.failed.set()
        for generation in self._generations.values():
            generation.fail(EngineFailed(failure.message))
        self._generations.clear()
        for observer in self._observers.values():
            observer.finished(None)
        self._observers.clear()
        self.calls.fail(failure)
