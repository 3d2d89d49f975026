"""Makes an engine from its config: backend, adapters, policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import STEP_COPY_BYTES, HostTier
from inference_svc.adapters.picture_targets import with_unread
from inference_svc.adapters.prefetch import PrefetchPolicy
from inference_svc.adapters.pulls.headers import HeaderReader
from inference_svc.adapters.pulls.image_source import AdapterStore
from inference_svc.adapters.pulls.pace import PullPace
from inference_svc.adapters.pulls.pull import PullEvent
from inference_svc.adapters.pulls.registration import Registrations
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.adapters.residency import Residency, build_residency
from inference_svc.adapters.sums import SumChecks
from inference_svc.adapters.targets import cut_as, layout_of
from inference_svc.backends.base import Backend, BackendFactory, RankFactory
from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.backends.select import select_backend
from inference_svc.backends.speed_notes import FormatKernels, Speed, computing_threads
from inference_svc.core import EngineConfig
from inference_svc.engine.compute.losses import Losses
from inference_svc.engine.compute.profiler import StepProfiler
from inference_svc.engine.compute.routed_pages import RoutedPages
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.compute.sampler import Sampler
from inference_svc.engine.compute.step_times import StepTimes
from inference_svc.engine.control.commands import Commands
from inference_svc.engine.control.inspect import Inspect, InspectImage
from inference_svc.engine.control.life_cycle import LifeCycle
from inference_svc.engine.control.status import Describe
from inference_svc.engine.costs import check_pictures, make_pictures, prices_of
from inference_svc.engine.engine import Engine
from inference_svc.engine.memory_budget import Budget, check_budgets, human
from inference_svc.engine.policy.admission import Admission
from inference_svc.engine.policy.pictures.memory import PictureMemory
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.recurrent import Recurrent
from inference_svc.engine.policy.states.states import States
from inference_svc.engine.ranks.backend import RankedBackend
from inference_svc.engine.ranks.group import RankGroup
from inference_svc.engine.ranks.nodes.facts import computing_of, facts_of
from inference_svc.engine.ranks.nodes.rendezvous import NodeRendezvous
from inference_svc.engine.ranks.pulls import RankPulls
from inference_svc.engine.ranks.traces import RankTraces
from inference_svc.engine.transport.messages import MaskReady, RankFailed, Restored
from inference_svc.grammars.masks import Masks
from inference_svc.host.cpus import (
    WHOLE,
    Share,
    bound_to,
    compute_threads,
    find_processor,
    partition_cpus,
    usable_cpus,
)
from inference_svc.host.device_info import device_of, machine_name
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.base_hashes import hashing_base
from inference_svc.model.checkpoint.classifier import read_score_head
from inference_svc.model.checkpoint.parameters import weight_formats
from inference_svc.model.checkpoint.tensors import check_tensors
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.recurrent_states import num_slots
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from kernels.native.library import load

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and the parts of it that others use directly."""

    engine: Engine
    residency: Residency
    puller: Puller
    layout: ModelLayout
    decoder: Decoder
    speed: Speed
    ranks: RankGroup | None = None
    other_layouts: tuple[ModelLayout, ...] = ()

    def close(self) -> None:
        """Ends other ranks, the processes of masks, and the pull threads, which may wait for
        ranks. Every job of these must have been cancelled."""
        self.engine.masks.close()
        if self.ranks is not None:
            self.ranks.close()
        self.puller.close()

    def place_threads(self) -> None:
        """Binds the calling thread, which will call `engine.step`, and the threads that compute
        with it to processors of their own, if there are enough for all ranks."""
        share = WHOLE if self.ranks is None else self.ranks.share
        processors = place_threads(self.engine.runner.backend, share)
        if self.ranks is not None:
            self.ranks.report.processors = processors


def build_engine(
    config: EngineConfig,
    store: AdapterStore,
    post: Callable[[PullEvent | Restored | RankFailed | MaskReady], None],
    make_store: Callable[[Callable[[Any], None]], Any] | None = None,
) -> BuiltEngine:
    """Loads the model and allocates all memory. `post` receives pull events, notices that freed
    memory is there again, and a rank's failure, from any thread. `make_store` makes the stores of
    other ranks, which it starts.

    Raises UnsupportedModel; ValueError when the memory given does not suffice.
    """
    decoder = describe(config, 0)
    if decoder.encoder is not None:
        config = _of_encoder(config)
    factory = select_backend(config, decoder)
    if config.num_ranks == 1:
        return _build(config, decoder, factory, store, post, None)
    if config.host_bytes:
        raise ValueError("--host-memory must be 0 with several processes: ranks have no host tier")
    assert make_store is not None, "the stores of other ranks"
    assert isinstance(factory, RankFactory), "it computes a rank's part"
    rendezvous = None
    if config.nodes is not None:
        rendezvous = NodeRendezvous(config, facts_of(config) | computing_of(factory))
    ranks = RankGroup(
        config, factory, make_store, lambda error: post(RankFailed(error)), rendezvous
    )
    try:
        return _build(config, decoder, factory, store, post, ranks)
    except BaseException:
        ranks.close()
        raise


