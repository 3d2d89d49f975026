"""Calls of the engine as coroutines: each is a message, and waits for its reply."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inference_svc.engine.control.status_types import (
    AdapterDetails,
    EngineDetails,
    EngineStatus,
    ResidentAdapter,
)
from inference_svc.engine.transport.messages import (
    Abandon,
    Call,
    Command,
    Message,
    PauseMode,
    Reply,
    StepTrace,
)
from inference_svc.errors import EngineFailed
from inference_svc.host.memory import resident_bytes
from servicekit.errors import Draining
from servicekit.telemetry import spans

logger = logging.getLogger(__name__)


class EngineCalls:
    """Calls that wait for their replies, on one event loop, until the engine fails. `send` hands
    messages to the engine."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._failure: EngineFailed | None = None

    async def load(
        self, digest: str, pin: bool, adapter: str = "", account: str = ""
    ) -> ResidentAdapter:
        """Returns once the adapter, which errors call `adapter`, is resident, and pinned by the
        account."""
        return await self._call(Command.LOAD, digest, pin, adapter=adapter, account=account)

    async def unload(self, digest: str) -> int:
        """Returns the bytes freed, once they are free."""
        return await self._call(Command.UNLOAD, digest)

    async def pin(self, digest: str, account: str = "") -> ResidentAdapter:
        return await self._call(Command.PIN, digest, account=account)

    async def unpin(self, digest: str, account: str = "") -> ResidentAdapter:
        """Takes back the account's pin, or with "" all; it is pinned still if others pin it."""
        return await self._call(Command.UNPIN, digest, account=account)

    async def reset_prefix_cache(self) -> None:
        """Later prompts share nothing with earlier ones."""
        await self._call(Command.RESET_PREFIX_CACHE)

    async def list_resident(self, limit: int = 0) -> tuple[ResidentAdapter, ...]:
        """Returns all, or at most `limit`; see `messages.Call`."""
        return await self._call(Command.LIST_RESIDENT, limit=limit)

    async def describe(self) -> EngineStatus:
        status: EngineStatus = await self._call(Command.DESCRIBE)
        if status.process_id in (0, os.getpid()):
            return status
        own_bytes = resident_bytes()
        return replace(status, memory=status.memory | {"frontend": (own_bytes, own_bytes)})

    async def inspect(self, limit: int) -> EngineDetails:
        """Returns at most `limit` rows of each kind."""
        details: EngineDetails = await self._call(Command.INSPECT, limit=limit)
        return details

    async def stacks(self) -> dict[str, str]:
        """Returns where all threads of the engine's processes are, also while they hang."""
        stacks: dict[str, str] = await self._call(Command.STACKS)
        return stacks

    async def inspect_adapter(self, digest: str, adapter: str = "") -> AdapterDetails:
        """Returns the details of a resident adapter, which errors call `adapter`. Raises
        AdapterNotFound."""
        details: AdapterDetails
        details = await self._call(Command.INSPECT_ADAPTER, digest, adapter=adapter)
        return details

    async def pause(self, mode: PauseMode, resume_after_s: float = 0.0) -> int:
        """Returns how many requests are held, once nothing is computed; 0 s: until `resume`. Raises
        Interrupted if generation is resumed before."""
        held: int
        held = await self._call(Command.PAUSE, pause_mode=mode, timeout_s=resume_after_s)
        return held

    async def resume(self) -> None:
        """Does nothing if generation is not paused; while the engine sleeps, it goes on once it is
        woken."""
        await self._call(Command.RESUME)

    async def sleep(self, *, frees_weights: bool) -> int:
        """Returns the bytes that were freed. Raises Asleep while the engine wakes up, and
        Interrupted if it is woken before it sleeps."""
        freed_bytes: int = await self._call(Command.SLEEP, frees_weights=frees_weights)
        return freed_bytes

    async def wake(self) -> float:
        """Returns the seconds that it took; 0 if the engine did not sleep. Raises CannotWake."""
        seconds: float = await self._call(Command.WAKE)
        return seconds

    async def profile(self, num_steps: int, timeout_s: float, rank: int = 0) -> StepTrace:
        """Returns a trace of a rank's steps whose file the caller removes. Cancelling it ends the
        trace. Raises ProfileRunning, NoSteps, and InvalidArgument for a rank that there is not."""
        trace: StepTrace = await self._call(
            Command.PROFILE, limit=num_steps, timeout_s=timeout_s, rank=rank
        )
        return trace

    async def _call(
        self, command: Command, digest: str = "", pin: bool = False, **fields: Any
    ) -> Any:
        """`fields` are further ones of the Call."""
        self.check_engine()
        span = spans.current_sampled() if command is Command.LOAD else None
        trace = None if span is None else span.context
        call = Call(next(self._numbers), command, digest, pin, trace=trace, **fields)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures[call.call_id] = future
        self._send(call)
        try:
            return await future
        except (asyncio.CancelledError, GeneratorExit):
            if command is Command.PROFILE:
                self._abandon_trace(call.call_id, future)
            raise
        finally:
            self._futures.pop(call.call_id, None)

    def _abandon_trace(self, call_id: int, future: asyncio.Future[Any]) -> None:
        """Ends a trace whose caller was cancelled, or removes it if it has come by now."""
        if call_id in self._futures:
            self._send(Abandon(call_id))
        elif not future.cancelled() and future.exception() is None:
            future.result().remove()

    # --- replies --------------------------------------------------------------------------------

    def check_engine(self) -> None:
        """Raises Draining once the engine has died."""
        if self._failure is not None:  # nothing has been done for the caller
            raise Draining(self._failure.message)

    def reply(self, reply: Reply) -> None:
        future = self._futures.pop(reply.call_id, None)
        if future is None or future.done():
            if isinstance(reply.result, StepTrace):
                reply.result.remove()
            return
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.result)

    def fail(self, failure: EngineFailed) -> None:
        """Ends all calls: the engine has died."""
        self._failure = failure
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineFailed(failure.message))
