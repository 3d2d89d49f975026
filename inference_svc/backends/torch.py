"""A step computed operation by operation in torch: the definition that all backends must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference_svc.adapters.layout import EMBEDDING, HEAD, ModelLayout
from inference_svc.adapters.targets import AppliedTargets, applied_targets
from inference_svc.backends.adapter_memory import AdapterMemory, allocate_arena
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import (
    Backend,
    DeviceMemory,
    Logits,
    MemoryNeeds,
    RankBackend,
    Reload,
    Scored,
    empty_choices,
    make_reload,
    returns_experts,
    states_bytes,
)
from inference_svc.backends.exchange import GlooMeeting, Meeting
from inference_svc.backends.magnitudes import Magnitudes
from inference_svc.backends.slot_runs import (
    SlotRuns,
    last_slots,
    scored_indices,
    scored_slot_runs,
    slot_runs,
)
from inference_svc.backends.speed_notes import thread_notes, torch_notes
from inference_svc.backends.step_data import StepData
from inference_svc.backends.torch_needs import step_bytes
from inference_svc.core import (
    BASE_SLOT,
    Batch,
    BatchRow,
    EngineConfig,
    ScoredRun,
    scored_runs,
    scored_slices,
)
from inference_svc.host.cpus import usable_cores, usable_cpus
from inference_svc.model.checkpoint.parameters import weights_bytes
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD, Decoder
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchLinear, TorchProjections
from inference_svc.model.recurrent_states import RecurrentPlan, RecurrentStates
from inference_svc.model.sharding.exchange import Exchange
from inference_svc.model.step import Step
from inference_svc.model.transformer import COMPUTED, OF_RANKS, Transformer
from kernels.elementwise import NormWeight
from kernels.elementwise.addend import Addend
from kernels.experts import Pairs
from kernels.lora import (
    LoraGroup,
    LoraPlan,
    TokenOrder,
    add_lora,
    add_lora_embedding,
    add_lora_experts,
    begin_lora,
    compute_addend,
    end_lora,
    order_tokens,
    plan_pairs,
)
from kernels.lora.plan import LoraContents
from kernels.native.library import choose
from kernels.quantised import WeightFormat, implementation
from kernels.replaced import replace_embeddings, replace_logits, token_weights


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Adds adapters to the base's outputs; see `model.lora.Lora`, also for shapes. Groups that are
    not in `targets` are passed over: no adapter that the server accepts changes them.

    `plan` covers all tokens of the step, `head_plan` the ones that get logits. `may_be_beside`: the
    step is recorded, and its adapters have nothing but A and B. `exchange` is there for groups that
    ranks share.
    """

    arena: Arena
    targets: AppliedTargets
    plan: LoraPlan
    head_plan: LoraPlan
    may_be_beside: bool = False
    exchange: Exchange | None = None

    @property
    def num_added_tokens(self) -> int:
        """See `model.lora.Lora`. Of adapters that have rows it is not known which these are."""
        return self.targets.max_added_tokens if self.plan.has_rows else 0

    def with_head(self, runs: Sequence[ScoredRun]) -> LoraStep:
        """Returns this, to compute the logits that score these runs."""
        return self.with_head_of(scored_slot_runs(runs))

    def with_head_of(self, runs: SlotRuns) -> LoraStep:
        """Returns this, to compute logits with these slots."""
        table, device = self.arena.table, self.arena.device
        return replace(self, head_plan=LoraPlan.build(*runs, table, device))

    def add(self, group: str, x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        if group in self.targets.groups:
            arena, found = self.arena, self.targets.groups[group]
            x, sum_ranks = _shared(group, x, self.targets, self.exchange)
            add_lora(out, x, arena.flat, arena.table, self.plan, found, bias, sum_ranks)

    def beside(self, group: str, x: Tensor, linear: TorchLinear) -> tuple[Tensor, Addend] | None:
        found, arena = self._group_beside(group, linear.out_features), self.arena
        if found is None:
            return None
        values = x.new_empty(len(x), found.out_end)
        compute, beside = arena.streams.compute, arena.streams.beside
        beside.wait_stream(compute)
        try:
            with beside.entered():
                compute_addend(values, x, arena.flat, arena.table, self.plan, found)
            out = linear(x)
        finally:
            compute.wait_stream(beside)
        return out, Addend(values, self.plan.token_slots)

    def before_sum(self, group: str, x: Tensor, linear: TorchLinear) -> Tensor | None:
        """Runs A's product beside the base's. An addend would take a kernel more before the sum."""
        found, arena = self._group_beside(group, linear.out_features), self.arena
        if found is None:
            return None
        compute, beside = arena.streams.compute, arena.streams.beside
        beside.wait_stream(compute)
        try:
            with beside.entered():
                shrunk = begin_lora(x, arena.flat, arena.table, self.plan, found)
            out = linear(x)
        finally:
            compute.wait_stream(beside)
        end_lora(out, shrunk, arena.flat, arena.table, self.plan, found)
        return out

    def _group_beside(self, name: str, num_outputs: int) -> LoraGroup | None:
        """Returns a group that may run beside its product: its targets cover all outputs, and ranks
        do not share it, whose sums keep to one order."""
        group = self.targets.groups.get(name)
        if group is None or name in self.targets.shared or not self.may_be_beside:
            return None
        is_few = self.plan.num_tokens <= group.most_rows_beside(self.arena.flat.itemsize)
        return group if is_few and sum(group.out_features) == num_outputs else None

    def order_tokens(self) -> TokenOrder | None:
        changes_experts = not self.plan.targets.isdisjoint(self.targets.of_experts)
        return order_tokens(self.plan) if changes_experts else None

    def of_pairs(self, order: TokenOrder, experts: Tensor, pairs: Pairs) -> ExpertsLoraStep:
        plan = plan_pairs(self.plan, order, experts, pairs)
        return ExpertsLoraStep(self.arena, self.targets, plan, self.exchange)

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> None:
        arena, weight = self.arena, self.targets.weights.get(EMBED_TOKENS)
        if weight is not None and weight in self.plan.weights:
            replace_embeddings(out, token_ids, arena.table, self.plan, weight)
        if EMBEDDING in self.targets.groups:
            (target,) = self.targets.groups[EMBEDDING].targets
            add_lora_embedding(out, token_ids, arena.flat, arena.table, self.plan, target)

    def add_head(self, x: Tensor, out: Tensor) -> None:
        arena, weight = self.arena, self.targets.weights.get(LM_HEAD)
        if weight is not None and weight in self.head_plan.weights:
            vocab_size = self.targets.vocab_size
            replace_logits(out, x, arena.table, self.head_plan, weight, vocab_size)
        if HEAD in self.targets.groups:
            group = self.targets.groups[HEAD]
            add_lora(out, x, arena.flat, arena.table, self.head_plan, group)

    def norm(self, module: str, norm: NormWeight, *, logits_only: bool = False) -> NormWeight:
        plan = self.head_plan if logits_only else self.plan
        weight = self.targets.weights.get(module)
        if weight is None or weight not in plan.weights:
            return norm
        weights = token_weights(norm.weight, self.arena.table, plan, weight, norm.offset)
        return norm._replace(weight=weights)


@dataclass(frozen=True, slots=True)
class ExpertsLoraStep:
    """Adds adapters to the experts' outputs for a layer's pairs; see `model.lora.ExpertsLora`,
    also for shapes."""

    arena: Arena
    targets: AppliedTargets
    plan: LoraPlan
    exchange: Exchange | None = None

    def add(self, group: str, x: Tensor, out: Tensor) -> None:
        if group in self.targets.groups:
            arena, found = self.arena, self.targets.groups[group]
            x, sum_ranks = _shared(group, x, self.targets, self.exchange)
            add_lora_experts(out, x, arena.flat, arena.table, self.plan, found, sum_ranks)


def _shared(
    group: str, x: Tensor, targets: AppliedTargets, exchange: Exchange | None
) -> tuple[Tensor, Callable[[Tensor], None] | None]:
    """Returns the inputs of a group's A here, and the sum over ranks of its products: all, and
    none, unless ranks share the group."""
    first = targets.shared.get(group)
    if first is None:
        return x, None
    assert exchange is not None
    return x.narrow(1, first, targets.groups[group].in_features), exchange.sum


def plan_lora(
    rows: Sequence[BatchRow],
    arena: Arena,
    targets: AppliedTargets,
    exchange: Exchange | None = None,
) -> LoraStep | None:
    """Returns None when no row of the batch has an adapter: the LoRA path is not entered."""
    if all(row.slot == BASE_SLOT for row in rows):
        return None
    sequences, starts, counts, _ = zip(*rows, strict=True)
    runs, last = slot_runs(sequences, starts, counts), last_slots(sequences, starts, counts)
    return plan_runs(runs, last, arena, targets, exchange)


def plan_runs(
    runs: SlotRuns,
    last: Sequence[int],
    arena: Arena,
    targets: AppliedTargets,
    exchange: Exchange | None = None,
) -> LoraStep | None:
    """Returns the adapters of runs of tokens, and of each row's last token; None if there are
    none."""
    if max(runs.slots) == BASE_SLOT:
        return None
    plan = LoraPlan.build(*runs, arena.table, arena.device)
    head_plan = LoraPlan.build(list(last), [1] * len(last), arena.table, arena.device)
    return LoraStep(arena, targets, plan, head_plan, exchange=exchange)


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


class TorchInputs(NamedTuple):
    """One step's inputs. `lora` is None when no row has an adapter; `runs` are scored."""

    step: StepInputs
    lora: LoraStep | None
    returns_experts: bool
    runs: tuple[ScoredRun, ...] = ()


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
        return 0 if self.transformer is None else self.transformer.weights.num_bytes

    def _make_magnitudes(self) -> Magnitudes:
        assert self.transformer is not None, "the weights are freed"
        weights, rank = self.transformer.weights, self._decoder.rank
        return Magnitudes(weights, self.arena, rank, self._exchange)

    def place_threads(self, processors: Sequence[Sequence[int]]) -> None:
        """Leaves torch's threads to the system."""

    def prepare(self, batch: Batch) -> TorchInputs:
        step = StepInputs.build(batch, self._page_size, self.arena.device, self._states)
        lora = plan_lora(batch.rows, self.arena, self._targets, self._exchange)
        self.num_lora_steps += lora is not None
        runs = tuple(scored_runs(batch.rows))
        return TorchInputs(step, lora, returns_experts(batch, self._decoder), runs)

    def forward(self, inputs: TorchInputs) -> Logits:
        step, lora, has_choices, runs = inputs
        assert self.transformer is not None, "the weights are freed"
        assert self.kv_caches is not None, "the pages are freed"
        choices = None
        if has_choices:
            choices = empty_choices(self._decoder, len(step.token_ids), self.arena.device)
        if runs:
            self._last = self.transformer.layers(step, self.kv_caches, lora, choices)
            logits = self.transformer.logits(self._last, step.logit_rows, lora)
        else:
            logits = self.transformer.forward(step, self.kv_caches, lora, choices)
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
        step = StepInputs.of(
            data.token_ids, starts, counts, data.page_ids, self._page_size, device, plan
        )
        arena, targets = self.arena, self._targets
        lora = plan_runs(data.runs, data.last_slots, arena, targets, self._exchange)
        last = self.transformer.layers(step, self.kv_caches, lora)
        self.transformer.logits(last, step.logit_rows, lora)
        for indices, runs in data.scored:
            rows = torch.tensor(indices, dtype=torch.int64).to(device)
            self.transformer.logits(last, rows, None if lora is None else lora.with_head_of(runs))

    def score(self, inputs: TorchInputs) -> Iterator[Scored]:
        last, self._last = self._last, None
        if inputs.runs:
            assert last is not None, "the step is computed"
            assert self.transformer is not None
            yield from score_slices(
                self.transformer, last, inputs.lora, inputs.runs, self._max_scored
            )

    def keep_part(self, row: BatchRow) -> None:
        if self._states is not None:
            self._states.keep_part(row)

    def use_idle_time(self) -> bool:
        """There is nothing to prepare."""
        return False

    wants_idle_time = False

    def plan(self, inputs: TorchInputs) -> Sequence[int]:
        """Steps are computed in one way."""
        return ()

    def free_unused(self) -> None:
        """Reserves nothing: each step's memory goes back to the system."""

    @property
    def _held_bytes(self) -> int:
        return self.kv_bytes + self.recurrent_bytes + self.weights_bytes

    def free_memory(self, *, weights: bool) -> int:
        held_bytes = self._held_bytes
        self._last = None  # which has all of it
        self.kv_caches = self._states = None
        if weights:
            self._magnitudes = None
            self.transformer = None
        return held_bytes - self._held_bytes

    def restore(self) -> None:
        assert self._reload is not None
        if self.transformer is None:
            weights = self._reload.weights()
            self.transformer = Transformer(self._decoder, weights, self._exchange)
        self.kv_caches = self.kv_caches or self._reload.pages()
        self._states = self._states or self._reload.states()


class TorchFactory:
    """A `BackendFactory` for any CPU and every dtype."""

    name = "torch"
    features = COMPUTED | OF_RANKS
    disabled_by = ""
    has_device_memory = False
    profiler_device = None

    def supports(self, config: EngineConfig) -> bool:
        return torch.device(config.device).type == "cpu"

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        is_chosen = not config.native_kernels
        num_ranks = len(config.local_ranks)
        of_threads = thread_notes(num_threads, usable_cores(), usable_cpus(), num_ranks)
        faults = () if is_chosen or config.dtype == "float16" else choose(None).faults
        notes = torch_notes(config.dtype, is_chosen=is_chosen, faults=faults)
        return [*notes, *of_threads]

    def weight_kernels(self, form: WeightFormat) -> str:
        return implementation(form, "cpu")

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        dtype = getattr(torch, config.dtype)
        return MemoryNeeds(
            weights_bytes(decoder, dtype),
            step_bytes(config, decoder),
            recurrent_bytes=states_bytes(config, decoder),
        )

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return None

    @property
    def instructions(self) -> str:
        return str(torch.backends.cpu.get_cpu_capability())

    def open_meeting(self, count: int, num_threads: int, timeout_s: float) -> Meeting:
        return GlooMeeting(count, timeout_s)

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
        transformer = Transformer(decoder, reload.weights(), exchange)
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