def _of_encoder(config: EngineConfig) -> EngineConfig:
    """Returns the settings of an encoder, which computes a prompt at once. Raises ValueError."""
    if config.max_batch_tokens < config.max_model_len:
        raise ValueError("--max-batch-tokens must be at least --max-model-len for an encoder")
    return replace(
        config, prefix_cache=False, kv_bytes=0, max_prefill_chunk=config.max_batch_tokens
    )


def _build(
    config: EngineConfig,
    decoder: Decoder,
    factory: BackendFactory,
    store: AdapterStore,
    post: Callable[[PullEvent | Restored | RankFailed | MaskReady], None],
    ranks: RankGroup | None,
) -> BuiltEngine:
    if not 0 < config.max_sequences <= config.max_batch_tokens:
        raise ValueError("--max-sequences must be above 0 and at most --max-batch-tokens")
    num_threads = set_num_threads(config)
    speed = _speed(config, decoder, factory, num_threads)
    _check_files(config, decoder)
    budget = check_budgets(config, decoder, factory)
    layout = layout_of(config, decoder)
    host = _host_tier(config, has_device_memory=factory.has_device_memory)
    backend, layout = _load_model(config, decoder, factory, layout, num_threads, ranks)
    pace = pull_pace(config, factory, num_threads)
    other_layouts = _other_layouts(config, layout)
    stages = (layout, *other_layouts)[:: config.tensor_parallel]
    puller, residency = _residency(config, factory, store, post, stages, backend, host, pace, ranks)
    states = make_states(config, backend)
    masks = Masks(lambda: post(MaskReady()), config.max_sequences)
    pictures = make_pictures(config, decoder, layout, residency, backend.pictures)
    scheduler = _make_scheduler(config, decoder, states, residency, masks, pictures)
    if pace is not None:
        pace.is_needed = lambda: bool(scheduler.running) and not residency.loads.queued
    profiler = StepProfiler(factory.profiler_device)
    sampler = _make_sampler(config, decoder, factory)
    routed = _routed_pages(config, decoder, backend)
    head = read_score_head(config.model_dir, decoder, has_classifiers=config.classifiers)
    runner = Runner(backend, sampler, profiler.marks, scheduler.step_limit, routed, masks, head)
    settler = Settler(scheduler, frozenset(decoder.eos_token_ids), config.max_model_len, masks)
    times, losses = StepTimes(), Losses(config.dtype)
    engine = Engine(
        scheduler=scheduler,
        runner=runner,
        settler=settler,
        residency=residency,
        sum_checks=SumChecks(layout, residency.device, config.max_added_tokens),
        commands=_make_commands(
            config, post, layout, budget, settler, residency, runner, profiler, times, losses, ranks
        ),
        admission=Admission(scheduler, config.max_queue, config.max_tenant_queue),
        times=times,
        losses=losses,
        masks=masks,
        adapter_wait_s=config.adapter_wait_s,
    )
    return BuiltEngine(engine, residency, puller, layout, decoder, speed, ranks, other_layouts)


def _check_files(config: EngineConfig, decoder: Decoder) -> None:
    """Raises UnsupportedModel for a checkpoint without the tensors of the model, or its tower."""
    for each in (decoder, *decoder.towers):
        check_tensors(config.model_dir, each)


def _make_sampler(config: EngineConfig, decoder: Decoder, factory: BackendFactory) -> Sampler:
    if factory.has_device_memory:
        return Sampler(decoder.eos_token_ids, has_device_memory=True)
    return Sampler(decoder.eos_token_ids, library=load() if config.native_kernels else None)


def _rank_pulls(
    config: EngineConfig, ranks: RankGroup, backend: Backend[Any], pace: PullPace | None
) -> RankPulls:
    stages, arena_bytes = config.pipeline_parallel, config.arena_bytes
    return RankPulls(ranks, backend.land, pace, stages, arena_bytes)


def _other_layouts(config: EngineConfig, layout: ModelLayout) -> tuple[ModelLayout, ...]:
    """Returns the layouts of the ranks after the first, by rank."""
    return tuple(
        cut_as(layout, layout_of(config, describe(config, index)))
        for index in range(1, config.num_ranks)
    )


