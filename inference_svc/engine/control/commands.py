"""Commands of operators: load, unload, pin, list, describe, inspect (the engine or an adapter),
profile, reset the prefix cache, and the life cycle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.residency import Residency
from inference_svc.engine.compute.losses import Losses
from inference_svc.engine.compute.profiler import StepProfiler
from inference_svc.engine.control.life_cycle import COMMANDS as LIFE_CYCLE
from inference_svc.engine.control.life_cycle import LifeCycle
from inference_svc.engine.control.status_types import (
    AdapterDetails,
    EngineDetails,
    EngineStatus,
    ResidentAdapter,
)
from inference_svc.engine.ranks.traces import RankTraces
from inference_svc.engine.transport.messages import Call, Command, Reply
from inference_svc.errors import AdapterNotFound, AdapterUnavailable, ProfileRunning, with_name
from servicekit.errors import InvalidArgument, ServiceError


@dataclass(eq=False, slots=True)
class _PendingLoad:
    call: Call
    wanted_s: float


@dataclass
class Commands:
    """Answers Calls: LOAD once its adapter is resident, UNLOAD once its memory is free, PROFILE
    once its trace is written: by `profiler`, or, of another rank, by `rank_traces`."""

    residency: Residency
    describe: Callable[[], EngineStatus]
    inspect: Callable[[int], EngineDetails]
    inspect_image: Callable[[Resident, ResidentAdapter], AdapterDetails]
    forget_prefixes: Callable[[], None]
    profiler: StepProfiler
    life_cycle: LifeCycle
    losses: Losses
    adapter_wait_s: float
    rank_traces: RankTraces | None = None
    _loads: list[_PendingLoad] = field(default_factory=list)
    _unloads: list[tuple[Call, int]] = field(default_factory=list)

    def handle(self, call: Call, now_s: float) -> list[Reply]:
        """Returns the replies that are possible at once; `poll` returns the others."""
        if call.command in LIFE_CYCLE:
            return self.life_cycle.handle(call, now_s)
        reply = self._handle(call, now_s)
        return [] if reply is None else [reply]

    def _handle(self, call: Call, now_s: float) -> Reply | None:
        try:
            if call.command is Command.LOAD:
                refusal = self.life_cycle.refusal()
                if refusal is not None:  # a load takes effect with the next step
                    raise refusal
                self.residency.load_ahead(call.digest, now_s)
                if call.trace is not None:
                    self.residency.trace_load(call.digest, call.trace, now_s)
                self._loads.append(_PendingLoad(call, now_s))
                return None
            if call.command is Command.UNLOAD:
                self._unloads.append((call, self.residency.unload(call.digest)))
                return None
            if call.command is Command.PROFILE:
                self._start_trace(call)
                return None
            return Reply(call.call_id, self._answer(call))
        except ServiceError as error:
            return Reply(call.call_id, error=error)

    def _start_trace(self, call: Call) -> None:
        if self._trace_call_ids:
            raise ProfileRunning("another trace is being made", subject="num_steps")
        if call.rank == 0:
            self.profiler.start(call)
        elif self.rank_traces is not None:
            self.rank_traces.start(call)
        else:
            raise InvalidArgument("rank must be 0: the server has one process", subject="rank")

    def _answer(self, call: Call) -> object:
        device = self.residency.device
        if call.command is Command.LIST_RESIDENT:
            return self._list(call.limit)
        if call.command is Command.DESCRIBE:
            return self.describe()
        if call.command is Command.INSPECT:
            return self.inspect(call.limit)
        if call.command is Command.INSPECT_ADAPTER:
            return self._inspect_adapter(call)
        if call.command is Command.RESET_PREFIX_CACHE:
            self.forget_prefixes()
            return None
        if not self.residency.is_resident(call.digest):
            hint = "; `loadout load --pin` loads and pins it" if call.command is Command.PIN else ""
            raise AdapterNotFound(
                f"adapter {call.digest} is not on the device{hint}", subject="ref"
            )
        if call.command is Command.PIN:
            return self._view(device.pin(call.digest, call.account), "device")
        return self._view(device.unpin(call.digest, call.account), "device")

    def _inspect_adapter(self, call: Call) -> AdapterDetails:
        """Inspects the image that requests run with; without one the host tier's image."""
        digest, adapter = call.digest, call.adapter or call.digest
        for tier, slots in self.residency.tiers.memories().items():
            resident = slots.get(digest)
            if resident is not None and resident.ready:
                return self.inspect_image(resident, self._view(resident, tier))
        tiers = self.residency.tiers
        is_loading = any(
            digest in loading for loading in (self.residency.loads, tiers.copies, tiers.dividing)
        )
        hint = "returns once it is resident" if is_loading else "loads it"
        raise AdapterNotFound(
            f"adapter {adapter} is {'still being loaded' if is_loading else 'not resident'}; "
            f"`loadout load {adapter}` {hint}",
            subject="ref",
        )

    def _list(self, limit: int) -> tuple[ResidentAdapter, ...]:
        ready = (
            self._view(resident, tier)
            for tier, slots in self.residency.tiers.memories().items()
            for resident in slots.last_used_first()
            if resident.ready
        )
        return tuple(islice(ready, limit) if limit else ready)

    def _view(self, resident: Resident, tier: str) -> ResidentAdapter:
        return ResidentAdapter(
            digest=resident.digest,
            tier=tier,
            num_bytes=resident.num_bytes,
            rank=resident.rank,
            pinned=resident.pinned,
            running_requests=resident.users if tier == "device" else 0,
            last_used_time_s=resident.last_used_time_s,
            load_seconds=resident.load_seconds,
            num_not_finite=self.losses.num_not_finite(resident.digest),
        )

    def poll(self, now_s: float) -> list[Reply]:
        """Returns the replies that have become possible."""
        replies = self.profiler.poll(now_s) + self.life_cycle.poll(now_s)
        replies += [] if self.rank_traces is None else self.rank_traces.poll()
        for pending in list(self._loads):
            reply = self._poll_load(pending, now_s)
            if reply is not None:
                self._loads.remove(pending)
                self.residency.remove_waiter(pending.call.digest)
                replies.append(reply)
        for call, freed in list(self._unloads):
            if not self.residency.is_draining(call.digest):
                self._unloads.remove((call, freed))
                replies.append(Reply(call.call_id, freed))
        return replies

    def _poll_load(self, pending: _PendingLoad, now_s: float) -> Reply | None:
        call = pending.call
        if self.life_cycle.is_asleep:  # nothing takes effect before it is woken
            return Reply(call.call_id, error=self.life_cycle.refusal())
        if self.residency.is_resident(call.digest):
            device = self.residency.device
            try:
                resident = device.get(call.digest)
                if call.pin:
                    resident = device.pin(call.digest, call.account)
            except ServiceError as error:
                return Reply(call.call_id, error=error)
            assert resident is not None
            return Reply(call.call_id, self._view(resident, "device"))
        self.residency.ensure_loading(call.digest, now_s)  # it may have been evicted meanwhile
        expiry_s = self._expiry_s(pending)
        if expiry_s is not None and now_s >= expiry_s:
            reason = self.residency.loader.wait_reason(call.digest, now_s)
            message = (
                f"adapter {call.adapter or call.digest} cannot be loaded, no byte of it arrived "
                f"for {self.adapter_wait_s:g} s: {reason}"
            )
            return Reply(call.call_id, error=AdapterUnavailable(message, subject="ref"))
        return None

    def _expiry_s(self, pending: _PendingLoad) -> float | None:
        """Returns None while the load's bytes arrive or memory is short: its caller has a
        deadline."""
        since_s = self.residency.loads.last_progress_s(pending.call.digest)
        return None if since_s is None else max(since_s, pending.wanted_s) + self.adapter_wait_s

    def fail(self, digest: str, error: ServiceError) -> list[Reply]:
        """Returns the replies to loads of an adapter that cannot be loaded."""
        failed = [pending for pending in self._loads if pending.call.digest == digest]
        for pending in failed:
            self._loads.remove(pending)
            self.residency.remove_waiter(digest)
        calls = [pending.call for pending in failed]
        return [Reply(call.call_id, error=with_name(error, digest, call.adapter)) for call in calls]

    def fail_all(self, error: Exception) -> list[Reply]:
        """Returns replies to all open calls, when the engine ends."""
        replies = [Reply(call_id, error=error) for call_id in self._own_call_ids]
        replies += self.life_cycle.fail_all(error)
        for pending in self._loads:
            self.residency.remove_waiter(pending.call.digest)
        self._loads, self._unloads = [], []
        self.close_traces()
        return replies

    def abandon_trace(self, call_id: int) -> None:
        """Ends the trace of this call, whose caller has left."""
        self.profiler.abandon(call_id)
        if self.rank_traces is not None:
            self.rank_traces.abandon(call_id)

    def give_up_traces(self) -> None:
        """Removes the files: the engine has failed, and its process may end at any moment."""
        self.profiler.give_up()
        if self.rank_traces is not None:
            self.rank_traces.close()

    def close_traces(self) -> None:
        """Ends an unfinished trace, and the threads."""
        self.profiler.close()
        if self.rank_traces is not None:
            self.rank_traces.close()

    @property
    def open_call_ids(self) -> list[int]:
        return self._own_call_ids + self.life_cycle.open_call_ids

    @property
    def _own_call_ids(self) -> list[int]:
        waiting = [p.call.call_id for p in self._loads] + [c.call_id for c, _ in self._unloads]
        return waiting + self._trace_call_ids

    @property
    def _trace_call_ids(self) -> list[int]:
        others = [] if self.rank_traces is None else self.rank_traces.open_call_ids
        return self.profiler.open_call_ids + others

    @property
    def loading(self) -> list[str]:
        """The digests that open LOAD calls wait for, one for each."""
        return [pending.call.digest for pending in self._loads]

    def next_expiry_s(self) -> float | None:
        moments = [*map(self._expiry_s, self._loads), self.profiler.next_expiry_s()]
        moments.append(self.life_cycle.next_expiry_s())
        if self.rank_traces is not None:
            moments.append(self.rank_traces.next_expiry_s())
        return min((moment for moment in moments if moment is not None), default=None)
