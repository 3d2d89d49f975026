"""Operators' calls that affect every tenant's requests: pause, sleep, and what they undo."""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.api.access import Access, Caller
from inference_svc.engine.transport.messages import PauseMode
from inference_svc.frontend.engine_calls import EngineCalls


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """Stops and starts the generation of all requests."""

    calls: EngineCalls
    access: Access

    async def reset_prefix_cache(self, caller: Caller) -> None:
        with self.access.audited(caller, "ResetPrefixCache", ""):
            await self.calls.reset_prefix_cache()

    async def pause(self, caller: Caller, mode: PauseMode, resume_after_s: float = 0.0) -> int:
        """Returns how many requests are held; see EngineCalls.pause."""
        with self.access.audited(caller, "PauseGeneration", ""):
            return await self.calls.pause(mode, resume_after_s)

    async def resume(self, caller: Caller) -> None:
        with self.access.audited(caller, "ResumeGeneration", ""):
            await self.calls.resume()

    async def sleep(self, caller: Caller, *, frees_weights: bool) -> int:
        """Returns the bytes that were freed; see EngineCalls.sleep."""
        with self.access.audited(caller, "Sleep", ""):
            return await self.calls.sleep(frees_weights=frees_weights)

    async def wake(self, caller: Caller) -> float:
        """Returns the seconds that it took; see EngineCalls.wake."""
        with self.access.audited(caller, "Wake", ""):
            return await self.calls.wake()
