"""LoRA in C++ for programs: operations at fixed addresses over a plan that is refilled every step.

`add_lora` and `add_lora_embedding` run them once over tensors. See `native/src/lora.h` for how
the products are made; a token's numbers depend on its own row and adapter only, bit for bit.
16-bit models are bf16 here, and their shrunk rows are rounded to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.native.library import Library, NativeOp, dtype_name

from .plan import TILE_TOKENS, LoraGroup, LoraPlan
from .table import LoraTable

MAX_TARGETS = 8
"""Most targets of a group."""

_Targets = ctypes.c_int32 * MAX_TARGETS


class _PlanArgs(ctypes.Structure):
    _fields_ = (
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("max_tokens", ctypes.c_int64),
    )


class _LoraArgs(ctypes.Structure):
    _fields_ = (
        ("plan", _PlanArgs),
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
    )


class NativeLoraPlan:
    """One step's tokens by slot at fixed addresses; `fill` it before each run of a program.

    An item is up to TILE_TOKENS tokens of one slot, wherever they stand in the batch: they share
    one read of A and B.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._items = np.zeros((max_tokens, 4), np.int32)
        self._tokens = np.zeros(max_tokens, np.int32)
        self._num_items = np.zeros(1, np.int32)

    def fill(self, row_slots: Sequence[int], row_lengths: Sequence[int] | None = None) -> None:
        """The plan of rows in batch order: row i has `row_lengths[i]` tokens (or one) of
        `row_slots[i]`, which is -1 (base) or a row of the table."""
        slots = np.asarray(row_slots, np.int32)
        if row_lengths is not None:
            slots = slots.repeat(row_lengths)
        assert len(slots) <= self.max_tokens, f"{len(slots)} tokens of {self.max_tokens}"
        order = slots.argsort(kind="stable")
        slots = slots[order]
        num_base = int(slots.searchsorted(0))
        slots, count = slots[num_base:], len(slots) - num_base
        self._tokens[:count] = order[num_base:]
        # Items begin where a slot does and every TILE_TOKENS from there.
        begins = np.flatnonzero(np.diff(slots, prepend=-1))
        place = np.arange(count) - begins.repeat(np.diff(begins, append=count))
        firsts = np.flatnonzero(place % TILE_TOKENS == 0)
        items = self._items[: len(firsts)]
        items[:, 0] = firsts
        items[:, 1] = np.diff(firsts, append=count)
        items[:, 2] = slots[firsts]
        self._num_items[0] = len(firsts)

    @property
    def has_adapters(self) -> bool:
        return bool(self._num_items[0])

    def args(self) -> _PlanArgs:
        return _PlanArgs(
            self._items.ctypes.data,
            self._num_items.ctypes.data,
            self._tokens.ctypes.data,
            self.max_tokens,
        )


@dataclass(frozen=True, eq=False, slots=True)
class NativeLora:
    """Builds the operations of one plan. They share `shrunk`, so no two programs of it may run at
    the same time."""

    table: LoraTable
    plan: NativeLoraPlan
    shrunk: Tensor
    """Workspace `[targets of a group * max_tokens * rank]` of the arena's dtype."""

    @classmethod
    def create(
        cls, table: LoraTable, plan: NativeLoraPlan, max_group_targets: int = 3
    ) -> NativeLora:
        size = max_group_targets * plan.max_tokens * _even(table.max_rank)
        return cls(table, plan, torch.empty(size, dtype=table.arena.dtype))

    def add_ops(self, group: LoraGroup, x: Tensor, out: Tensor) -> list[NativeOp]:
        """out[t, o_k : o_k + n_k] += scale * (x[t] @ A_k.T) @ B_k; see `reference.add_lora`.

        x: `[max_tokens, in_features]` of the arena's dtype, out: `[max_tokens, >= out_end]` of the
        same or fp32. The first operation does not touch `out`.
        """
        assert x.shape[1] == group.in_features, "x is [T, in_features]"
        assert x.dtype == self.table.arena.dtype
        assert x.stride(1) == 1, "rows are contiguous"
        args = self._args(group, out)
        args.x, args.x_stride, args.in_features = x.data_ptr(), x.stride(0), group.in_features
        return self._ops("lora_shrink", args, out, x)

    def add_embedding_ops(self, target: int, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        """out[t] += scale * A[token_ids[t]] @ B; see `reference.add_lora_embedding`.

        token_ids: int64 `[max_tokens]`, out: `[max_tokens, out_features]`.
        """
        assert token_ids.dtype == torch.int64
        assert token_ids.is_contiguous()
        args = self._args(LoraGroup((target,), 0, (0,), (out.shape[1],)), out)
        args.token_ids = token_ids.data_ptr()
        return self._ops("lora_gather", args, out, token_ids)

    def _args(self, group: LoraGroup, out: Tensor) -> _LoraArgs:
        table, num_targets = self.table, len(group.targets)
        assert num_targets <= MAX_TARGETS, f"a group of {num_targets} targets"
        size = num_targets * self.plan.max_tokens * _even(table.max_rank)
        assert size <= self.shrunk.numel(), "the workspace is of smaller groups"
        assert out.shape[1] >= group.out_end, "out holds every column of the group"
        assert out.stride(1) == 1, "rows are contiguous"
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
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )

    def _ops(self, first: str, args: _LoraArgs, out: Tensor, given: Tensor) -> list[NativeOp]:
        dtype = self.table.arena.dtype
        assert out.dtype in (dtype, torch.float32), f"out is {out.dtype}"
        name = dtype_name(dtype)
        suffix = "" if out.dtype == dtype else "_to_float"
        keep = (self, out, given)
        return [
            NativeOp(f"{first}_{name}", args, keep),
            NativeOp(f"lora_expand_{name}{suffix}", args, keep),
        ]


def add_lora(
    library: Library, out: Tensor, x: Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> None:
    """See `reference.add_lora`. float32 and bfloat16; `out` may be float32 beside a bf16 arena."""
    lora = _once(table, plan, len(group.targets))
    library.run(*lora.add_ops(group, x, out))


def add_lora_embedding(
    library: Library, out: Tensor, token_ids: Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> None:
    """See `reference.add_lora_embedding`. float32 and bfloat16."""
    lora = _once(table, plan, 1)
    library.run(*lora.add_embedding_ops(target, token_ids, out))


def _once(table: LoraTable, plan: LoraPlan, num_targets: int) -> NativeLora:
    native_plan = NativeLoraPlan(plan.num_tokens)
    native_plan.fill(plan.token_slots.tolist())
    return NativeLora.create(table, native_plan, num_targets)


def _even(rank: int) -> int:
    return rank + rank % 2