def describe(config: EngineConfig, index: int) -> Decoder:
    """Returns the decoder of the rank with this index among those of all stages. Raises
    UnsupportedModel."""
    with_pictures = config.max_prompt_images > 0
    whole = load_description(config.model_dir, config.quantize, with_pictures=with_pictures)
    check_pictures(config, whole)
    whole = whole.for_length(config.max_model_len)
    stage, rank = divmod(index, config.tensor_parallel)
    part = of_stage(whole, stage, config.pipeline_parallel, config.tensor_parallel)
    return of_rank(part, Rank(rank, config.tensor_parallel), config.expert_parallel)


def make_states(config: EngineConfig, backend: Backend[Any]) -> States:
    """Returns the account of the backend's memory for the state of sequences."""
    caching, size = config.prefix_cache, config.page_size
    pages = Pages(backend.num_pages, size, caching)
    if not backend.num_states:
        return States(pages)
    border_tokens = config.state_pages * size
    recurrent = Recurrent(
        backend.num_states, config.max_sequences, border_tokens, page_size=size, caching=caching
    )
    return States(pages, recurrent)


def _state_bytes(backend: Backend[Any]) -> int:
    """Returns the memory of a sequence's recurrent state; 0 if the model has none."""
    return backend.recurrent_bytes // num_slots(backend.num_states)


def config_of_rank(config: EngineConfig, index: int) -> EngineConfig:
    """Returns the settings of the rank with this index, with the device that it computes on."""
    return replace(config, device=device_of(config.device, config.local_ranks.index(index)))


def share_of(config: EngineConfig, index: int) -> Share:
    """Returns the share of its machine's cores that the rank with this index has: stages, of which
    one computes at a time, have the same."""
    return Share(index % config.num_computing, config.num_computing)


def place_threads(backend: Backend[Any], share: Share) -> tuple[int, ...]:
    """Binds the calling thread and the ones that compute with it to processors of their own in a
    share, if there are enough; returns these."""
    processors = partition_cpus(torch.get_num_threads(), share)
    if processors:
        backend.place_threads(processors)
    return tuple(sorted(chain.from_iterable(processors)))


def pull_pace(config: EngineConfig, factory: BackendFactory, num_threads: int) -> PullPace | None:
    """Returns the pace of a rank's pulls beside steps, of which each rank of this machine computes
    with so many threads; None: they take none of these processors' time."""
    if factory.has_device_memory:
        return None
    num_ranks = len(config.local_ranks)
    num_computing = num_threads * config.num_computing
    return PullPace.where_shared(usable_cpus(), num_computing, num_ranks)


def set_num_threads(config: EngineConfig) -> int:
    """Sets and returns how many threads compute on each rank."""
    # Torch's own number is a guess that knows neither quotas nor ranks.
    num_threads = compute_threads(config.num_threads, config.num_computing)
    torch.set_num_threads(num_threads)
    return num_threads


def _load_model(
    config: EngineConfig,
    decoder: Decoder,
    factory: BackendFactory,
    layout: ModelLayout,
    num_threads: int,
    ranks: RankGroup | None,
) -> tuple[Backend[Any], ModelLayout]:
    """Returns the backend with the model's weights, and the layout with all that the store gets."""
    with hashing_base(config.model_dir, decoder.of_all_stages, num_threads) as base:
        backend: Backend[Any]
        if ranks is None:
            backend = factory.build(config, decoder, layout)
        else:
            assert isinstance(factory, RankFactory), "it computes a rank's part"
            exchange = ranks.meet()
            try:
                with bound_to(ranks.share):
                    own = factory.build_rank(config, decoder, layout, exchange)
            except ExchangeFailed as error:
                raise ranks.blame(error) from error
            assert own.num_pages == ranks.wait_until_built(), "ranks have equal memories"
            backend = RankedBackend(own, ranks, decoder, config.max_sequences)
        layout = layout.with_base(base())
    return backend, with_unread(layout, config.model_dir, decoder)


def _routed_pages(
    config: EngineConfig, decoder: Decoder, backend: Backend[Any]
) -> RoutedPages | None:
    """Returns None for a model without experts."""
    shape = decoder.expert_layers
    return None if shape is None else RoutedPages(shape, backend.num_pages, config.page_size)


