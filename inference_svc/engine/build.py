"""Makes an engine from its config, in the order of time: model, memory, adapters, policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.image_source import AdapterStore
from inference_svc.adapters.layout import ModelLayout, build_layout
from inference_svc.adapters.prefetch import PrefetchPolicy
from inference_svc.adapters.pull import PullEvent
from inference_svc.adapters.puller import Puller
from inference_svc.adapters.residency import Residency, build_residency
from inference_svc.adapters.slots import Slots
from inference_svc.adapters.tiers import HostTier
from inference_svc.backends.select import build_model, native_library
from inference_svc.engine.admission import Admission
from inference_svc.engine.commands import Commands
from inference_svc.engine.config import EngineConfig, padding_pages
from inference_svc.engine.engine import Engine
from inference_svc.engine.inspect import Examine
from inference_svc.engine.memory_budget import check_budgets
from inference_svc.engine.pages import PagePool
from inference_svc.engine.profiler import StepProfiler
from inference_svc.engine.runner import Runner
from inference_svc.engine.sampler import Sampler
from inference_svc.engine.scheduler import Limits, Scheduler
from inference_svc.engine.settle import Settler
from inference_svc.engine.status import Describe
from inference_svc.engine.step_times import StepTimes
from inference_svc.host.cpus import share_processors, usable_processors
from inference_svc.host.device_info import machine_name
from inference_svc.model.geometry import ModelGeometry, load_geometry
from kernels.attention import KVCache, can_tile, page_bytes
from kernels.host_memory import return_freed
from kernels.native.library import Library


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and the parts that others look at."""

    engine: Engine
    residency: Residency
    puller: Puller
    layout: ModelLayout
    geometry: ModelGeometry
    library: Library | None
    """What computes steps, where that is the native kernels."""

    def place_threads(self) -> None:
        """In the thread that will call `engine.turn`: it and those that help it get processors of
        their own, where there are as many."""
        processors = share_processors(torch.get_num_threads())
        if self.library is not None and processors:
            self.library.place_threads(processors)


def build_engine(
    config: EngineConfig, store: AdapterStore, post: Callable[[PullEvent], None]
) -> BuiltEngine:
    """Loads the model and allocates all memory. `post` receives pull events, from any thread.

    Raises UnsupportedModel; ValueError when the memory given does not suffice.
    """
    if not 0 < config.max_sequences <= config.max_batch_tokens:
        raise ValueError("max_sequences must be above 0 and at most max_batch_tokens")
    # Torch counts the machine's cores, whatever part of them is this process's.
    num_threads = config.num_threads or min(torch.get_num_threads(), usable_processors())
    torch.set_num_threads(num_threads)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    geometry = load_geometry(config.model_dir)
    library = native_library(config)
    is_native = library is not None
    budget = check_budgets(config, geometry, is_native=is_native)
    layout = build_layout(geometry, config.base_model, config.aliases, dtype)
    kv_cache = _allocate_kv_cache(config, geometry, dtype, device, is_native=is_native)
    host = _allocate_host_tier(config, device)
    slab = None if host is None else host.slab
    arena = Arena(layout, config.arena_bytes, config.max_loras, config.max_lora_rank, device, slab)
    model, weights_bytes = build_model(config, geometry, layout, kv_cache, arena, library)
    return_freed()
    largest = layout.largest_image(config.max_lora_rank)
    slots = Slots(config.arena_bytes, config.max_loras, largest)
    num_pages = kv_cache.num_pages - padding_pages(device.type)
    pages = PagePool(num_pages, config.page_size, config.prefix_cache)
    # One more, so that prefetching takes no thread from what requests wait for.
    puller = Puller(store, config.pull_workers + config.prefetch, post, layout.check_header)
    residency = build_residency(
        slots,
        host,
        arena.memory if host is None else host.memory,
        puller,
        max_rank=config.max_lora_rank,
        stall_s=config.adapter_wait_s,
        policy=PrefetchPolicy() if config.prefetch else None,
    )
    scheduler = Scheduler(_limits(config), pages, residency)
    profiler = StepProfiler(config.device)
    runner = Runner(model, arena, Sampler(geometry.eos_token_ids), profiler.marks)
    settler = Settler(scheduler, frozenset(geometry.eos_token_ids), config.max_model_len)
    times = StepTimes()
    bytes_, machine = (weights_bytes, kv_cache.num_bytes), machine_name(config.device)
    describe = Describe(scheduler, residency, runner, settler, *bytes_, budget, times, machine)
    wait_s, examine = config.adapter_wait_s, Examine(scheduler, residency, config.device)
    commands = Commands(residency, describe, examine, profiler, wait_s)
    admission = Admission(scheduler, config.max_queue, config.max_tenant_queue)
    engine = Engine(scheduler, runner, settler, residency, commands, admission, times, wait_s)
    return BuiltEngine(engine, residency, puller, layout, geometry, library)


def _limits(config: EngineConfig) -> Limits:
    return Limits(
        config.max_sequences,
        config.max_batch_tokens,
        config.max_prefill_chunk,
        config.fair_quantum,
        config.fair_ageing_s,
    )


def _allocate_kv_cache(
    config: EngineConfig,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_native: bool,
) -> KVCache:
    num_bytes = page_bytes(
        num_layers=geometry.num_layers,
        page_size=config.page_size,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=dtype,
    )
    num_pages = config.kv_bytes // num_bytes
    num_spare = padding_pages(device.type)
    num_tokens = max(0, num_pages - num_spare) * config.page_size
    if num_tokens < config.max_model_len:
        needed = (-(-config.max_model_len // config.page_size) + num_spare) * num_bytes
        raise ValueError(
            f"kv_memory of {config.kv_bytes} bytes holds {num_tokens} tokens of sequences, "
            f"less than max_model_len {config.max_model_len}: give it at least {needed} bytes"
        )
    return KVCache.allocate(
        num_layers=geometry.num_layers,
        num_pages=num_pages,
        page_size=config.page_size,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=dtype,
        device=device,
        is_tiled=is_native and can_tile(config.page_size, geometry.head_dim, dtype),
    )


def _allocate_host_tier(config: EngineConfig, device: torch.device) -> HostTier | None:
    if config.host_bytes == 0 and device.type == "cpu":
        return None
    if config.host_bytes == 0:
        raise ValueError("host_memory must be above 0 on this device: images are pulled into it")
    return HostTier(config.host_bytes, pin_memory=device.type == "cuda")
