"""A picture of the engine for operators: what runs, what waits, where the memory is."""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.adapters.residency import Residency
from inference_svc.core import EngineStatus
from inference_svc.engine.runner import Runner
from inference_svc.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Describe:
    """Called in the engine's thread."""

    scheduler: Scheduler
    residency: Residency
    runner: Runner
    weights_bytes: int
    kv_bytes: int

    def __call__(self) -> EngineStatus:
        scheduler = self.scheduler
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            waiting_digests=tuple(scheduler.queue_order()),
            running_digests=tuple({s.request.digest for s in scheduler.running} - {""}),
            memory=self._memory(),
            counters=self._counters(),
        )

    def _memory(self) -> dict[str, tuple[int, int]]:
        pages, device, host = self.scheduler.pages, self.residency.device, self.residency.host
        kv_used = self.kv_bytes * pages.num_used // pages.num_pages
        return {
            "weights": (self.weights_bytes, self.weights_bytes),
            "kv_pages": (kv_used, self.kv_bytes),
            "arena": (device.used_bytes, device.capacity),
            "host_tier": (0, 0) if host is None else (host.slots.used_bytes, host.slots.capacity),
        }

    def _counters(self) -> dict[str, float]:
        counters, device = self.residency.counters, self.residency.device
        return {
            "slot_hits": counters.device_hits,
            "host_hits": counters.host_hits,
            "slot_misses": counters.host_hits + counters.misses,
            "slot_evictions": device.num_evictions,
            "pulls": counters.pulls_done,
            "pull_failures": counters.pulls_failed,
            "pulled_bytes": counters.pulled_bytes,
            "load_seconds": counters.load_seconds,
            "preemptions": self.scheduler.num_preemptions,
            "lora_steps": self.runner.num_lora_steps,
        }
