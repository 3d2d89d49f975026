"""Parts of the Triton kernels that read the plan and the table: items, tokens, places of matrices.

Names as in `triton_kernels`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .rows import INDEX_FIELDS
from .triton_outputs import FIELDS

INDEX = tl.constexpr(INDEX_FIELDS)
A, B = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def load_item(items, EXPERTS: tl.constexpr):
    """start, num_tokens, slot, kind and expert of this program's work item."""
    NUM: tl.constexpr = 5 if EXPERTS else 4
    p_item = items + tl.program_id(0).to(tl.int64) * NUM
    expert = tl.load(p_item + 4) if EXPERTS else 0
    return tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3), expert


@triton.jit
def load_tokens(order, start, count, BLOCK_M: tl.constexpr):
    """The tokens of an item, and which of them there are: [BLOCK_M] each."""
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < count
    if order is None:
        b_token = start + o_m
    else:
        b_token = tl.load(order + start + o_m, mask=m_m, other=0)
    return b_token.to(tl.int64), m_m


@triton.jit
def load_place(
    arena, rows, slot, expert, target,
    SIDE: tl.constexpr, TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, EXPERTS: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Where A or B of `target` in `slot` begins, its rank and scale. Only B has a scale. Values are
    of the arena's type, or bytes of float8.

    Multiplying the granule by a constant is what proves to the compiler that they are aligned.
    """
    p_row = rows + slot.to(tl.int64) * (FIELDS * TABLE_TARGETS) + target
    offset = tl.load(p_row + SIDE * TABLE_TARGETS).to(tl.int64) * GRANULE
    rank = tl.load(p_row + (2 + SIDE) * TABLE_TARGETS)
    scale = 1.0
    if SIDE == B:
        scale = tl.load(p_row + 4 * TABLE_TARGETS).to(tl.float32, bitcast=True)
    if EXPERTS:
        p_index = (arena + offset).to(tl.pointer_type(tl.int32)) + expert.to(tl.int64) * INDEX
        is_there = rank > 0  # else there may be no segment
        offset += tl.load(p_index, mask=is_there, other=0).to(tl.int64) * GRANULE
        rank = tl.load(p_index + 1, mask=is_there, other=0)
        if SIDE == B:
            bits = tl.load(p_index + 2, mask=is_there, other=0)
            scale *= bits.to(tl.float32, bitcast=True)
    p_values = arena + offset
    if FLOAT8:
        p_values = p_values.to(tl.pointer_type(tl.uint8))
    return p_values, rank, scale


@triton.jit
def load_values(p_block, mask, dtype):
    """A block of A or B in the arena's type `dtype`, which has the value of every float8."""
    if p_block.dtype.element_ty == tl.uint8:
        b_values = tl.load(p_block, mask=mask, other=0)
        return b_values.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return tl.load(p_block, mask=mask, other=0.0)


@triton.jit
def num_parts(slot, PARTS: tl.constexpr, FIRST_MIX: tl.constexpr):
    """How many rows of the table, from the slot's on, a token gets the sum of."""
    return tl.where(slot >= FIRST_MIX, PARTS, 1) if PARTS > 1 else 1
