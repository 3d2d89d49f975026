"""LoRA in C++ for programs: operations at fixed addresses over a plan that is refilled every step.

`add_lora`, `add_lora_experts` and `add_lora_embedding` run them once over tensors. See
`native/src/lora.h` for how the products are made; a token's numbers depend on its own row and
adapter only, bit for bit. 16-bit models are bf16 here, and their shrunk rows are rounded to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.native.library import Library, NativeOp, dtype_name
from kernels.ranks.memory import RankMemory, RanksArgs

from .plan import BASE_SLOT, TILE_TOKENS, LoraGroup, LoraPlan
from .rows import NO_EXPERT
from .table import MAX_PARTS, LoraTable

MAX_TARGETS = 8
"""Most targets of a group."""

_Targets = ctypes.c_int32 * MAX_TARGETS


class PlanArgs(ctypes.Structure):
    """A plan as operations of other packages take it, too."""

    _fields_ = (
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("max_tokens", ctypes.c_int64),
    )


class _PairsArgs(ctypes.Structure):
    _fields_ = (
        ("token_slots", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("num_parts", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("max_loras", ctypes.c_int64),
    )


class _LoraArgs(ctypes.Structure):
    _fields_ = (
        ("plan", PlanArgs),
        ("arena", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("table_targets", ctypes.c_int64),
        ("num_targets", ctypes.c_int64),
        ("targets", _Targets),
        ("columns", _Targets),
        ("widths", _Targets),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("max_rank", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("base_bias", ctypes.c_void_p),
    )


class _SumShrunkArgs(ctypes.Structure):
    _fields_ = (
        ("ranks", RanksArgs),
        ("plan", PlanArgs),
        ("y", ctypes.c_void_p),
        ("num_targets", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
    )


class NativeLoraPlan:
    """One step's tokens by slot, and with `has_experts` by expert, at fixed addresses; `fill` it
    before each run of a program.

    An item is up to TILE_TOKENS tokens of one slot and expert, wherever they stand in the batch:
    they share one read of A and B. `slots` is int32 [max_tokens], of which the first `num_tokens`
    (int32 [1]) are the step's, in batch order. Tokens of a mix, whose slot in `table` comes after
    the adapters', are in an item for each part. `max_pairs` is the most places of tokens in items.
    """

    def __init__(
        self, max_tokens: int, *, has_experts: bool = False, table: LoraTable | None = None
    ) -> None:
        self.max_tokens = max_tokens
        self.has_experts = has_experts
        self._mixes = table if table is not None and table.num_mixes else None
        self.max_pairs = max_tokens * (1 if self._mixes is None else MAX_PARTS)
        self._items = np.zeros((self.max_pairs, 5), np.int32)
        num_mixes = 0 if self._mixes is None else self._mixes.num_mixes
        self.num_parts = np.ones(num_mixes * MAX_PARTS, np.int32)
        self.tokens = np.zeros(self.max_pairs, np.int32)
        self._num_items = np.zeros(1, np.int32)
        self._keys = np.zeros(max_tokens if has_experts else 0, np.int64)
        self.slots = np.zeros(max_tokens, np.int32)
        self.num_tokens = np.zeros(1, np.int32)

    @staticmethod
    def bytes_of(max_tokens: int, num_mixes: int, *, has_experts: bool = False) -> int:
        """Returns the bytes of a plan of so many tokens, with a table of so many mixes."""
        max_pairs = max_tokens * (MAX_PARTS if num_mixes else 1)
        of_tokens = max_tokens * (4 + 8 * has_experts)
        return 24 * max_pairs + of_tokens + 4 * num_mixes * MAX_PARTS + 8

    @property
    def num_bytes(self) -> int:
        arrays = (self._items, self.num_parts, self.tokens, self._keys, self.slots)
        return sum(each.nbytes for each in (*arrays, self._num_items, self.num_tokens))

    def fill(
        self,
        row_slots: Sequence[int],
        row_lengths: Sequence[int] | None = None,
        row_experts: Sequence[int] | None = None,
    ) -> None:
        """The plan of rows in batch order: row i has `row_lengths[i]` tokens (or one) of
        `row_slots[i]`, which is -1 (base), a row of the table or a mix, and of `row_experts[i]`."""
        assert (row_experts is not None) == self.has_experts
        slots = np.asarray(row_slots, np.int32)
        experts = None if row_experts is None else np.asarray(row_experts, np.int32)
        if row_lengths is not None:
            slots = slots.repeat(row_lengths)
            experts = None if experts is None else experts.repeat(row_lengths)
        assert len(slots) <= self.max_tokens, f"{len(slots)} tokens of {self.max_tokens}"
        self.slots[: len(slots)] = slots
        self.num_tokens[0] = len(slots)
        of_mixes = None
        if self._mixes is not None and slots.max(initial=BASE_SLOT) >= self._mixes.max_loras:
            of_mixes, slots = slots, np.where(slots < self._mixes.max_loras, slots, BASE_SLOT)
        keys = slots if experts is None else _keys(slots, experts)
        order = keys.argsort(kind="stable")
        keys = keys[order]
        num_base = int(keys.searchsorted(0))
        keys, count = keys[num_base:], len(keys) - num_base
        tokens = self.tokens[:count]
        tokens[:] = order[num_base:]
        # Items begin where a key does and every TILE_TOKENS from there.
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        place = np.arange(count) - begins.repeat(np.diff(begins, append=count))
        firsts = np.flatnonzero(place % TILE_TOKENS == 0)
        items = self._items[: len(firsts)]
        items[:, 0] = firsts
        items[:, 1] = np.diff(firsts, append=count)
        items[:, 2] = slots[tokens[firsts]]
        items[:, 3] = NO_EXPERT if experts is None else experts[tokens[firsts]]
        items[:, 4] = 0
        self._num_items[0] = len(firsts)
        if of_mixes is not None:
            self._add_mixes(of_mixes, len(firsts), count)

    def _add_mixes(self, slots: NDArray[np.int32], num_items: int, num_pairs: int) -> None:
        """Adds items of mixes behind so many items and tokens of single adapters. The first of a
        mix says how many follow it, whose tokens are the same, and those say -1."""
        assert self._mixes is not None
        for slot in np.unique(slots[slots >= self._mixes.max_loras]).tolist():
            of_mix, parts = np.flatnonzero(slots == slot), self._mixes.part_slots(slot)
            self.num_parts[slot - self._mixes.max_loras] = len(parts)
            for start in range(0, len(of_mix), TILE_TOKENS):
                tokens = of_mix[start : start + TILE_TOKENS]
                for part in parts:
                    end = num_pairs + len(tokens)
                    self.tokens[num_pairs:end] = tokens
                    followers = len(parts) - 1 if part == slot else -1
                    self._items[num_items] = num_pairs, len(tokens), part, NO_EXPERT, followers
                    num_items, num_pairs = num_items + 1, end
        self._num_items[0] = num_items

    @property
    def items(self) -> NDArray[np.int32]:
        """The step's items, [num_items, 5]: first place in `tokens`, number of tokens, slot,
        expert, and how many items follow for the parts of a mix."""
        return self._items[: self._num_items[0]]

    def of_pairs_op(
        self, token_plan: NativeLoraPlan, pair_tokens: Tensor, starts: Tensor
    ) -> NativeOp:
        """Fills this plan of pairs within a program, for tokens that have an adapter in
        `token_plan`.

        pair_tokens: int64 [max_tokens], the token of each pair, in the order of experts; starts:
        int32 [experts + 1], the first pair of each, and the number of all.
        """
        assert self.has_experts
        assert pair_tokens.dtype == torch.int64
        assert starts.dtype == torch.int32
        assert len(pair_tokens) <= self.max_tokens
        assert (self._mixes is None) == (token_plan._mixes is None)
        args = _PairsArgs(
            token_slots=token_plan.slots.ctypes.data,
            tokens=pair_tokens.data_ptr(),
            starts=starts.data_ptr(),
            items=self._items.ctypes.data,
            num_items=self._num_items.ctypes.data,
            order=self.tokens.ctypes.data,
            keys=self._keys.ctypes.data,
            num_experts=len(starts) - 1,
        )
        if self._mixes is not None:
            args.num_parts = token_plan.num_parts.ctypes.data
            args.max_loras = self._mixes.max_loras
        return NativeOp("lora_pairs", args, (self, token_plan, pair_tokens, starts))

    @property
    def has_adapters(self) -> bool:
        return bool(self._num_items[0])

    def args(self) -> PlanArgs:
        return PlanArgs(
            self._items.ctypes.data,
            self._num_items.ctypes.data,
            self.tokens.ctypes.data,
            self.max_pairs,
        )


@dataclass(frozen=True, eq=False, slots=True)
class NativeLora:
    """Builds the operations of one plan. They share `shrunk`, so no two programs of it may run at
    the same time."""

    table: LoraTable
    plan: NativeLoraPlan
    shrunk: Tensor
    """Workspace `[targets of a group * max_pairs * rank]` of the arena's dtype; `native/src/lora.h`
    has its layout."""

    @classmethod
    def create(
        cls, table: LoraTable, plan: NativeLoraPlan, max_group_targets: int = 3
    ) -> NativeLora:
        size = max_group_targets * plan.max_pairs * _even(table.max_rank)
        return cls(table, plan, torch.empty(size, dtype=table.arena.dtype))

    @staticmethod
    def shrunk_bytes(
        max_group_targets: int, max_tokens: int, num_mixes: int, max_rank: int, itemsize: int
    ) -> int:
        """Returns the bytes of `shrunk` for plans of so many tokens."""
        max_pairs = max_tokens * (MAX_PARTS if num_mixes else 1)
        return max_group_targets * max_pairs * _even(max_rank) * itemsize

    def add_ops(
        self,
        group: LoraGroup,
        x: Tensor,
        out: Tensor,
        base_bias: Tensor | None = None,
        sum_ranks: Callable[[LoraGroup], NativeOp] | None = None,
    ) -> list[NativeOp]:
        """out[t, o_k : o_k + n_k] += scale * (x[t] @ A_k.T) @ B_k; see `reference.add_lora` and,
        for a plan with experts, `reference.add_lora_experts`. See `shrink_op` and `expand_op`.

        With `sum_ranks`, x and A have this rank's part of the inputs, and it makes the operation
        that sums the products with A over ranks, such as `sum_op`.
        """
        assert self.table.rank_parts == 1, "others have parts of the shrunk rows"
        sums = [] if sum_ranks is None else [sum_ranks(group)]
        return [self.shrink_op(group, x), *sums, self.expand_op(group, out, base_bias)]

    def add_embedding_ops(self, target: int, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        """out[t] += scale * A[token_ids[t]] @ B; see `reference.add_lora_embedding`.

        out: `[max_tokens, out_features]`. See `gather_op` and `expand_op`.
        """
        assert self.table.rank_parts == 1, "others have parts of the shrunk rows"
        group = LoraGroup((target,), 0, (0,), (out.shape[1],))
        return [self.gather_op(target, token_ids), self.expand_op(group, out)]

    def shrink_op(self, group: LoraGroup, x: Tensor) -> NativeOp:
        """Writes the products with A to `shrunk`; see `reference.shrink`.

        x: `[max_tokens, in_features]` of the arena's dtype.
        """
        assert x.shape[1] == group.in_features, "x is [T, in_features]"
        assert x.dtype == self.table.arena.dtype
        assert x.stride(1) == 1, "rows are contiguous"
        args = self._args(group)
        args.x, args.x_stride, args.in_features = x.data_ptr(), x.stride(0), group.in_features
        return NativeOp(f"lora_shrink{self._suffix}", args, (self, x))

    def shrunk_of(self, group: LoraGroup) -> Tensor:
        """Returns the part of `shrunk` that the last run of a plan's `shrink_op` may have written,
        and more: [targets, N], whose rows are apart."""
        items, count = self.plan.items, len(group.targets)
        num_places = int(items[-1, 0] + items[-1, 1]) if len(items) else 0
        max_rank = _even(self.table.max_rank)
        row_size = self.plan.max_pairs * max_rank
        rows = self.shrunk[: count * row_size].view(count, row_size)
        return rows[:, : num_places * max_rank]

    def sum_op(self, group: LoraGroup, ranks: RankMemory) -> NativeOp:
        """Replaces a group's products with A in `shrunk` by their sums over ranks, whose plans are
        equal."""
        size = len(group.targets), _even(self.table.max_rank)
        args = _SumShrunkArgs(ranks.args, self.plan.args(), self.shrunk.data_ptr(), *size)
        name = f"sum_shrunk_{dtype_name(self.table.arena.dtype)}"
        return NativeOp(name, args, (self, ranks))

    def gather_op(self, target: int, token_ids: Tensor) -> NativeOp:
        """Writes rows of an embedding's A to `shrunk`; see `reference.gather`.

        token_ids: int64 `[max_tokens]`.
        """
        assert not self.plan.has_experts
        assert token_ids.dtype == torch.int64
        assert token_ids.is_contiguous()
        args = self._args(LoraGroup((target,), 0, (0,), (0,)))
        args.token_ids = token_ids.data_ptr()
        return NativeOp(f"lora_gather{self._suffix}", args, (self, token_ids))

    def expand_op(self, group: LoraGroup, out: Tensor, base_bias: Tensor | None = None) -> NativeOp:
        """Adds the products of `shrunk` with B; see `reference.expand`.

        out: `[max_tokens, >= out_end]` of the arena's dtype or fp32; base_bias: fp32
        `[>= out_end]`.
        """
        dtype = self.table.arena.dtype
        assert out.shape[1] >= group.out_end, "out holds every column of the group"
        assert out.stride(1) == 1, "rows are contiguous"
        assert out.dtype in (dtype, torch.float32), f"out is {out.dtype}"
        args = self._args(group)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        if base_bias is not None:
            assert base_bias.dtype == torch.float32
            assert base_bias.is_contiguous()
            args.base_bias = base_bias.data_ptr()
        suffix = "" if out.dtype == dtype else "_to_float"
        return NativeOp(f"lora_expand{self._suffix}{suffix}", args, (self, out, base_bias))

    @property
    def _suffix(self) -> str:
        experts = "_experts" if self.plan.has_experts else ""
        float8 = "_float8" if self.table.is_float8 else ""
        return f"{experts}{float8}_{dtype_name(self.table.arena.dtype)}"

    def _args(self, group: LoraGroup) -> _LoraArgs:
        table, num_targets = self.table, len(group.targets)
        assert num_targets <= MAX_TARGETS, f"a group of {num_targets} targets"
        size = num_targets * self.plan.max_pairs * _even(table.max_rank)
        assert size <= self.shrunk.numel(), "the workspace is of smaller groups"
        return _LoraArgs(
            plan=self.plan.args(),
            arena=table.arena.data_ptr(),
            rows=table.rows.data_ptr(),
            table_targets=table.num_targets,
            num_targets=num_targets,
            targets=_Targets(*group.targets),
            columns=_Targets(*group.out_offsets),
            widths=_Targets(*group.out_features),
            y=self.shrunk.data_ptr(),
            max_rank=_even(table.max_rank),
        )


def add_lora(
    library: Library,
    out: Tensor,
    x: Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: Tensor | None = None,
) -> None:
    """Runs `reference.add_lora` in float32 or bfloat16: out [T, >= group.out_end], x [T,
    in_features], base_bias [>= group.out_end]. `out` may be float32 with a bfloat16 arena."""
    lora = _once(table, plan, len(group.targets))
    base_bias = None if base_bias is None else base_bias.float()
    library.run(*lora.add_ops(group, x, out, base_bias))


def add_lora_experts(
    library: Library, out: Tensor, x: Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> None:
    """Runs `reference.add_lora_experts`: out [T, >= group.out_end], x [T, in_features], with dtypes
    as in `add_lora`."""
    assert plan.has_experts
    add_lora(library, out, x, table, plan, group)


def add_lora_embedding(
    library: Library, out: Tensor, token_ids: Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> None:
    """Runs `reference.add_lora_embedding` in float32 or bfloat16: out [T, out_features], token_ids
    integers [T]."""
    lora = _once(table, plan, 1)
    library.run(*lora.add_embedding_ops(target, token_ids, out))


def _once(table: LoraTable, plan: LoraPlan, num_targets: int) -> NativeLora:
    experts = None if plan.token_experts is None else plan.token_experts.tolist()
    native_plan = NativeLoraPlan(plan.num_tokens, has_experts=plan.has_experts, table=table)
    native_plan.fill(plan.token_slots.tolist(), row_experts=experts)
    return NativeLora.create(table, native_plan, num_targets)


def _keys(slots: NDArray[np.int32], experts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns numbers that are equal for tokens of one slot and expert; -1 for base tokens."""
    num_experts = int(experts.max(initial=0)) + 1
    return np.where(slots < 0, -1, slots.astype(np.int64) * num_experts + experts)


def _even(rank: int) -> int:
    return rank + rank % 2
