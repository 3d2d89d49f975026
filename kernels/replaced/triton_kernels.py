"""The Triton kernels. Each program reads on the device whether its token's adapter has the weight,
and ends at once where it has not.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from kernels.lora.table import NUM_WEIGHT_FIELDS

FIELDS = tl.constexpr(NUM_WEIGHT_FIELDS)

VARYING = ("index", "num_tokens")
"""They change from layer to layer and from step to step: none is worth a compilation."""


@triton.jit
def load_field(weight_rows, slot, index, FIELD: tl.constexpr, WEIGHTS: tl.constexpr):
    """One more than a granule, or 0; of the last field a number."""
    return tl.load(weight_rows + (slot.to(tl.int64) * FIELDS + FIELD) * WEIGHTS + index)


@triton.jit(do_not_specialize=VARYING)
def token_weights_kernel(
    out, weight, arena, weight_rows, token_slots, index, offset,
    SIZE: tl.constexpr, WEIGHTS: tl.constexpr, GRANULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `reference.token_weights`. Grid: (T, blocks)."""
    i_token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    slot = tl.load(token_slots + i_token)
    granule = load_field(weight_rows, tl.maximum(slot, 0), index, 0, WEIGHTS)
    if (slot >= 0) & (granule > 0):
        at = (granule - 1).to(tl.int64) * GRANULE
        b_own = tl.load(arena + at + o, mask=m, other=0.0).to(out.dtype.element_ty)
        tl.store(out + i_token * SIZE + o, (b_own + offset).to(out.dtype.element_ty), mask=m)
    else:
        tl.store(out + i_token * SIZE + o, tl.load(weight + o, mask=m, other=0.0), mask=m)


@triton.jit
def find_row(p_ids, num_rows, row_id):
    """The place of an id among ascending ones, and whether it is there."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(p_ids + middle) < row_id
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    is_there = low < num_rows
    found = tl.load(p_ids + low, mask=is_there, other=-1)
    return low, is_there & (found == row_id)


@triton.jit(do_not_specialize=VARYING)
def replace_embeddings_kernel(
    out, token_ids, arena, weight_rows, token_slots, index,
    SIZE: tl.constexpr, WEIGHTS: tl.constexpr, GRANULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `reference.replace_embeddings`. out: [T, SIZE]. Grid: (T, blocks)."""
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots + i_token)
    if slot < 0:
        return
    token_id = tl.load(token_ids + i_token).to(tl.int32)
    full = load_field(weight_rows, slot, index, 0, WEIGHTS)
    num_rows = load_field(weight_rows, slot, index, 3, WEIGHTS)
    place = token_id
    granule = full
    is_there = full > 0
    if num_rows > 0:
        first = (load_field(weight_rows, slot, index, 1, WEIGHTS) - 1).to(tl.int64)
        BITS: tl.constexpr = arena.dtype.element_ty.primitive_bitwidth
        p_ids = arena.to(tl.pointer_type(tl.int32)) + first * (GRANULE * BITS // 32)
        place, is_there = find_row(p_ids, num_rows, token_id)
        granule = load_field(weight_rows, slot, index, 2, WEIGHTS)
    if not is_there:
        return
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    p_row = arena + (granule - 1).to(tl.int64) * GRANULE + place.to(tl.int64) * SIZE
    tl.store(out + i_token * SIZE + o, tl.load(p_row + o, mask=m, other=0.0), mask=m)


@triton.jit
def replace_block(
    out, p_x, bias, arena, weight_rows, slot, index, vocab_size, o_m, m_m, o_n, first_n, out_stride,
    SIZE: tl.constexpr, WEIGHTS: tl.constexpr, GRANULE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of tokens of one slot for a block of the rows that its adapter has, if there are so
    many."""
    full = load_field(weight_rows, slot, index, 0, WEIGHTS)
    num_rows = load_field(weight_rows, slot, index, 3, WEIGHTS)
    granule = full
    if full > 0:
        num_rows = vocab_size
    else:
        granule = load_field(weight_rows, slot, index, 2, WEIGHTS)
    if first_n < num_rows:
        m_n = o_n < num_rows
        b_column = o_n
        if full == 0:
            first = (load_field(weight_rows, slot, index, 1, WEIGHTS) - 1).to(tl.int64)
            BITS: tl.constexpr = arena.dtype.element_ty.primitive_bitwidth
            p_ids = arena.to(tl.pointer_type(tl.int32)) + first * (GRANULE * BITS // 32)
            b_column = tl.load(p_ids + o_n, mask=m_n, other=0)
        p_rows = arena + (granule - 1).to(tl.int64) * GRANULE + o_n.to(tl.int64)[:, None] * SIZE
        b_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for i_k in range((SIZE + BLOCK_K - 1) // BLOCK_K):
            o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
            m_k = o_k < SIZE
            # [BLOCK_N, BLOCK_K], [BLOCK_M, BLOCK_K]
            b_rows = tl.load(p_rows + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
            b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_sum = tl.dot(b_x, tl.trans(b_rows), b_sum, input_precision=PRECISION)
        if bias is not None:
            b_sum += tl.load(bias + b_column, mask=m_n, other=0.0).to(tl.float32)[None, :]
        p_out = out + o_m[:, None] * out_stride + b_column[None, :]
        tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=VARYING)
def replace_logits_kernel(
    out, x, bias, arena, weight_rows, token_slots, index, vocab_size, num_tokens, out_stride,
    SIZE: tl.constexpr, WEIGHTS: tl.constexpr, GRANULE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See `reference.replace_logits`. x: [T, SIZE]; bias: [vocab_size], or None. Grid: (blocks of
    tokens, blocks of rows).

    Tokens of one slot among BLOCK_M share one read of its rows. However few they are, they are rows
    of a `tl.dot` of one shape: a token's numbers do not depend on the others.
    """
    first_m = tl.program_id(0).to(tl.int64) * BLOCK_M
    o_m = first_m + tl.arange(0, BLOCK_M)
    b_slot = tl.load(token_slots + o_m, mask=o_m < num_tokens, other=-1)
    first_n = tl.program_id(1) * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    p_x = x + o_m[:, None] * SIZE
    for i in range(BLOCK_M):
        slot = tl.load(token_slots + first_m + i, mask=first_m + i < num_tokens, other=-1)
        m_m = b_slot == slot
        num_before = tl.sum((m_m & (o_m < first_m + i)).to(tl.int32), axis=0)
        if (slot >= 0) & (num_before == 0):
            replace_block(
                out, p_x, bias, arena, weight_rows, slot, index, vocab_size, o_m, m_m, o_n, first_n,
                out_stride, SIZE, WEIGHTS, GRANULE, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
