"""A step computed operation by operation in torch: the definition that all backends must equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

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
    empty_choices,
    gather_choices,
    make_reload,
    returns_experts,
    states_bytes,
)
from inference_svc.backends.exchange import LOCAL, GlooMeeting, Meeting
from inference_svc.backends.lora_step import LoraStep, plan_lora, plan_runs
from inference_svc.backends.magnitudes import Magnitudes
from inference_svc.backends.pictures import mutual_of, take_in
from inference_svc.backends.prompt_runs import ScoredRun, pooled_runs, scored_runs, scored_slices
from inference_svc.backends.slot_runs import scored_indices
from inference_svc.backends.speed_notes import thread_notes, torch_notes
from inference_svc.backends.step_data import StepData
from inference_svc.backends.torch_needs import picture_needs, step_bytes
from inference_svc.core import Batch, BatchRow, EngineConfig
from inference_svc.host.cpus import usable_cores, usable_cpus
from inference_svc.model.checkpoint.parameters import weights_bytes
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder
from inference_svc.model.encoder.in_torch import OF_ENCODERS, OF_PICTURES
from inference_svc.model.inputs import PlacedRows, StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchLinear, TorchProjections
from inference_svc.model.recurrent_states import RecurrentPlan, RecurrentStates
from inference_svc.model.sharding.exchange import Exchange
from inference_svc.model.step import Step
from inference_svc.model.transformer import COMPUTED, OF_RANKS, OF_STAGES, Transformer
from inference_svc.pictures.positions import NUM_AXES
from kernels.lora.plan import LoraContents
from kernels.native.library import choose
from kernels.quantised import WeightFormat, implementation


def score_slices(
    transformer: Transformer,
    last: Step,
    lora: LoraStep | None,
    runs: Sequence[ScoredRun],
    max_scored: int,
) -> Iterator[Scored]:
    """See `Backend.score`. `last` is the output of the step's layers."""
    device = last.device
    for part in scored_slices(runs, max_scored):
        rows = torch.tensor(scored_indices(part), dtype=torch.int64).to(device)
        of_part = None if lora is None else lora.with_head(part)
        yield Scored(part, transformer.logits(last, rows, of_part).float())


def hidden_slices(
    transformer: Transformer,
    last: Step,
    lora: LoraStep | None,
    runs: Sequence[ScoredRun],
    max_tokens: int,
    arena: Arena,
) -> Iterator[Hidden]:
    """See `Backend.pool`. `last` is the output of the step's layers."""
    for part in scored_slices(runs, max_tokens):
        rows = torch.tensor(scored_indices(part), dtype=torch.int64).to(last.device)
        of_part = None if lora is None else lora.with_head(part)
        heads = arena.heads_of(run.sequence.slot for run in part)
        yield Hidden(part, transformer.hidden(last, rows, of_part), heads)


class TorchInputs(NamedTuple):
    """One step's inputs. `lora` is None when no row has an adapter; `runs` are scored, and the
    hidden states of `pooled` ones returned."""

    step: StepInputs
    lora: LoraStep | None
    returns_experts: bool
    runs: tuple[ScoredRun, ...] = ()
    pooled: tuple[ScoredRun, ...] = ()


