"""A snapshot of the engine for operators: running and waiting requests, and the use of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inference_svc.adapters.load_states import LoadState
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.residency import Residency
from inference_svc.core import AdapterKey, Digest, digests_of
from inference_svc.engine.compute.losses import Loss, Losses
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.compute.step_times import StepTimes
from inference_svc.engine.control.life_cycle import LifeCycle, Sleep
from inference_svc.engine.control.status_types import (
    GRAMMARS,
    EngineStatus,
    RankStatus,
    RecurrentStatus,
    TierStatus,
)
from inference_svc.engine.memory_budget import Budget
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.states.kind import StateKind
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.recurrent import Recurrent
from inference_svc.grammars.lanes.lane import Lane, LaneCounts
from inference_svc.host.memory import resident_bytes
from servicekit.telemetry.histogram import HistogramState


@dataclass(frozen=True, slots=True)
class Describe:
    """Called in the engine's thread. `state_bytes`: a sequence's recurrent state; 0 if the model
    has none. `describe_ranks` is called with rank 0's bytes pulled and running pulls; None if there
    is one rank."""

    scheduler: Scheduler
    residency: Residency
    runner: Runner
    settler: Settler
    budget: Budget
    times: StepTimes
    machine: str
    life_cycle: LifeCycle
    losses: Losses
    state_bytes: int
    describe_ranks: Callable[[int, int], tuple[RankStatus, ...]] | None

    def __call__(self) -> EngineStatus:
        scheduler, registrations = self.scheduler, self.residency.loader.puller.registrations
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.queue) + scheduler.siblings.num_held,
            waiting_digests=_digests(scheduler.queue.keys()),
            running_digests=_digests({s.request.key for s in scheduler.running}),
            memory=self._memory(),
            counters=self._counters(),
            memory_limit_bytes=self.budget.limit_bytes or 0,
            process_id=os.getpid(),
            kernels=self.runner.backend.kernels,
            machine=self.machine,
            histograms=self._histograms(),
            phases=self._phases(),
            gauges=self._gauges(),
            tiers=self._tiers(),
            loads={
                state.value: count for state, count in self.residency.loads.num_by_state.items()
            },
            registrations={} if registrations is None else registrations.results(),
            generation=self.life_cycle.state,
            recurrent=self._recurrent(),
            ranks=self._ranks(),
        )

    def _ranks(self) -> tuple[RankStatus, ...]:
        if self.describe_ranks is None:
            return ()
        num_pulls = self.residency.loads.num_by_state[LoadState.PULLING]
        return self.describe_ranks(self.residency.counters.pulled_bytes, num_pulls)

    def _recurrent(self) -> RecurrentStatus | None:
        recurrent = self.scheduler.states.recurrent
        if recurrent is None:
            return None
        return RecurrentStatus(
            state_bytes=self.state_bytes,
            interval_tokens=recurrent.border_tokens,
            capacity=recurrent.num_slots,
            max_stored=recurrent.max_stored,
            used=recurrent.num_held,
            stored=recurrent.pool.num_known,
        )

    def _memory(self) -> dict[str, tuple[int, int]]:
        """Counts all that is allocated as capacity; `process` is the rest of this process's
        resident set: Python, libraries, buffers."""
        device, host, backend = self.residency.device, self.residency.host, self.runner.backend
        workspace_bytes = backend.workspace_bytes  # asks the device
        states_bytes = {Pages.name: backend.kv_bytes, Recurrent.name: backend.recurrent_bytes}
        on_device = {
            "weights": (backend.weights_bytes, backend.weights_bytes),
            **{
                kind.name: _used(kind, states_bytes[kind.name])
                for kind in self.scheduler.states.kinds
            },
            "arena": (device.extents.first_used_bytes, device.extents.stage_capacity),
            # The budget's line is the most that the widest step may take.
            "workspace": (workspace_bytes, workspace_bytes),
        }
        is_on_host = self.budget.place == "host"
        host_tier = (0, 0) if host is None else (host.slots.used_bytes, host.slots.capacity)
        in_process = [host_tier, *(on_device.values() if is_on_host else ())]
        rest = resident_bytes() - sum(capacity for _, capacity in in_process)
        routed, on_host = self.runner.routed, {"host_tier": host_tier}
        if routed is not None:
            rest -= routed.used_bytes  # the system gives it no more than that
            on_host["routed_experts"] = (routed.used_bytes, routed.capacity_bytes)
        grammar_bytes = sum(
            resident_bytes(lane.process_id) for lane in self._lanes if lane.process_id is not None
        )
        if grammar_bytes:
            on_host[GRAMMARS] = (grammar_bytes, grammar_bytes)
        rest = max(0, rest)
        return {**on_device, **on_host, "process": (rest, rest)}

    def _counters(self) -> dict[str, float]:
        counters = self.residency.counters
        prefetch, states = self.residency.prefetcher.counters, self.scheduler.states
        pictures, recurrent = self.scheduler.pictures, {}
        if states.recurrent is not None:
            recurrent = {
                "recurrent_state_evictions": states.recurrent.pool.num_evictions,
                "recurrent_recomputed_tokens": states.num_recomputed,
            }
        return {
            "sampled_tokens": self.settler.num_sampled,
            "pulls": counters.pulls_done,
            "pull_failures": counters.pulls_failed,
            "corrupt_pulls": counters.pulls_corrupt,
            "pulled_bytes": counters.pulled_bytes,
            "prefetch_images": prefetch.prefetched,
            "prefetch_bytes": prefetch.prefetched_bytes,
            "prefetch_hits": prefetch.hits,
            "prefetch_wasted_bytes": prefetch.wasted_bytes,
            "preemptions": self.scheduler.num_preemptions,
            "prompt_image_encodes": 0 if pictures is None else pictures.num_encoded,
            "prompt_image_hits": 0 if pictures is None else pictures.num_found,
            "prompt_image_evictions": 0 if pictures is None else pictures.num_dropped,
            "step_out_of_memory": self.scheduler.step_limit.num_out_of_memory,
            "not_finite_requests": self.losses.counts[Loss.NOT_FINITE] + self.losses.num_refused,
            "faulty_requests": self.losses.counts[Loss.FAULT],
            "lora_steps": self.runner.backend.num_lora_steps,
            "eager_steps": self.runner.backend.num_eager_steps,
            "version_moves": self.scheduler.num_moves,
            "kv_page_evictions": states.pages.pool.num_evictions,
            **self._grammar_counters(),
            **recurrent,
        }

    def _grammar_counters(self) -> dict[str, float]:
        masks = self.settler.masks
        counts = LaneCounts() if masks is None else masks.counts
        return {
            "grammar_opens": counts.num_opened,
            "grammar_cache_hits": counts.num_hits,
            "grammar_compile_seconds": counts.compile_s,
            "grammar_masks": counts.num_masks,
            "grammar_mask_seconds": counts.mask_s,
            "grammar_late_masks": counts.num_late,
            "grammar_process_restarts": counts.num_restarts,
        }

    def _grammar_gauges(self) -> dict[str, float]:
        return {
            "grammar_rows": sum(lane.num_rows for lane in self._lanes),
            "grammar_slow_rows": sum(lane.num_rows for lane in self._lanes if lane.is_slow),
        }

    @property
    def _lanes(self) -> tuple[Lane, ...]:
        masks = self.settler.masks
        return () if masks is None else masks.lanes

    def _gauges(self) -> dict[str, float]:
        pages, recurrent = self.scheduler.states.pages.pool, {}
        if (states := self._recurrent()) is not None:
            recurrent = {
                "recurrent_states_used": states.used,
                "recurrent_states_stored": states.stored,
                "recurrent_states_capacity": states.capacity,
            }
        return {
            "requests_waiting_for_adapter": self.scheduler.queue.num_parked,
            "step_token_limit": self.scheduler.step_limit.tokens,
            "generation_paused": self.life_cycle.is_paused,
            "asleep": self.life_cycle.sleep is not Sleep.AWAKE,
            "kv_pages_used": pages.num_used,
            "kv_pages_known": pages.num_known,
            "kv_pages_capacity": pages.num_units,
            **self._picture_gauges(),
            **self._grammar_gauges(),
            **self._registered(),
            **recurrent,
        }

    def _picture_gauges(self) -> dict[str, float]:
        pictures, prefix = self.scheduler.pictures, "prompt_image_embedding"
        return {
            f"{prefix}_used_bytes": 0 if pictures is None else pictures.num_held_bytes,
            f"{prefix}_stored_bytes": 0 if pictures is None else pictures.num_bytes,
            f"{prefix}_capacity_bytes": 0 if pictures is None else pictures.capacity,
        }

    def _registered(self) -> dict[str, float]:
        registrations = self.residency.loader.puller.registrations
        return {} if registrations is None else {"registered_bytes": registrations.num_bytes}

    def _tiers(self) -> dict[str, TierStatus]:
        """Counts a lookup in the host tier only for requests that missed on the device."""
        counters, host = self.residency.counters, self.residency.host
        missed = counters.host_hits + counters.misses
        tiers = {"device": _tier(self.residency.device, counters.device_hits, missed)}
        if host is not None:
            tiers["host"] = _tier(host.slots, counters.host_hits, counters.misses)
        return tiers

    def _histograms(self) -> dict[str, HistogramState]:
        return {**self.times.states, "inter_token_seconds": self.settler.token_gaps.state}

    def _phases(self) -> dict[str, dict[str, HistogramState]]:
        times = self.residency.times
        idle = {"device": times.device_idle.state}
        if self.residency.host is not None:
            idle["host"] = times.host_idle.state
        return {
            "step_phase_seconds": self.times.phase_states,
            "load_seconds": {source.value: each.state for source, each in times.load.items()},
            "load_phase_seconds": {
                "wait": times.wait.state,
                "pull": times.pull.state,
                "copy": times.copy.state,
            },
            "tier_evicted_idle_seconds": idle,
        }


def _used(kind: StateKind, num_bytes: int) -> tuple[int, int]:
    """Returns the bytes that sequences hold, and all of them."""
    return num_bytes * kind.num_held // kind.pool.num_units, num_bytes


def _tier(slots: Slots, hits: int, misses: int) -> TierStatus:
    return TierStatus(
        used_bytes=slots.used_bytes,
        capacity_bytes=slots.capacity,
        pinned_bytes=slots.pinned_bytes,
        largest_free_bytes=slots.extents.largest_free_bytes,
        num_free_ranges=slots.extents.num_free_ranges,
        num_images=len(slots),
        hits=hits,
        misses=misses,
        evictions={reason.value: slots.evictions[reason] for reason in EvictionReason},
    )


def _digests(keys: Iterable[AdapterKey]) -> tuple[Digest, ...]:
    """Returns the adapters of these requests, each once."""
    return tuple({digest for key in keys for digest in digests_of(key)})
