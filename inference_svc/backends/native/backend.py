"""The backend for CPUs: the decoder as one program in C++, and the memory that it runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import AppliedTargets, applied_targets
from inference_svc.backends.adapter_memory import AdapterMemory, allocate_arena
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import (
    Backend,
    DeviceMemory,
    Hidden,
    Logits,
    MemoryNeeds,
    RankBackend,
    Reload,
    Scored,
    gather_choices,
    make_reload,
    max_pages,
    returns_experts,
)
from inference_svc.backends.exchange import GlooMeeting, Meeting
from inference_svc.backends.magnitudes import Magnitudes
from inference_svc.backends.native.buffers import BatchPages, StepArrays
from inference_svc.backends.native.exchange import (
    CalledExchange,
    ProgramExchange,
    SharedExchange,
    SharedMeeting,
)
from inference_svc.backends.native.lora import NativeLoraOps
from inference_svc.backends.native.needs import memory_needs, tower_needs
from inference_svc.backends.native.program import NativeTransformer
from inference_svc.backends.native.projections import PackedProjection, PackedProjections
from inference_svc.backends.native.towers.tower import NativeTower
from inference_svc.backends.native.workspace import Workspace, max_outputs
from inference_svc.backends.pictures import TowerMaker, mutual_of, take_in
from inference_svc.backends.prompt_runs import ScoredRun, pooled_runs, scored_runs, scored_slices
from inference_svc.backends.slot_runs import scored_indices, scored_slot_runs
from inference_svc.backends.speed_notes import native_notes, thread_notes
from inference_svc.backends.step_data import StepData
from inference_svc.core import Batch, BatchRow, EngineConfig
from inference_svc.host.cpus import usable_cores, usable_cpus
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder, Pictures
from inference_svc.model.encoder.in_torch import OF_ENCODERS, OF_PICTURES
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.sharding.exchange import Exchange, StagedExchange
from inference_svc.model.transformer import COMPUTED, OF_RANKS, OF_STAGES
from kernels.host_memory import Slab
from kernels.lora.plan import LoraContents
from kernels.native.build import processor_flags
from kernels.native.library import Library, choose, load
from kernels.quantised import WeightFormat

MakeTransformer: TypeAlias = Callable[
    [ModelWeights[PackedProjection], KVCaches, RecurrentStates | None], NativeTransformer
]


class NativeInputs(NamedTuple):
    """The key of a prepared step's program: the groups that its adapters change, whether a row
    returns the experts of its tokens, the scored tokens, and the pooled ones; and the embeddings of
    pictures, which the program lets in."""

    groups: frozenset[str]
    returns_experts: bool
    runs: tuple[ScoredRun, ...] = ()
    pooled: tuple[ScoredRun, ...] = ()
    pictures: tuple[PlacedRows, ...] = ()


class NativeBackend(AdapterMemory):
    """A `Backend` whose inputs lie in `step`."""

    def __init__(
        self,
        decoder: Decoder,
        make_transformer: MakeTransformer,
        weights: ModelWeights[PackedProjection],
        kv_caches: KVCaches,
        reload: Reload,
        arena: Arena,
        step: StepArrays,
        lora: NativeLoraOps,
        library: Library,
        states: RecurrentStates | None = None,
        exchange: ProgramExchange | None = None,
    ) -> None:
        super().__init__(arena)
        self._exchange = exchange
        self.num_states = 0 if states is None else states.num_states
        self._states = states
        self.num_pages = kv_caches.num_pages
        self.kernels = f"native {library.variant}"
        self.num_lora_steps = 0
        self.num_eager_steps = 0
        self._decoder = decoder
        self._make_transformer = make_transformer
        self._reload = reload
        self._weights: ModelWeights[PackedProjection] | None = weights
        self.kv_caches: KVCaches | None = kv_caches
        self.transformer: NativeTransformer | None = make_transformer(weights, kv_caches, states)
        self._step = step
        self._lora = lora
        self._library = library
        self.pictures = reload.pictures(arena)

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv_caches is None else self.kv_caches.num_bytes

    @property
    def weights_bytes(self) -> int:
        of_tower = 0 if self.pictures is None else self.pictures.weights_bytes
        return of_tower + (0 if self._weights is None else self._weights.num_bytes)

    @property
    def workspace_bytes(self) -> int:
        held_bytes = 0 if self.transformer is None else self.transformer.num_bytes
        of_tower = 0 if self.pictures is None else self.pictures.workspace_bytes
        return held_bytes + self._lora.workspace_bytes + of_tower

    @property
    def _loaded(self) -> NativeTransformer:
        assert self.transformer is not None, "the memory is freed"
        return self.transformer

    def lora_launches(self, contents: LoraContents) -> Mapping[str, int]:
        if self.transformer is None:  # nothing is launched while the server sleeps
            return {}
        counts = self.transformer.num_ops(self._lora.groups_of(contents))
        return self._lora.by_weight(counts, contents)

    def _make_magnitudes(self) -> Magnitudes:
        assert self._weights is not None, "the weights are freed"
        tower = None if self.pictures is None else self.pictures.weights
        weights, part = self._weights, self._decoder
        has_stages = part.stage is not None
        return Magnitudes(
            weights, self.arena, part.rank, self._exchange, has_stages=has_stages, tower=tower
        )

    def place_threads(self, processors: Sequence[Sequence[int]]) -> None:
        self._library.place_threads(processors)

    def prepare(self, batch: Batch) -> NativeInputs:
        columns = batch.columns()
        self._step.fill(columns)
        if self._loaded.states is not None:
            self._loaded.states.fill(batch.rows)
        self._loaded.encoder.fill(batch.rows)
        groups = self._lora.plan(batch.rows)
        self.num_lora_steps += bool(groups)
        placed = () if self.pictures is None else self.pictures.placed(batch.rows)
        if self.pictures is not None:
            tokens = (each.tokens for each in placed)
            self._step.let_see(mutual_of(self._decoder.pictures, tokens))
        # Nothing is scored or pooled of rows of one sampling token. A picture's token may be among
        # them, as the last one of a prompt.
        if columns.is_decode and not placed:
            return NativeInputs(groups, returns_experts(batch, self._decoder))
        runs, pooled = tuple(scored_runs(batch.rows)), tuple(pooled_runs(batch.rows))
        return NativeInputs(groups, returns_experts(batch, self._decoder), runs, pooled, placed)

    def forward(self, inputs: NativeInputs) -> Logits:
        groups, has_choices, runs, pooled, placed = inputs
        keeps_hidden = bool(runs or pooled)
        logits = self._forward(
            groups, returns_experts=has_choices, is_scored=keeps_hidden, pictures=placed
        )
        return Logits(logits, experts=self._loaded.choices if has_choices else None)

    def _forward(
        self,
        groups: frozenset[str],
        *,
        returns_experts: bool,
        is_scored: bool,
        pictures: Sequence[PlacedRows] = (),
    ) -> Tensor:
        logits = self._loaded.forward(
            groups, returns_experts=returns_experts, is_scored=is_scored, pictures=pictures
        )
        self._check_exchange()
        if returns_experts:
            gather_choices(self._loaded.choices, self._decoder, self._exchange)
        return logits

    def score(self, inputs: NativeInputs) -> Iterator[Scored]:
        for part in scored_slices(inputs.runs, len(self._step.logit_rows)):
            self._step.choose(scored_indices(part))
            if inputs.groups:
                self._lora.plan_head(scored_slot_runs(part))
            logits = self._loaded.logits(inputs.groups)
            self._check_exchange()
            yield Scored(part, logits)

    def pool(self, inputs: NativeInputs) -> Iterator[Hidden]:
        for part in scored_slices(inputs.pooled, len(self._step.logit_rows)):
            self._step.choose(scored_indices(part))
            if inputs.groups:
                self._lora.plan_head(scored_slot_runs(part))
            heads = self.arena.heads_of(run.sequence.slot for run in part)
            yield Hidden(part, self._loaded.hidden(inputs.groups), heads)

    def follow(self, data: StepData) -> None:
        """Computes this rank's part of a step of the first rank, which has the logits."""
        self._step.fill_rows(data.token_ids, data.starts, data.counts, data.page_ids)
        self._step.fill_axes(data.axes)
        self._step.let_see(mutual_of(self._decoder.pictures, data.pictures))
        if self._states is not None:
            assert self._loaded.states is not None
            self._states.copy(data.state_copies)
            self._loaded.states.fill_segments(data.segments, data.counts)
        groups = self._lora.plan_runs(data.runs, data.last_slots)
        is_scored = bool(data.scored) or data.is_pooled
        where = self.arena.layout.dtype, self.arena.device
        placed = take_in(data.pictures, self._decoder, self._exchange, *where)
        self._forward(
            groups, returns_experts=data.returns_experts, is_scored=is_scored, pictures=placed
        )
        for indices, runs in data.scored:
            self._step.choose(indices)
            if groups:
                self._lora.plan_head(runs)
            self._loaded.logits(groups)
        self._check_exchange()

    def _check_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.check()

    def keep_part(self, row: BatchRow) -> None:
        if self._states is not None:
            self._states.keep_part(row)

    def use_idle_time(self) -> bool:
        """There is nothing to prepare."""
        return False

    wants_idle_time = False

    def placed(self, inputs: NativeInputs) -> Sequence[PlacedRows]:
        return inputs.pictures

    def plan(self, inputs: NativeInputs) -> Sequence[int]:
        """Steps are computed in one way."""
        return ()

    def free_unused(self) -> None:
        """Holds only the memory that every step needs."""

    @property
    def recurrent_bytes(self) -> int:
        return 0 if self._states is None else self._states.num_bytes

    @property
    def _held_bytes(self) -> int:
        of_pictures = 0 if self.pictures is None else self.pictures.num_bytes
        return self.kv_bytes + self.recurrent_bytes + self.weights_bytes + of_pictures

    def free_memory(self, *, weights: bool) -> int:
        held_bytes = self._held_bytes
        # The program has their addresses.
        self.transformer = self.kv_caches = self._states = None
        if self.pictures is not None:
            self.pictures.free(weights=weights)
        if weights:
            self._magnitudes = None
            self._weights = None
        return held_bytes - self._held_bytes

    def restore(self) -> None:
        self._weights = self._weights or self._reload.weights()
        self.kv_caches = self.kv_caches or self._reload.pages()
        self._states = self._states or self._reload.states()
        if self.transformer is None:
            self.transformer = self._make_transformer(self._weights, self.kv_caches, self._states)
        if self.pictures is not None:
            self.pictures.restore()


