"""Adapters of a step, operation by operation in torch, and by kernels on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.prompt_runs import ScoredRun
from inference_svc.backends.slot_runs import (
    SlotRuns,
    last_slots,
    scored_slot_runs,
    slot_runs,
)
from inference_svc.core import BASE_SLOT, BatchRow
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD
from inference_svc.model.layers import TorchLinear
from inference_svc.model.sharding.exchange import Exchange
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
        """Returns this, to compute the last norm, and the logits, of the tokens of these runs."""
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
        table, places = self.arena.table, self.targets.weights
        weight, bias = places.get(module), places.get(f"{module}.bias")
        if weight is not None and weight in plan.weights:
            found = token_weights(norm.weight, table, plan, weight, norm.offset)
            norm = norm._replace(weight=found)
        if norm.bias is not None and bias is not None and bias in plan.weights:
            norm = norm._replace(bias=token_weights(norm.bias, table, plan, bias))
        return norm


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


@dataclass(frozen=True, slots=True)
class TileLora(LoraStep):
    """Adds the adapter at `slot` to the outputs of a tower and its connector: every row of theirs
    has it, so that `plan`, of one row, says all that it changes. `targets` are the pictures' ones,
    of which it may replace whole weights. With `contents`, of no adapter, kernels are launched for
    these, and change nothing."""

    slot: int = BASE_SLOT
    contents: LoraContents | None = None
    _plans: dict[int, LoraPlan] = field(default_factory=dict)

    def add(self, group: str, x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        found, arena = self.targets.groups.get(group), self.arena
        if found is None:
            return
        plan = self._plan_of(len(x))
        for target, start, size in zip(
            found.targets, found.out_offsets, found.out_features, strict=True
        ):
            weight = self.targets.weights.get(arena.layout.targets[target].name)
            if weight is not None and weight in plan.weights:
                own = out[:, start : start + size]
                own_bias = None if bias is None else bias[start : start + size]
                replace_logits(own, x, arena.table, plan, weight, size, own_bias)
        add_lora(out, x, arena.flat, arena.table, plan, found, bias)

    def norm(self, module: str, norm: NormWeight, *, logits_only: bool = False) -> NormWeight:
        weight = self._own(module, norm.weight, norm.offset)
        bias = norm.bias if norm.bias is None else self._own(f"{module}.bias", norm.bias)
        return norm._replace(weight=weight, bias=bias)

    def _own(self, name: str, base: Tensor, offset: float = 0.0) -> Tensor:
        """Returns the adapter's own vector, [size], or the base's."""
        place = self.targets.weights.get(name)
        if place is None or place not in self.plan.weights:
            return base
        return token_weights(base, self.arena.table, self.plan, place, offset)[0]

    def _plan_of(self, num_rows: int) -> LoraPlan:
        """Returns the plan of so many rows."""
        if num_rows not in self._plans:
            plan = _plan_rows(self.slot, num_rows, self.arena)
            if self.contents is not None:
                plan = _launching(plan, self.contents)
            self._plans[num_rows] = plan
        return self._plans[num_rows]


def plan_tile(slot: int, arena: Arena, targets: AppliedTargets) -> TileLora | None:
    """Returns the adapter's changes of a tower's work; None for the base."""
    if slot == BASE_SLOT:
        return None
    plan = _plan_rows(slot, 1, arena)
    return TileLora(arena, targets, plan, plan, slot=slot)


def launch_tile(contents: LoraContents, arena: Arena, targets: AppliedTargets) -> TileLora:
    """Returns changes of no adapter, for which a device launches the kernels of these contents."""
    plan = _launching(_plan_rows(BASE_SLOT, 1, arena), contents)
    return TileLora(arena, targets, plan, plan, contents=contents)


def _plan_rows(slot: int, num_rows: int, arena: Arena) -> LoraPlan:
    return LoraPlan.build([slot], [num_rows], arena.table, arena.device)


def _launching(plan: LoraPlan, contents: LoraContents) -> LoraPlan:
    """Returns a plan of the base's rows with an item of nothing."""
    is_long = plan.num_tokens > 1
    items = plan.items.new_zeros(1, plan.items.shape[1])
    return replace(
        plan, **contents._asdict(), has_tiles=is_long, num_rows=int(not is_long), items=items
    )


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
