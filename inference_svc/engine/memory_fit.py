"""Chooses the sizes that settings leave open, for a device with memory of its own.

The budget's lines are the only arithmetic: the rest of the device is for keys and values.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.resident import Shape
from inference_svc.adapters.targets import layout_of
from inference_svc.auto_settings import (
    Machine,
    Sizes,
    running_within,
    stored_within,
    to_engine_config,
)
from inference_svc.backends.base import BackendFactory, DeviceMemory, MemoryNeeds
from inference_svc.backends.select import select_backend
from inference_svc.config import InferenceSettings
from inference_svc.core import EngineConfig, padding_pages
from inference_svc.engine.memory_budget import (
    DRIVER_BYTES,
    Budget,
    human,
    most_needs,
    plan_budgets,
)
from inference_svc.model.description import Decoder
from inference_svc.model.kv_caches import kv_page_bytes, stored_dtype
from inference_svc.model.recurrent_states import slot_bytes

logger = logging.getLogger(__name__)

MAX_SEQUENCES, MAX_BATCH_TOKENS = 256, 8192
HALVINGS = 5
"""How often these two may be halved, together."""
STEP_SHARE, ARENA_SHARE = 8, 10
"""A step takes at most one part in so many of the memory that the weights leave, the arena one."""
RUNNING_SHARE, STORED_SHARE = 4, 8
"""The recurrent states of running sequences take at most one part in so many of it, and the stored
ones. A state of Qwen3.5-27B has 150 MiB, as keys and values of 2,400 tokens: the states of 256
sequences would take all of a card, those of fewer leave half of it for pages and adapters."""
LARGEST_SHARE = 4
"""Space for adapters of all experts takes at most one part in so many of it."""
SPARE_SHARE = 100
"""One part in so many of the device is left free, because others' use of it varies."""
HOST_ARENAS, HOST_SHARE = 4, 4
"""The host tier is as large as so many arenas, at most one part in so many of the host's memory."""
MIN_KV_TOKENS = 2048
"""Fewer tokens of keys and values are not worth a start, unless --max-model-len asks for fewer."""
NO_ADAPTERS_BYTES = 1 << 20
"""Arena and host tier where there is no store to load adapters from."""


def fit_device(settings: InferenceSettings, machine: Machine, *, decoder: Decoder) -> Sizes:
    """See `config.FitDevice`. `decoder` is the first rank's part. Raises ValueError with the
    budget's lines if they do not fit."""
    if settings.nnodes > 1:
        machine = _as_others(machine)
    fit = _Fit(settings, machine, decoder)
    sizes = fit.with_step(Sizes(0, 0, 0, 0, 0))
    sizes = fit.with_states(sizes)
    sizes = fit.with_adapters(sizes)
    sizes = fit.with_pages(sizes)
    fit.budget(sizes).check()
    return sizes


def _as_others(machine: Machine) -> Machine:
    """Returns the machine as all of several with such devices see theirs: they must choose equal
    sizes, whatever is free on each."""
    free_bytes = max(0, machine.total_bytes - DRIVER_BYTES)
    return replace(machine, free_bytes=free_bytes, host_free_bytes=None)


