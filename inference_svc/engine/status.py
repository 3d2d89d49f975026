"""A picture of the engine for operators: what runs, what waits, where the memory is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from inference_svc.adapters.prefetch import PrefetchCounters
from inference_svc.adapters.residency import Residency
from inference_svc.core import EngineStatus
from inference_svc.engine.budget import Budget
from inference_svc.engine.runner import Runner
from inference_svc.engine.scheduler import Scheduler
from inference_svc.engine.step_times import StepTimes
from inference_svc.memory import resident_bytes


@dataclass(frozen=True, slots=True)
class Describe:
    """Called in the engine's thread."""

    scheduler: Scheduler
    residency: Residency
    runner: Runner
    weights_bytes: int
    kv_bytes: int
    budget: Budget
    times: StepTimes

    def __call__(self) -> EngineStatus:
        scheduler = self.scheduler
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.queue),
            waiting_digests=tuple(scheduler.queue.digests()),
            running_digests=tuple({s.request.digest for s in scheduler.running} - {""}),
            memory=self._memory(),
            counters=self._counters(),
            memory_limit_bytes=self.budget.limit_bytes or 0,
            process_id=os.getpid(),
            kernels=self.runner.model.kernels,
            histograms=self.times.states,
        )

    def _memory(self) -> dict[str, tuple[int, int]]:
        """What is allocated counts as capacity whole, and `process` is the rest of what is resident
        in this process: Python, libraries, buffers."""
        pages, device, host = self.scheduler.pages, self.residency.device, self.residency.host
        kv_used = self.kv_bytes * pages.num_used // pages.num_pages
        # The budget's line is what the widest step may take at most.
        workspace_bytes = self.runner.model.workspace_bytes
        on_device = {
            "weights": (self.weights_bytes, self.weights_bytes),
            "kv_pages": (kv_used, self.kv_bytes),
            "arena": (device.used_bytes, device.capacity),
            "workspace": (workspace_bytes, workspace_bytes),
        }
        is_on_host = self.budget.place == "host"
        host_tier = (0, 0) if host is None else (host.slots.used_bytes, host.slots.capacity)
        in_process = [host_tier, *(on_device.values() if is_on_host else ())]
        rest = max(0, resident_bytes() - sum(capacity for _, capacity in in_process))
        return {**on_device, "host_tier": host_tier, "process": (rest, rest)}

    def _counters(self) -> dict[str, float]:
        counters, device = self.residency.counters, self.residency.device
        prefetch = self.residency.prefetch
        ahead = PrefetchCounters() if prefetch is None else prefetch.counters
        return {
            "slot_hits": counters.device_hits,
            "host_hits": counters.host_hits,
            "slot_misses": counters.host_hits + counters.misses,
            "slot_evictions": device.num_evictions,
            "pulls": counters.pulls_done,
            "pull_failures": counters.pulls_failed,
            "pulled_bytes": counters.pulled_bytes,
            "load_seconds": counters.load_seconds,
            "prefetch_images": ahead.prefetched,
            "prefetch_bytes": ahead.prefetched_bytes,
            "prefetch_hits": ahead.hits,
            "prefetch_wasted_bytes": ahead.wasted_bytes,
            "preemptions": self.scheduler.num_preemptions,
            "lora_steps": self.runner.model.num_lora_steps,
        }