class NativeFactory:
    """A `BackendFactory` for CPUs that the native kernels are compiled for."""

    name = "native"
    # The program follows the definition, operation by operation.
    features = COMPUTED | OF_ENCODERS | OF_PICTURES | OF_RANKS | OF_STAGES
    disabled_by = "native-kernels = false"
    has_device_memory = False
    profiler_device = None

    def host_registrar(self, config: EngineConfig) -> None:
        """Returns None: a copy on the host delays a step, wherever its source lies."""

    def supports(self, config: EngineConfig) -> bool:
        if not config.native_kernels or torch.device(config.device).type != "cpu":
            return False
        return config.dtype in ("float32", "bfloat16") and load() is not None

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        library, faults = choose(None)
        assert library is not None, "the backend is supported"
        notes = native_notes(config.dtype, library.variant, processor_flags(), faults)
        num_ranks = config.num_computing
        return [*notes, *thread_notes(num_threads, usable_cores(), usable_cpus(), num_ranks)]

    def weight_kernels(self, form: WeightFormat) -> str:
        return "native"

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        return memory_needs(config, decoder).plus(tower_needs(config, decoder))

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return None

    @property
    def instructions(self) -> str:
        library = load()
        assert library is not None, "the backend is supported"
        return library.variant

    def open_meeting(
        self, count: int, num_threads: int, timeout_s: float, num_stages: int = 1, address: str = ""
    ) -> Meeting:
        if address:
            return GlooMeeting(count, timeout_s, address, num_stages)
        return SharedMeeting(count, num_threads, timeout_s, num_stages)

    def build(
        self, config: EngineConfig, decoder: Decoder, layout: ModelLayout
    ) -> Backend[NativeInputs]:
        return self._build(config, decoder, layout, None)

    def build_rank(
        self, config: EngineConfig, decoder: Decoder, layout: ModelLayout, exchange: Exchange
    ) -> RankBackend[NativeInputs]:
        if isinstance(exchange, SharedExchange):
            return self._build(config, decoder, layout, exchange)
        assert isinstance(exchange, StagedExchange)
        index = 0 if decoder.rank is None else decoder.rank.index
        return self._build(config, decoder, layout, CalledExchange(index, exchange))

    def _build(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
        exchange: ProgramExchange | None,
    ) -> NativeBackend:
        library, dtype = load(), getattr(torch, config.dtype)
        assert library is not None, "the backend is supported"
        max_tokens = config.max_batch_tokens
        tower = _tower_maker(library, config.max_model_len)
        reload = make_reload(config, decoder, _projections, tower, prefers_tiles=True)
        kv_caches = reload.pages()
        arena = allocate_arena(config, layout)
        weights = reload.weights()
        num_outputs = max_outputs(config, decoder)
        step = _step_arrays(config, decoder, num_outputs)
        targets = applied_targets(layout, config.lora_targets, config.max_added_tokens)
        num_chosen = max((each.num_chosen for each in decoder.mixtures), default=0)
        lora = NativeLoraOps(arena, targets, max_tokens, num_outputs, num_chosen, exchange)
        workspace = Workspace.allocate(
            decoder, max_tokens, num_outputs, dtype, config.max_added_tokens
        )

        def make(
            weights: ModelWeights[PackedProjection],
            kv_caches: KVCaches,
            states: RecurrentStates | None,
        ) -> NativeTransformer:
            return NativeTransformer(
                decoder, weights, kv_caches, step, workspace, lora, library, states, exchange
            )

        return NativeBackend(
            decoder,
            make,
            weights,
            kv_caches,
            reload,
            arena,
            step,
            lora,
            library,
            reload.states(),
            exchange,
        )


def _projections() -> PackedProjections:
    return PackedProjections(Slab().take)


def _tower_maker(library: Library, max_model_len: int) -> TowerMaker:
    """A tile is no larger than a prompt of this length."""

    def make(
        pictures: Pictures,
        weights: ModelWeights[PackedProjection],
        arena: Arena,
        targets: AppliedTargets,
    ) -> NativeTower:
        longest = pictures.max_inner_tokens(max_model_len)
        return NativeTower(pictures, weights, arena, targets, library, longest)

    return TowerMaker(_projections, make)


def _step_arrays(config: EngineConfig, decoder: Decoder, num_outputs: int) -> StepArrays:
    max_rows, found = config.max_sequences, decoder.pictures
    return StepArrays(
        config.max_batch_tokens,
        max_rows,
        config.page_size,
        BatchPages(max_rows, max_pages(config)),
        max_outputs=num_outputs,
        places=None if found is None else found.positions,
        has_ends=found is not None and found.are_mutual,
    )