@dataclass(frozen=True)
class _Fit:
    """The choice for one model on one machine, one kind of size after the other; of several stages
    for the stage with the largest needs."""

    settings: InferenceSettings
    machine: Machine
    decoder: Decoder

    def with_step(self, sizes: Sizes) -> Sizes:
        """Chooses the widest step that takes no more than its share."""
        for max_batch_tokens, max_sequences in self._widths():
            sizes = replace(sizes, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
            needed_bytes = self._needs(sizes).step_bytes
            if needed_bytes * STEP_SHARE <= self._left_bytes(sizes):
                break
        return sizes

    def _widths(self) -> Iterator[tuple[int, int]]:
        """Yields tokens and sequences of a step, the widest first."""
        tokens, sequences = self.settings.max_batch_tokens, self.settings.max_sequences
        for halvings in range(HALVINGS + 1):
            most = sequences or min(MAX_SEQUENCES >> halvings, tokens or MAX_BATCH_TOKENS)
            yield tokens or max(MAX_BATCH_TOKENS >> halvings, most), most

    def with_states(self, sizes: Sizes) -> Sizes:
        """Chooses how many states a model with recurrent layers stores, and how many sequences run
        with two each, no more than the step is wide."""
        settings, state_bytes = self.settings, max(map(slot_bytes, self.decoder.every_stage))
        left_bytes = max(0, self._left_bytes(sizes))
        if not settings.max_sequences:
            most = running_within(left_bytes // RUNNING_SHARE, state_bytes, sizes.max_sequences)
            sizes = replace(sizes, max_sequences=most)
        kv_bytes = left_bytes if settings.kv_memory is None else int(settings.kv_memory)
        stored = stored_within(
            left_bytes // STORED_SHARE,
            state_bytes,
            settings,
            kv_tokens=kv_bytes // self._page_bytes * settings.page_size,
            max_sequences=sizes.max_sequences,
        )
        return replace(sizes, stored_states=stored)

    def with_adapters(self, sizes: Sizes) -> Sizes:
        """Chooses arena and host tier; warns of an arena without space for every adapter."""
        settings, largest_bytes = self.settings, self._largest_image.num_bytes
        if settings.adapter_memory is None:
            arena_bytes = self._arena_bytes(sizes)
        else:
            arena_bytes = int(settings.adapter_memory)
        if arena_bytes < largest_bytes and settings.store:
            logger.warning(
                "--adapter-memory %s: an adapter of --max-rank %d may take %s, and is refused",
                human(arena_bytes),
                settings.max_rank,
                human(largest_bytes),
            )
        host_bytes = self._host_bytes(arena_bytes)
        if settings.num_ranks > 1:
            host_bytes = 0  # ranks have none; pulls come through as much memory as the arena has
        elif settings.host_memory is not None:
            host_bytes = int(settings.host_memory)
        return replace(sizes, adapter_memory=arena_bytes, host_memory=host_bytes)

    def _arena_bytes(self, sizes: Sizes) -> int:
        """A tenth of the memory that the weights leave, no more than all adapters can take, and at
        least so much that the largest one can be pinned beside another; adapters of all experts,
        which take gigabytes, within a part of it."""
        if not self.settings.store:
            return NO_ADAPTERS_BYTES
        largest = self._largest_image
        # An image that fits into no hole is cut at its targets: part of a hole may be left over.
        ends = (*largest.cuts[1:], largest.num_bytes)
        widest_bytes = max(end - cut for cut, end in zip(largest.cuts, ends, strict=True))
        left_bytes = self._left_bytes(sizes)
        share_bytes = left_bytes // ARENA_SHARE
        if self.settings.num_ranks > 1:
            share_bytes = min(share_bytes, self._landing_bytes)
        wanted_bytes = min(share_bytes, self.settings.max_loras * largest.num_bytes)
        two_bytes = 2 * (largest.num_bytes + widest_bytes)
        if self.decoder.mixtures:
            two_bytes = min(two_bytes, max(left_bytes, 0) // LARGEST_SHARE)
        return max(wanted_bytes, two_bytes)

    @property
    def _landing_bytes(self) -> int:
        """The most memory of the host for a rank, through which adapters come to its arena: it is
        as large as this."""
        free_bytes = self.machine.host_free_bytes
        num_ranks = self.settings.num_ranks // self.settings.nnodes
        return sys.maxsize if free_bytes is None else free_bytes // (HOST_SHARE * num_ranks)

    def _host_bytes(self, arena_bytes: int) -> int:
        """Several arenas, a part of the host's memory, and at least one adapter: all of them pass
        through."""
        if not self.settings.store:
            return NO_ADAPTERS_BYTES
        wanted_bytes, free_bytes = HOST_ARENAS * arena_bytes, self.machine.host_free_bytes
        if free_bytes is not None:
            wanted_bytes = min(wanted_bytes, free_bytes // HOST_SHARE)
        return max(wanted_bytes, self._largest_image.num_bytes)

    def with_pages(self, sizes: Sizes) -> Sizes:
        """Gives the rest to keys and values."""
        if self.settings.kv_memory is not None:
            return replace(sizes, kv_memory=int(self.settings.kv_memory))
        budget = self.budget(sizes)
        spare_bytes = self.machine.total_bytes // SPARE_SHARE
        left_bytes = self._limit_bytes(budget) - budget.needed_bytes - spare_bytes
        return replace(sizes, kv_memory=max(left_bytes, self._min_pages_bytes()))

    def _min_pages_bytes(self) -> int:
        settings, longest = self.settings, self.decoder.max_position_embeddings
        num_tokens = settings.max_model_len or min(MIN_KV_TOKENS, longest)
        num_pages = -(-num_tokens // settings.page_size) + padding_pages(settings.device)
        return num_pages * self._page_bytes

    @property
    def _page_bytes(self) -> int:
        stored = stored_dtype(self.settings.kv_dtype, self._layout.dtype)
        size = self.settings.page_size
        return max(kv_page_bytes(each, size, stored) for each in self.decoder.every_stage)

    def budget(self, sizes: Sizes) -> Budget:
        """Returns the device's."""
        memory = DeviceMemory(self.machine.free_bytes, self.machine.total_bytes)
        return plan_budgets(self._config(sizes), self._needs(sizes), memory)[0]

    def _needs(self, sizes: Sizes) -> MemoryNeeds:
        return most_needs(self._config(sizes), self.decoder, self._backend)

    def _config(self, sizes: Sizes) -> EngineConfig:
        """Where the longest sequence is not decided, it is the model's: it decides little."""
        max_model_len = self.settings.max_model_len or self.decoder.max_position_embeddings
        decided = asdict(sizes) | {"max_model_len": max_model_len}
        return to_engine_config(self.settings.model_copy(update=decided))

    def _left_bytes(self, sizes: Sizes) -> int:
        """Returns the memory that weights and libraries leave; below 0: none."""
        budget = self.budget(replace(sizes, adapter_memory=0, host_memory=0, kv_memory=0))
        needs = self._needs(sizes)
        own_bytes = needs.step_bytes + needs.recurrent_bytes
        return self._limit_bytes(budget) - budget.needed_bytes + own_bytes

    def _limit_bytes(self, budget: Budget) -> int:
        assert budget.limit_bytes is not None, "the device's memory is known"
        return budget.limit_bytes

    @cached_property
    def _backend(self) -> BackendFactory:
        return select_backend(self._config(Sizes(0, 0, 0, 1, 1)), self.decoder)

    @cached_property
    def _layout(self) -> ModelLayout:
        return layout_of(self._config(Sizes(0, 0, 0, 1, 1)), self.decoder)

    @cached_property
    def _largest_image(self) -> Shape:
        """The shape of the largest adapter that is admitted."""
        config, settings = self._config(Sizes(0, 0, 0, 1, 1)), self.settings
        layouts = (layout_of(config, each) for each in self.decoder.every_stage)
        shapes = (each.largest_image(settings.max_rank, settings.lora_targets) for each in layouts)
        return max(shapes, key=lambda shape: shape.num_bytes)