class TorchBackend(AdapterMemory):
    """A `Backend` without memory of its own: each step allocates its workspace."""

    kernels = "torch"
    workspace_bytes = 0

    def __init__(
        self,
        transformer: Transformer,
        kv_caches: KVCaches,
        arena: Arena,
        targets: AppliedTargets,
        max_scored: int,
        reload: Reload | None = None,
        states: RecurrentStates | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(arena)
        self._exchange = exchange
        self._max_scored = max_scored
        self.num_pages, self._page_size = kv_caches.num_pages, kv_caches.page_size
        self.num_states = 0 if states is None else states.num_states
        self.num_lora_steps = 0
        self.num_eager_steps = 0
        self._decoder = transformer.description
        self.transformer: Transformer | None = transformer
        self.kv_caches: KVCaches | None = kv_caches
        self._states = states
        self._targets = targets
        self._last: Step | None = None
        self._reload = reload
        self.pictures = None if reload is None else reload.pictures(arena)

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv_caches is None else self.kv_caches.num_bytes

    @property
    def recurrent_bytes(self) -> int:
        return 0 if self._states is None else self._states.num_bytes

    def lora_launches(self, contents: LoraContents) -> Mapping[str, int]:
        """Two products for each target: of the inputs, or of the rows of an embedding's A, and of
        the shrunk inputs. Weights are looked up, or multiplied with, once."""
        groups = self._targets.groups.items()
        counts = {name: 2 * len(contents.targets & {*group.targets}) for name, group in groups}
        counts |= dict.fromkeys(self._targets.names_of(contents.weights), 1)
        return {name: count for name, count in counts.items() if count}

    @property
    def weights_bytes(self) -> int:
        of_tower = 0 if self.pictures is None else self.pictures.weights_bytes
        return of_tower + (0 if self.transformer is None else self.transformer.weights.num_bytes)

    def _make_magnitudes(self) -> Magnitudes:
        assert self.transformer is not None, "the weights are freed"
        tower = None if self.pictures is None else self.pictures.weights
        weights, part = self.transformer.weights, self._decoder
        has_stages = part.stage is not None
        return Magnitudes(
            weights, self.arena, part.rank, self._exchange, has_stages=has_stages, tower=tower
        )

    def place_threads(self, processors: Sequence[Sequence[int]]) -> None:
        """Leaves torch's threads to the system."""

    def prepare(self, batch: Batch) -> TorchInputs:
        found, device = self._decoder.pictures, self.arena.device
        places = None if found is None else found.positions
        placed = () if self.pictures is None else self.pictures.placed(batch.rows)
        mutual = mutual_of(found, (each.tokens for each in placed))
        step = StepInputs.build(batch, self._page_size, device, self._states, places, mutual)
        if placed:
            step = replace(step, pictures=placed)
        lora = plan_lora(batch.rows, self.arena, self._targets, self._exchange)
        self.num_lora_steps += lora is not None
        runs, pooled = tuple(scored_runs(batch.rows)), tuple(pooled_runs(batch.rows))
        return TorchInputs(step, lora, returns_experts(batch, self._decoder), runs, pooled)

    def forward(self, inputs: TorchInputs) -> Logits:
        step, lora, has_choices, runs, pooled = inputs
        assert self.transformer is not None, "the weights are freed"
        assert self.kv_caches is not None, "the pages are freed"
        choices = None
        if has_choices:
            choices = empty_choices(self._decoder, len(step.token_ids), self.arena.device)
        if runs or pooled:
            self._last = self.transformer.layers(step, self.kv_caches, lora, choices)
            logits = self.transformer.logits(self._last, step.logit_rows, lora)
        else:
            logits = self.transformer.forward(step, self.kv_caches, lora, choices)
        gather_choices(choices, self._decoder, self._exchange)
        return Logits(logits.float(), experts=choices)

    def follow(self, data: StepData) -> None:
        """Computes this rank's part of a step of the first rank, which has the logits."""
        assert self.transformer is not None, "the weights are freed"
        assert self.kv_caches is not None, "the pages are freed"
        device = self.arena.device
        starts, counts = (np.asarray(each, np.int64) for each in (data.starts, data.counts))
        plan = None
        if self._states is not None:
            self._states.copy(data.state_copies)
            plan = RecurrentPlan(self._states, tuple(data.segments))
        mutual = mutual_of(self._decoder.pictures, data.pictures)
        step = StepInputs.of(
            data.token_ids, starts, counts, data.page_ids, self._page_size, device, plan, mutual
        )
        step = self._with_pictures(step, data)
        arena, targets = self.arena, self._targets
        lora = plan_runs(data.runs, data.last_slots, arena, targets, self._exchange)
        choices = None
        if data.returns_experts:
            choices = empty_choices(self._decoder, len(data.token_ids), device)
        last = self.transformer.layers(step, self.kv_caches, lora, choices)
        self.transformer.logits(last, step.logit_rows, lora)
        gather_choices(choices, self._decoder, self._exchange)
        for indices, runs in data.scored:
            rows = torch.tensor(indices, dtype=torch.int64).to(device)
            self.transformer.logits(last, rows, None if lora is None else lora.with_head_of(runs))

    def _with_pictures(self, step: StepInputs, data: StepData) -> StepInputs:
        """Returns the inputs of another rank's step with the facts of its pictures."""
        decoder, device, exchange = self._decoder, self.arena.device, self._exchange
        if decoder.pictures is not None and decoder.pictures.positions is not None:
            along = step.positions.expand(NUM_AXES, -1)
            if data.axes is not None:
                along = torch.tensor(data.axes, device=device)
            step = replace(step, positions=along)
        placed = take_in(data.pictures, decoder, exchange, self.arena.layout.dtype, device)
        return replace(step, pictures=placed)

    def score(self, inputs: TorchInputs) -> Iterator[Scored]:
        last = self._last
        if not inputs.pooled:
            self._last = None
        if inputs.runs:
            assert last is not None, "the step is computed"
            assert self.transformer is not None
            yield from score_slices(
                self.transformer, last, inputs.lora, inputs.runs, self._max_scored
            )

    def pool(self, inputs: TorchInputs) -> Iterator[Hidden]:
        if inputs.pooled:
            last, self._last = self._last, None
            assert last is not None, "the step is computed"
            assert self.transformer is not None
            yield from hidden_slices(
                self.transformer, last, inputs.lora, inputs.pooled, self._max_scored, self.arena
            )

    def keep_part(self, row: BatchRow) -> None:
        if self._states is not None:
            self._states.keep_part(row)

    def use_idle_time(self) -> bool:
        """There is nothing to prepare."""
        return False

    wants_idle_time = False

    def placed(self, inputs: TorchInputs) -> Sequence[PlacedRows]:
        return inputs.step.pictures

    def plan(self, inputs: TorchInputs) -> Sequence[int]:
        """Steps are computed in one way."""
        return ()

    def free_unused(self) -> None:
        """Reserves nothing: each step's memory goes back to the system."""

    @property
    def _held_bytes(self) -> int:
        of_pictures = 0 if self.pictures is None else self.pictures.num_bytes
        return self.kv_bytes + self.recurrent_bytes + self.weights_bytes + of_pictures

    def free_memory(self, *, weights: bool) -> int:
        held_bytes = self._held_bytes
        self._last = None  # which has all of it
        self.kv_caches = self._states = None
        if self.pictures is not None:
            self.pictures.free(weights=weights)
        if weights:
            self._magnitudes = None
            self.transformer = None
        return held_bytes - self._held_bytes

    def _make_transformer(self, weights: ModelWeights[TorchLinear]) -> Transformer:
        num_added = self._targets.max_added_tokens
        return Transformer(self._decoder, weights, self._exchange, num_added)

    def restore(self) -> None:
        assert self._reload is not None
        if self.transformer is None:
            weights = self._reload.weights()
            self.transformer = self._make_transformer(weights)
        self.kv_caches = self.kv_caches or self._reload.pages()
        self._states = self._states or self._reload.states()
        if self.pictures is not None:
            self.pictures.restore()


class TorchFactory:
    """A `BackendFactory` for any CPU and every dtype."""

    name = "torch"
    features = COMPUTED | OF_ENCODERS | OF_PICTURES | OF_RANKS | OF_STAGES
    disabled_by = ""
    has_device_memory = False
    profiler_device = None

    def host_registrar(self, config: EngineConfig) -> None:
        """Returns None: a copy on the host delays a step, wherever its source lies."""

    def supports(self, config: EngineConfig) -> bool:
        return torch.device(config.device).type == "cpu"

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        is_chosen = not config.native_kernels
        num_ranks = config.num_computing
        of_threads = thread_notes(num_threads, usable_cores(), usable_cpus(), num_ranks)
        faults = () if is_chosen or config.dtype == "float16" else choose(None).faults
        if not (is_chosen or faults or config.dtype == "float16"):
            return of_threads  # nothing else computes the model
        notes = torch_notes(config.dtype, is_chosen=is_chosen, faults=faults)
        return [*notes, *of_threads]

    def weight_kernels(self, form: WeightFormat) -> str:
        return implementation(form, "cpu")

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        dtype = getattr(torch, config.dtype)
        needs = MemoryNeeds(
            weights_bytes(decoder, dtype),
            step_bytes(config, decoder),
            recurrent_bytes=states_bytes(config, decoder),
        )
        return needs.plus(picture_needs(config, decoder))

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return None

    @property
    def instructions(self) -> str:
        return str(torch.backends.cpu.get_cpu_capability())

    def open_meeting(
        self, count: int, num_threads: int, timeout_s: float, num_stages: int = 1, address: str = ""
    ) -> Meeting:
        return GlooMeeting(count, timeout_s, address or LOCAL, num_stages)

    def build(
        self, config: EngineConfig, decoder: Decoder, layout: ModelLayout
    ) -> Backend[TorchInputs]:
        return self._build(config, decoder, layout, None)

    def build_rank(
        self, config: EngineConfig, decoder: Decoder, layout: ModelLayout, exchange: Exchange
    ) -> RankBackend[TorchInputs]:
        return self._build(config, decoder, layout, exchange)

    def _build(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
        exchange: Exchange | None,
    ) -> TorchBackend:
        reload = make_reload(config, decoder, TorchProjections)
        kv_caches = reload.pages()
        arena = allocate_arena(config, layout)
        targets = applied_targets(layout, config.lora_targets, config.max_added_tokens)
        transformer = Transformer(decoder, reload.weights(), exchange, config.max_added_tokens)
        return TorchBackend(
            transformer,
            kv_caches,
            arena,
            targets,
            config.max_sequences,
            reload,
            reload.states(),
            exchange,
        )
