"""Collects the details of the engine between two steps: bounded, so that no step waits for long."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.load_states import Load
from inference_svc.adapters.memory.extents import locate
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.residency import Residency
from inference_svc.backends.base import Backend
from inference_svc.core import Sequence
from inference_svc.engine.control.status_types import (
    AdapterDetails,
    EngineDetails,
    ImageDetails,
    LoadDetails,
    MemoryDetails,
    ResidentAdapter,
    SequenceDetails,
)
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.host.device_info import device_facts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inspect:
    """Called in the engine's thread, with the maximum number of rows of each list. `device` is
    torch's name of the device."""

    scheduler: Scheduler
    residency: Residency
    device: str

    def __call__(self, limit: int) -> EngineDetails:
        now_s = time.monotonic()
        scheduler, residency = self.scheduler, self.residency
        loads = residency.loads.by_digest
        return EngineDetails(
            memories={
                tier: _memory(slots, limit) for tier, slots in residency.tiers.memories().items()
            },
            running=tuple(_sequence(each, now_s) for each in _first(scheduler.running, limit)),
            num_waiting=len(scheduler.queue) + scheduler.siblings.num_held,
            waiting=tuple(_sequence(each, now_s) for each in _first(scheduler.queue, limit)),
            num_loads=len(loads),
            loads=tuple(
                _load(digest, load, residency.waiters[digest], now_s)
                for digest, load in _first(loads.items(), limit)
            ),
            device=device_facts(self.device),
        )


@dataclass(frozen=True, slots=True)
class InspectImage:
    """Called in the engine's thread, with an image and its facts in lists. Bounded by the number of
    the layout's targets; what a caller reads is made of it elsewhere."""

    backend: Backend[Any]
    layout: ModelLayout

    def __call__(self, resident: Resident, adapter: ResidentAdapter) -> AdapterDetails:
        segments = resident.header.segments
        targets = np.array([segment.target for segment in segments], dtype=np.int64)
        offsets = np.array([segment.offset for segment in segments], dtype=np.int64)
        return AdapterDetails(
            adapter=adapter,
            slot=resident.slot,
            extents=_extents(resident),
            targets=targets,
            kinds=tuple([segment.kind for segment in segments]),
            ranks=np.array([segment.rank for segment in segments], dtype=np.int64),
            offsets=locate(resident.extents, offsets),
            lengths=np.array([segment.length_bytes for segment in segments], dtype=np.int64),
            launches=dict(self.backend.lora_launches(self.layout.contents(resident.header))),
            kernels=self.backend.kernels,
        )


def _first(items: Iterable[T], limit: int) -> Iterable[T]:
    return islice(items, limit)


def _memory(slots: Slots, limit: int) -> MemoryDetails:
    free = slots.extents.free_ranges
    return MemoryDetails(
        capacity_bytes=slots.capacity,
        used_bytes=slots.used_bytes,
        max_images=slots.max_images,
        num_images=len(slots),
        images=tuple(_image(each) for each in _first(reversed(slots.residents()), limit)),
        num_free_ranges=len(free),
        free_ranges=tuple(_first(free, limit)),
        largest_admissible_bytes=slots.pins.largest_bytes,
    )


def _image(resident: Resident) -> ImageDetails:
    return ImageDetails(
        digest=resident.digest,
        slot=resident.slot,
        extents=_extents(resident),
        rank=resident.rank,
        is_ready=resident.ready,
        users=resident.users,
        pinned=resident.pinned,
        draining=resident.draining,
        last_used_time_s=resident.last_used_time_s,
        load_seconds=resident.load_seconds,
    )


def _extents(resident: Resident) -> tuple[tuple[int, int], ...]:
    in_order = sorted(resident.extents, key=lambda extent: extent.image_offset)
    return tuple((extent.start, extent.num_bytes) for extent in in_order)


def _sequence(sequence: Sequence, now_s: float) -> SequenceDetails:
    request = sequence.request
    wanted_s, ready_s = sequence.adapter_wanted_s, sequence.adapter_ready_s
    waited_to_s = now_s if ready_s is None else ready_s
    return SequenceDetails(
        # The part after the last "#" is the front's.
        request_id=request.request_id.rpartition("#")[0] or request.request_id,
        tenant=request.tenant,
        digest=str(request.key),
        state=sequence.state.value,
        priority=request.priority,
        age_s=now_s - request.arrival_s,
        adapter_wait_s=None if wanted_s is None else waited_to_s - wanted_s,
        deadline_s=None if request.deadline_s is None else request.deadline_s - now_s,
        slot=sequence.slot,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
        num_computed_tokens=sequence.num_computed,
        num_output_tokens=sequence.num_output,
        max_tokens=request.sampling.max_tokens,
        num_pages=len(sequence.page_ids),
        num_preemptions=sequence.num_preemptions,
        is_aged=sequence.is_aged,
    )


def _load(digest: str, load: Load, num_waiters: int, now_s: float) -> LoadDetails:
    progress = None if load.job is None else load.job.progress
    return LoadDetails(
        digest=digest,
        state=load.state.value,
        age_s=now_s - load.started_s,
        num_waiters=num_waiters,
        total_bytes=0 if load.header is None else load.header.total_bytes,
        verified_bytes=0 if progress is None else progress.offset,
        source="" if progress is None else progress.source,
        is_cancelled=load.is_cancelled,
    )
