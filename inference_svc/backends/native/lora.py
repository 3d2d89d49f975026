"""Adapters for programs of native operations: built once, planned anew every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from inference_svc.adapters.layout import EMBEDDING
from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.native.adapter_ops import ADDED_TOKENS, GroupedOp, head_norms
from inference_svc.backends.native.exchange import ProgramExchange
from inference_svc.backends.slot_runs import SlotRuns, last_slots, slot_runs
from inference_svc.core import BASE_SLOT, BatchRow
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD
from inference_svc.model.operations import Rows
from kernels.elementwise import NormWeight
from kernels.experts import Pairs
from kernels.host_memory import allocate_host
from kernels.lora.native import NativeLora, NativeLoraPlan
from kernels.lora.plan import LoraContents
from kernels.native.library import NativeOp
from kernels.replaced.native import replace_embeddings_op, replace_logits_op, token_weights_op

MAX_EXPERTS_TARGETS = 2
"""The maximum number of targets of a group of experts."""
MAX_KNOWN = 16
"""The maximum number of sets of changed groups that are distinguished: each is a program."""


class NativeLoraOps:
    """Operations for steps of up to `max_tokens` tokens, each of which has up to `max_chosen`
    experts, and `max_outputs` outputs; see `adapter_ops.AdapterOps`, also for shapes. Groups that
    are not among the targets' have none. `exchange` is there for groups that ranks share."""

    def __init__(
        self,
        arena: Arena,
        targets: AppliedTargets,
        max_tokens: int,
        max_outputs: int,
        max_chosen: int = 0,
        exchange: ProgramExchange | None = None,
    ) -> None:
        self._targets, self._exchange = targets, exchange
        self._groups = groups = targets.groups
        self._table = arena.table
        self._rows, self._weight_rows = arena.table.rows.numpy(), arena.table.weight_rows.numpy()
        self._plan = NativeLoraPlan(max_tokens, table=arena.table)
        self._logits_plan = NativeLoraPlan(max_outputs, table=arena.table)
        most = max((len(group.targets) for group in groups.values()), default=1)
        self._lora = NativeLora.create(arena.table, self._plan, most)
        self._logits_lora = NativeLora.create(arena.table, self._logits_plan, most)
        self._of_rows = {Rows.TOKENS: self._lora, Rows.LOGITS: self._logits_lora}
        num_pairs = max_tokens * max_chosen
        pairs = NativeLoraPlan(num_pairs, has_experts=True, table=arena.table)
        self._pairs_lora = NativeLora.create(arena.table, pairs, MAX_EXPERTS_TARGETS)
        self._token_weights: dict[tuple[str, int, int], Tensor] = {}
        weights = {place: _weight_group(name) for name, place in targets.weights.items()}
        names = (*groups, *dict.fromkeys(weights.values()), ADDED_TOKENS)
        self._names, self.every_group = names, frozenset(names)
        # Targets of no group, which no adapter here changes, are of one behind all groups.
        self._group_of_target = np.full(arena.table.num_targets, len(names), np.int64)
        for index, group in enumerate(groups.values()):
            self._group_of_target[list(group.targets)] = index
        self._group_of_weight = np.full(arena.table.num_weights, len(names), np.int64)
        for place, name in weights.items():
            self._group_of_weight[place] = names.index(name)
        self._known: dict[bytes, frozenset[str]] = {}
        self._planned: tuple[SlotRuns, list[int], list[int]] | None = None

    @property
    def workspace_bytes(self) -> int:
        created = (*self._of_rows.values(), self._pairs_lora)
        shrunk = sum(each.shrunk.nbytes + each.plan.num_bytes for each in created)
        return shrunk + sum(each.nbytes for each in self._token_weights.values())

    def plan(self, rows: Sequence[BatchRow]) -> frozenset[str]:
        """Plans the step's rows. Returns the groups that any of their adapters changes, or all
        groups if too many other sets have been seen."""
        if all(row.slot == BASE_SLOT for row in rows):
            return frozenset()
        sequences, starts, counts, _ = zip(*rows, strict=True)
        runs = slot_runs(sequences, starts, counts)
        return self.plan_runs(runs, last_slots(sequences, starts, counts))

    def plan_runs(self, runs: SlotRuns, last: list[int]) -> frozenset[str]:
        """Plans a step by its runs of tokens, and the slots of the rows' last tokens; see
        `plan`."""
        used = set(runs.slots) - {BASE_SLOT}
        if not used:
            return frozenset()
        sizes = [len(self._table.part_slots(slot)) for slot in runs.slots]
        current = runs, sizes, last
        if current != self._planned:  # most steps equal the one before
            self._planned = None  # a half filled plan is none
            self._plan.fill(*runs)
            self._logits_plan.fill(current[-1])
            self._planned = current
        return self._groups_of(used)

    def plan_head(self, runs: SlotRuns) -> None:
        """Plans other tokens than the last ones of rows, to compute logits of."""
        self._planned = None
        self._logits_plan.fill(*runs)

    def _groups_of(self, used: set[int]) -> frozenset[str]:
        parts = [part for slot in used for part in self._table.part_slots(slot)]
        targets, weights = self._rows[parts], self._weight_rows[parts]
        changed = np.zeros(len(self._names) + 1, np.bool_)
        # Existing targets have a rank, or more than no granule; rows have a number.
        changed[self._group_of_target[targets[:, 3:].any(axis=(0, 1))]] = True
        changed[self._group_of_weight[weights.any(axis=(0, 1))]] = True
        changed[-2] |= weights[:, -1].any() and self._targets.max_added_tokens > 0
        changed = changed[:-1]
        key = changed.tobytes()
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                return self.every_group
            self._known[key] = self._names_of(changed)
        return self._known[key]

    def groups_of(self, contents: LoraContents) -> frozenset[str]:
        """Returns the result that `plan` would have now for rows of one adapter with this
        content."""
        changed = np.zeros(len(self._names) + 1, np.bool_)
        changed[self._group_of_target[list(contents.targets)]] = True
        changed[self._group_of_weight[list(contents.weights)]] = True
        changed[-2] |= contents.has_rows and self._targets.max_added_tokens > 0
        changed = changed[:-1]
        if changed.tobytes() not in self._known and len(self._known) >= MAX_KNOWN:
            return self.every_group
        return self._names_of(changed)

    def by_weight(self, counts: Mapping[str, int], contents: LoraContents) -> dict[str, int]:
        """Returns counts of operations by group with each weight that one adapter replaces by its
        name: norms of queries, keys and values are one group, of an operation each, as are the
        weight and the bias of another norm."""
        found = dict(counts)
        names = set(self._targets.names_of(contents.weights))
        for name in names:
            group = _weight_group(name)
            if group != name:
                if group not in names:
                    found.pop(group, None)
                found[name] = 1
        return found

    def _names_of(self, changed: np.ndarray) -> frozenset[str]:
        return frozenset(name for name, is_in in zip(self._names, changed, strict=True) if is_in)

    def add(
        self, group: str, x: Tensor, out: Tensor, bias: Tensor | None, rows: Rows
    ) -> Iterator[GroupedOp]:
        if group in self._groups:
            for op in self._add_ops(self._of_rows[rows], group, x, out, bias):
                yield group, op

    def add_experts(
        self, group: str, x: Tensor, out: Tensor, pairs: Pairs, rows: Rows
    ) -> list[NativeOp]:
        if group not in self._groups:
            return []
        tokens, lora = self._of_rows[rows].plan, self._pairs_lora
        plan_op = lora.plan.of_pairs_op(tokens, pairs.tokens, pairs.starts)
        return [plan_op, *self._add_ops(lora, group, x, out, None)]

    def _add_ops(
        self, lora: NativeLora, name: str, x: Tensor, out: Tensor, bias: Tensor | None
    ) -> list[NativeOp]:
        """Builds the operations of a group, of whose inputs this rank may have a part."""
        group, first = self._groups[name], self._targets.shared.get(name)
        if first is None:
            return lora.add_ops(group, x, out, bias)
        assert self._exchange is not None
        own = x.narrow(1, first, group.in_features)
        return lora.add_ops(group, own, out, bias, partial(self._exchange.shrunk_op, lora))

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        if EMBEDDING not in self._groups:
            return []
        (target,) = self._groups[EMBEDDING].targets
        return self._lora.add_embedding_ops(target, token_ids, out)

    def replace_embeddings(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        weight = self._targets.weights.get(EMBED_TOKENS)
        if weight is None:
            return []
        return [replace_embeddings_op(token_ids, out, self._table, self._plan, weight)]

    def replace_logits(self, x: Tensor, out: Tensor) -> list[NativeOp]:
        weight, vocab_size = self._targets.weights.get(LM_HEAD), self._targets.vocab_size
        if weight is None:
            return []
        return [replace_logits_op(x, out, self._table, self._logits_plan, weight, vocab_size)]

    def token_weights(
        self, module: str, norm: NormWeight, rows: Rows
    ) -> tuple[list[NativeOp], NormWeight] | None:
        plan = self._of_rows[rows].plan
        ops: list[NativeOp] = []

        def own(name: str, values: Tensor, offset: float) -> Tensor:
            index = self._targets.weights.get(name)
            if index is None:
                return values
            key = (norm_role(name), plan.max_tokens, values.nbytes)
            if key not in self._token_weights:  # norms that come one after the other share memory
                made = allocate_host(plan.max_tokens * values.nbytes).view(values.dtype)
                self._token_weights[key] = made.view(plan.max_tokens, -1)
            out = self._token_weights[key]
            ops.append(token_weights_op(values, out, self._table, plan, index, offset))
            return out

        changed = norm._replace(weight=own(module, norm.weight, norm.offset))
        if norm.bias is not None:
            changed = changed._replace(bias=own(f"{module}{BIAS}", norm.bias, 0.0))
        return (ops, changed) if ops else None


BIAS = ".bias"
_HEAD_NORMS = ("q_norm", "k_norm", "v_norm", "query_layernorm", "key_layernorm")
"""Modules of norms that are needed at the same time, by the names that architectures give them."""


def norm_role(module: str) -> str:
    """Returns the common name of norms that are not needed at the same time."""
    if module.endswith(BIAS):
        return f"{norm_role(module.removesuffix(BIAS))}{BIAS}"
    last = module.rpartition(".")[2]
    return last if last in _HEAD_NORMS else "norm"


def _weight_group(name: str) -> str:
    """Returns the group of a weight of the base: norms of queries, keys and values of a layer are
    one operation, and so are a norm's weight and its bias."""
    name = name.removesuffix(BIAS)
    return head_norms(name) if name.rpartition(".")[2] in _HEAD_NORMS else name
