"""Pauses generation, and gives the memory of sequences' state, pages and recurrent states, and of
the weights back while the engine sleeps.

A request that was running loses nothing: held in its place while paused, computed anew after sleep.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from inference_svc.adapters.residency import Residency
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.policy.scheduler import Hold, Scheduler
from inference_svc.engine.transport.messages import Call, Command, PauseMode, Reply, Restored
from inference_svc.errors import Asleep, CannotWake, Interrupted
from inference_svc.host.device_faults import find_fault
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""When a caller may try again who found the engine asleep."""

COMMANDS = frozenset({Command.PAUSE, Command.RESUME, Command.SLEEP, Command.WAKE})


class Sleep(enum.Enum):
    """`FALLING`: sleeps as soon as nothing is on its way into the device's memory."""

    AWAKE = "awake"
    FALLING = "falling"
    ASLEEP = "asleep"
    WAKING = "waking"


@dataclass
class LifeCycle:
    """Answers PAUSE, RESUME, SLEEP and WAKE. `post` sends a message to the engine's inbox, from any
    thread."""

    scheduler: Scheduler
    runner: Runner
    residency: Residency
    post: Callable[[Restored], None]
    is_paused: bool = False
    sleep: Sleep = Sleep.AWAKE
    _resume_s: float | None = None
    _waits_for_running: bool = False
    _pauses: list[Call] = field(default_factory=list)
    _sleeps: list[Call] = field(default_factory=list)
    _wakes: list[Call] = field(default_factory=list)
    _woken_s: float = 0.0

    @property
    def is_asleep(self) -> bool:
        """Whether nothing can be computed: memory is freed."""
        return self.sleep in (Sleep.ASLEEP, Sleep.WAKING)

    @property
    def state(self) -> str:
        """Returns "running", "paused" or "asleep"."""
        if self.sleep is not Sleep.AWAKE:
            return "asleep"
        return "paused" if self.is_paused else "running"

    def refusal(self) -> ServiceError | None:
        """Returns why nothing new can be taken: a server that sleeps would hold it for long."""
        if self.sleep is Sleep.AWAKE:
            return None
        what = "wakes up" if self.sleep is Sleep.WAKING else "sleeps until it is woken"
        message = f"this server {what}: call another, or try again later"
        return Asleep(message, retry_after_s=RETRY_S)

    def handle(self, call: Call, now_s: float) -> list[Reply]:
        """Returns the replies that are possible at once; `poll` returns the others."""
        handlers = {
            Command.PAUSE: self._pause,
            Command.RESUME: self._resume,
            Command.SLEEP: self._fall_asleep,
            Command.WAKE: self._wake,
        }
        try:
            replies = handlers[call.command](call, now_s)
        except ServiceError as error:
            replies = [Reply(call.call_id, error=error)]
        self._set_hold()
        return replies

    def _pause(self, call: Call, now_s: float) -> list[Reply]:
        self.is_paused = True
        self._resume_s = now_s + call.timeout_s if call.timeout_s else None
        self._waits_for_running = call.pause_mode is PauseMode.WAIT
        self._pauses.append(call)
        return []

    def _resume(self, call: Call, now_s: float) -> list[Reply]:
        """Also of an engine that sleeps: it goes on as soon as it is woken."""
        return [*self._end_pause(), Reply(call.call_id)]

    def _end_pause(self) -> list[Reply]:
        self.is_paused, self._resume_s = False, None
        error = Interrupted("generation was resumed before the running requests had ended")
        replies = [Reply(call.call_id, error=error) for call in self._pauses]
        self._pauses = []
        return replies

    def _fall_asleep(self, call: Call, now_s: float) -> list[Reply]:
        if self.sleep is Sleep.WAKING:
            raise Asleep("the server wakes up: try again when it has", retry_after_s=RETRY_S)
        if self.sleep is Sleep.AWAKE:
            self.sleep = Sleep.FALLING
        self._sleeps.append(call)
        return []

    def _wake(self, call: Call, now_s: float) -> list[Reply]:
        if self.sleep is Sleep.AWAKE:
            return [Reply(call.call_id, 0.0)]
        if self.sleep is Sleep.FALLING:
            error = Interrupted("the server was woken before it slept")
            replies = [Reply(each.call_id, error=error) for each in self._sleeps]
            self._sleeps, self.sleep = [], Sleep.AWAKE
            return [*replies, Reply(call.call_id, 0.0)]
        self._wakes.append(call)
        if self.sleep is Sleep.ASLEEP:
            self.sleep, self._woken_s = Sleep.WAKING, now_s
            # The engine answers meanwhile: reading weights may take minutes.
            threading.Thread(target=self._restore, name="loadout-wake", daemon=True).start()
        return []

    def _restore(self) -> None:
        try:
            self.runner.restore()
        except ServiceError as error:
            logger.error("the server cannot wake up: %s", error.message)
            self.post(Restored(error))
        except Exception as error:
            logger.exception("the server cannot wake up")
            cannot = CannotWake("the server cannot wake up: its log has the reason")
            self.post(Restored(cannot, broken=None if find_fault(error) is None else error))
        else:
            self.post(Restored())

    def on_restored(self, message: Restored, now_s: float) -> list[Reply]:
        """Returns the replies to the callers who wait for it. Raises the error that has broken the
        device."""
        if message.broken is not None:
            raise message.broken
        wakes, self._wakes = self._wakes, []
        if message.error is None:
            self.sleep = Sleep.AWAKE
            self._set_hold()
            seconds = now_s - self._woken_s
            logger.info("awake again", extra={"seconds": seconds, "is_paused": self.is_paused})
            return [Reply(call.call_id, seconds) for call in wakes]
        self.sleep = Sleep.ASLEEP
        return [Reply(call.call_id, error=message.error) for call in wakes]

    def expire(self, now_s: float) -> list[Reply]:
        """Resumes generation once the time of its pause has passed; called before a batch."""
        if self._resume_s is None or now_s < self._resume_s:
            return []
        logger.warning("generation resumes: the pause has reached its time limit")
        replies = self._end_pause()
        self._set_hold()
        return replies

    def poll(self, now_s: float) -> list[Reply]:
        """Returns the replies that have become possible; called after a batch."""
        replies: list[Reply] = []
        if self._pauses and not (self._waits_for_running and self.scheduler.has_started):
            self._waits_for_running = False
            self._set_hold()
            num_held = self.scheduler.num_open
            replies += [Reply(call.call_id, num_held) for call in self._pauses]
            self._pauses = []
        if self._sleeps and self._is_quiet():
            freed_bytes = self._free(now_s, weights=any(c.frees_weights for c in self._sleeps))
            replies += [Reply(call.call_id, freed_bytes) for call in self._sleeps]
            self._sleeps = []
        return replies

    def _is_quiet(self) -> bool:
        """Whether no image is being copied, or divided by norms of the weights."""
        return self.is_asleep or not self.residency.is_copying

    def _free(self, now_s: float, *, weights: bool) -> int:
        self.scheduler.preempt_all(now_s)
        freed_bytes = self.runner.backend.free_memory(weights=weights)
        self.sleep = Sleep.ASLEEP
        logger.info("asleep", extra={"freed_bytes": freed_bytes})
        return freed_bytes

    def _set_hold(self) -> None:
        if self.sleep is not Sleep.AWAKE:
            hold = Hold.EVERYTHING
        elif self.is_paused:
            hold = Hold.STARTS if self._waits_for_running else Hold.EVERYTHING
        else:
            hold = Hold.NOTHING
        self.scheduler.hold = hold

    def fail_all(self, error: Exception) -> list[Reply]:
        """Returns replies to all open calls, when the engine ends."""
        replies = [Reply(call_id, error=error) for call_id in self.open_call_ids]
        self._pauses, self._sleeps, self._wakes = [], [], []
        return replies

    @property
    def open_call_ids(self) -> list[int]:
        return [call.call_id for call in (*self._pauses, *self._sleeps, *self._wakes)]

    def next_expiry_s(self) -> float | None:
        return self._resume_s

    def check_integrity(self) -> None:
        """Asserts that nothing runs, and no state is known, without memory."""
        if self.is_asleep:
            assert not self.scheduler.running
            assert self.scheduler.states.num_used == self.scheduler.states.num_known == 0
        assert bool(self._wakes) <= (self.sleep is Sleep.WAKING)
        assert self.sleep is Sleep.AWAKE or self.scheduler.hold is Hold.EVERYTHING