def _make_commands(
    config: EngineConfig,
    post: Callable[[Restored], None],
    layout: ModelLayout,
    budget: Budget,
    settler: Settler,
    residency: Residency,
    runner: Runner,
    profiler: StepProfiler,
    times: StepTimes,
    losses: Losses,
    ranks: RankGroup | None,
) -> Commands:
    scheduler, backend = settler.scheduler, runner.backend
    life_cycle = LifeCycle(scheduler, runner, residency, post)
    describe = Describe(
        scheduler=scheduler,
        residency=residency,
        runner=runner,
        settler=settler,
        budget=budget,
        times=times,
        machine=machine_name(config.device),
        state_bytes=_state_bytes(backend),
        life_cycle=life_cycle,
        losses=losses,
        describe_ranks=None if ranks is None else partial(ranks.describe, backend),
    )
    return Commands(
        residency=residency,
        describe=describe,
        inspect=Inspect(scheduler, residency, config.device),
        inspect_image=InspectImage(backend, layout),
        forget_prefixes=scheduler.states.forget_prefixes,
        profiler=profiler,
        life_cycle=life_cycle,
        losses=losses,
        adapter_wait_s=config.adapter_wait_s,
        rank_traces=None if ranks is None else RankTraces(ranks),
    )


def _speed(
    config: EngineConfig, decoder: Decoder, factory: BackendFactory, num_threads: int
) -> Speed:
    """Logs the threads and the notes, too: before the model is loaded, which may fail for the same
    reasons."""
    processor = find_processor()
    if not factory.has_device_memory:
        computing = computing_threads(num_threads, config.num_computing)
        counts = {
            "num_threads": num_threads,
            "num_cores": processor.num_cores,
            "num_processors": processor.num_processors,
        }
        logger.info("%s on %s", computing, processor, extra=counts)
    notes = tuple(factory.speed_notes(config, num_threads))
    for note in notes:
        logger.warning("%s", note)
    formats = tuple(
        FormatKernels(str(form), factory.weight_kernels(form)) for form in weight_formats(decoder)
    )
    if decoder.quantisation is not None and not formats:
        formats = (FormatKernels(decoder.quantisation.name, f"held in {config.dtype}"),)
    for each in formats:
        logger.info("weights in %s: %s", each.format, each.kernels)
    num_threads = 0 if factory.has_device_memory else num_threads
    return Speed(num_threads, notes, processor, formats)


def _residency(
    config: EngineConfig,
    factory: BackendFactory,
    store: AdapterStore,
    post: Callable[[PullEvent], None],
    stages: Sequence[ModelLayout],
    backend: Backend[Any],
    host: HostTier | None,
    pace: PullPace | None,
    ranks: RankGroup | None,
) -> tuple[Puller, Residency]:
    """`stages` are the layouts of the first ranks of all stages."""
    layout = stages[0]
    largest = [each.largest_image(config.max_lora_rank, config.lora_targets) for each in stages]
    largest_bytes = max(each.num_bytes for each in largest)
    logger.info(
        "the largest adapter of --max-rank %d takes %s, and --adapter-memory is %s",
        config.max_lora_rank,
        human(largest_bytes),
        human(config.arena_bytes),
        extra={"largest_bytes": largest_bytes, "arena_bytes": config.arena_bytes},
    )
    slots = Slots(config.arena_bytes, config.max_loras, largest, config.tenant_share, len(stages))
    # One more, so that prefetching takes no thread from loads that requests wait for.
    check = partial(layout.check_contents, max_added_tokens=config.max_added_tokens)
    num_threads = config.pull_workers + config.prefetch
    others = None if ranks is None else _rank_pulls(config, ranks, backend, pace)
    registrar = None if ranks is not None or host is None else factory.host_registrar(config)
    registrations = None if registrar is None else Registrations(registrar)
    read = HeaderReader(layout).read
    puller = Puller(store, num_threads, post, read, check, pace, others, registrations)
    residency = build_residency(
        slots,
        host,
        backend.pull_memory,
        puller,
        max_rank=config.max_lora_rank,
        stall_s=config.adapter_wait_s,
        num_mixes=config.max_sequences,
        refusal=partial(layout.refusal, lora_targets=config.lora_targets),
        policy=PrefetchPolicy() if config.prefetch else None,
    )
    return puller, residency


def _make_scheduler(
    config: EngineConfig,
    decoder: Decoder,
    states: States,
    residency: Residency,
    masks: Masks,
    pictures: PictureMemory | None,
) -> Scheduler:
    limits = Limits(
        config.max_sequences,
        config.max_batch_tokens,
        config.max_prefill_chunk,
        config.fair_quantum,
        config.fair_ageing_s,
        computes_whole=decoder.encoder is not None,
    )
    return Scheduler(limits, states, residency, prices_of(decoder), masks, pictures)


def _host_tier(config: EngineConfig, *, has_device_memory: bool) -> HostTier | None:
    """Returns None if images are pulled straight into the arena."""
    if config.host_bytes:
        return HostTier(config.host_bytes, None if has_device_memory else STEP_COPY_BYTES)
    if has_device_memory and config.num_ranks == 1:
        raise ValueError("--host-memory must be above 0 on this device: images are pulled into it")
    return None
