"""The Triton kernels: shrink to the rank, then expand to the outputs.

Both read the same few things: the arena, the table's rows and the plan's work items. Nothing in a
launch depends on an adapter; ranks and positions are loaded on the device. Program (i, j) takes
item i: a single token, computed by products and sums, or a tile of tokens of one slot, computed by
`tl.dot`. An item of kind 0 ends at once, and so does an item whose slot lacks the target.

Shrink has A's rank, expand B's: y between them has as many numbers of each token. Where devices
share the first product, A has a part of the ranks, and what they have written, one part after the
other, is what expand reads. `gather` writes y of an embedding then; where A is whole, expand itself
looks up its rows. With EXPERTS targets are mixtures, whose items name an expert: A and B are
segments that begin with an index.

A token's numbers do not depend on the batch: a sum over `in` is cut into chunks of fixed size that
are added in a fixed order, whether one program walks all of them or each has a program of its own.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, K targets of the group,
S splits of `in`, R rank of A or B of one adapter for one target.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .plan import ITEM_NOTHING, ITEM_TOKEN
from .table import INDEX_FIELDS, NUM_FIELDS

NOTHING = tl.constexpr(ITEM_NOTHING)
TOKEN = tl.constexpr(ITEM_TOKEN)
FIELDS = tl.constexpr(NUM_FIELDS)
INDEX = tl.constexpr(INDEX_FIELDS)
A, B = tl.constexpr(0), tl.constexpr(1)

# Their values change from layer to layer and from step to step: none is worth a compilation.
VARYING = ("first_target", "num_tokens")


@triton.jit
def load_item(items, EXPERTS: tl.constexpr):
    """start, num_tokens, slot, kind and expert of this program's work item."""
    NUM: tl.constexpr = 5 if EXPERTS else 4
    p_item = items + tl.program_id(0).to(tl.int64) * NUM
    expert = tl.load(p_item + 4) if EXPERTS else 0
    return tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3), expert


@triton.jit
def load_place(
    arena, rows, slot, expert, target,
    SIDE: tl.constexpr, TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Element offset, rank and scale of A or B of `target` in `slot`. Only B has a scale.

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
    return offset, rank, scale


@triton.jit
def shrink_token(
    p_y, p_x, p_a, rank, first_k,
    IN: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        b_y = tl.zeros([BLOCK_R], dtype=tl.float32)
        for i_chunk in range(NUM_CHUNKS):
            b_sum = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
            for i_block in tl.static_range(CHUNK // BLOCK_K):
                o_k = first_k + i_chunk * CHUNK + i_block * BLOCK_K + tl.arange(0, BLOCK_K)
                m_k = o_k < IN
                # [BLOCK_K]
                b_x = tl.load(p_x + o_k, mask=m_k, other=0.0).to(tl.float32)
                # [BLOCK_R, BLOCK_K]
                p_block = p_a + o_r.to(tl.int64)[:, None] * IN + o_k[None, :]
                b_a = tl.load(p_block, mask=m_r[:, None] & m_k[None, :], other=0.0)
                b_sum += b_a.to(tl.float32) * b_x[None, :]
            b_y += tl.sum(b_sum, axis=1)
        tl.store(p_y + o_r, b_y)
        i_r += 1


@triton.jit
def shrink_tile(
    p_y, p_x, p_a, rank, first_k, num_tokens, x_stride,
    Y_STRIDE: tl.constexpr, IN: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < num_tokens
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        b_y = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for i_chunk in range(NUM_CHUNKS):
            b_sum = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
            for i_block in range(CHUNK // BLOCK_K):
                o_k = first_k + i_chunk * CHUNK + i_block * BLOCK_K + tl.arange(0, BLOCK_K)
                m_k = o_k < IN
                # [BLOCK_M, BLOCK_K]
                p_block = p_x + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
                b_x = tl.load(p_block, mask=m_m[:, None] & m_k[None, :], other=0.0)
                # [BLOCK_R, BLOCK_K]
                p_block = p_a + o_r.to(tl.int64)[:, None] * IN + o_k[None, :]
                b_a = tl.load(p_block, mask=m_r[:, None] & m_k[None, :], other=0.0)
                b_sum = tl.dot(b_x, tl.trans(b_a), b_sum, input_precision=PRECISION)
            b_y += b_sum
        p_block = p_y + o_m.to(tl.int64)[:, None] * Y_STRIDE + o_r[None, :]
        tl.store(p_block, b_y, mask=m_m[:, None])
        i_r += 1


@triton.jit(do_not_specialize=VARYING)
def shrink_kernel(
    y, x, arena, rows, items, first_target, num_tokens, x_stride,
    TARGET_STEPS: tl.constexpr, TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr,
    IN: tl.constexpr, Y_RANK: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TILE_BLOCK_K: tl.constexpr, TILE_BLOCK_R: tl.constexpr,
    HAS_TILES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[s, t, k, :R] = x[t] @ A_k.T over the chunks of split s, in fp32.

    y: [S, T, K, Y_RANK] fp32, Y_RANK a multiple of both rank blocks: whole blocks are written, zero
    beyond R, so that they can be read without a mask. x: [T, IN]. Grid: (items, K * S).
    """
    start, count, slot, kind, expert = load_item(items, EXPERTS)
    if kind == NOTHING:
        return
    K: tl.constexpr = len(TARGET_STEPS)
    i_k = tl.program_id(1) % K
    i_s = tl.program_id(1) // K
    step = 0
    for k in tl.static_range(K):
        step = tl.where(i_k == k, TARGET_STEPS[k], step)
    a_offset, rank, _ = load_place(
        arena, rows, slot, expert, first_target + step, A, TABLE_TARGETS, GRANULE, EXPERTS
    )
    if rank == 0:
        return

    NUM_CHUNKS: tl.constexpr = ((IN + CHUNK - 1) // CHUNK + SPLITS - 1) // SPLITS  # of a split
    first_k = i_s * (NUM_CHUNKS * CHUNK)
    p_y = y + ((i_s.to(tl.int64) * num_tokens + start) * K + i_k) * Y_RANK
    p_x = x + start.to(tl.int64) * x_stride
    p_a = arena + a_offset
    if kind == TOKEN:
        shrink_token(p_y, p_x, p_a, rank, first_k, IN, CHUNK, NUM_CHUNKS, BLOCK_K, BLOCK_R)
    elif HAS_TILES:
        shrink_tile(
            p_y, p_x, p_a, rank, first_k, count, x_stride,
            K * Y_RANK, IN, CHUNK, NUM_CHUNKS, BLOCK_M, TILE_BLOCK_K, TILE_BLOCK_R, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def gather_kernel(
    y, token_ids, arena, rows, items, first_target,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, Y_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y[0, t, 0, :R] = A[token_ids[t]], of an embedding, in fp32.

    y: [1, T, 1, Y_RANK] fp32, written as by `shrink_kernel`. token_ids: [T]. Grid: (items,).
    """
    start, count, slot, kind, expert = load_item(items, False)
    if kind == NOTHING:
        return
    a_offset, rank, _ = load_place(
        arena, rows, slot, expert, first_target, A, TABLE_TARGETS, GRANULE, False
    )
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < count
    # [BLOCK_M]
    b_id = tl.load(token_ids + start + o_m, mask=m_m, other=0).to(tl.int64)
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        # [BLOCK_M, BLOCK_R]
        p_block = arena + a_offset + b_id[:, None] * rank + o_r[None, :]
        b_y = tl.load(p_block, mask=m_m[:, None] & (o_r < rank)[None, :], other=0.0)
        p_block = y + (start + o_m).to(tl.int64)[:, None] * Y_RANK + o_r[None, :]
        tl.store(p_block, b_y.to(tl.float32), mask=m_m[:, None])
        i_r += 1


@triton.jit
def load_granule(p_field, GRANULE: tl.constexpr):
    """Whether there is a vector, and its element offset."""
    granule = tl.load(p_field)
    return granule > 0, (granule - 1).to(tl.int64) * GRANULE


@triton.jit
def has_base_bias(rows, slot, target, TABLE_TARGETS: tl.constexpr):
    """Whether the adapter has a bias in the base's place: the one vector of a target without A."""
    return tl.load(rows + (slot.to(tl.int64) * FIELDS + 7) * TABLE_TARGETS + target) > 0


@triton.jit
def load_outputs(
    arena, rows, slot, target, base_bias, offset, o_n, m_n,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr,
):  # fmt: skip
    """What is subtracted from outputs, what their sums are multiplied by, and what is added behind
    that: [BLOCK_N] each. See `reference.add_lora`."""
    p_row = rows + slot.to(tl.int64) * (FIELDS * TABLE_TARGETS) + target
    F32: tl.constexpr = GRANULE * arena.dtype.element_ty.primitive_bitwidth // 32
    p_wide = arena.to(tl.pointer_type(tl.float32))
    has_magnitude, at = load_granule(p_row + 5 * TABLE_TARGETS, F32)
    b_factor = tl.load(p_wide + at + o_n, mask=m_n & has_magnitude, other=1.0)
    has_bias, at = load_granule(p_row + 6 * TABLE_TARGETS, F32)
    b_bias = tl.load(p_wide + at + o_n, mask=m_n & has_bias, other=0.0)
    has_own, at = load_granule(p_row + 7 * TABLE_TARGETS, GRANULE)
    b_own = tl.load(arena + at + o_n, mask=m_n & has_own, other=0.0).to(tl.float32)
    b_old = tl.zeros_like(b_own)
    if base_bias is not None:
        m_old = m_n & (has_magnitude | has_own)
        b_old = tl.load(base_bias + offset + o_n, mask=m_old, other=0.0).to(tl.float32)
    return b_old, b_factor, tl.where(has_own, b_own, b_old), b_bias


@triton.jit
def load_shrunk(p_y, split_stride, m_y, SPLITS: tl.constexpr):
    """A block of y: its splits, added in order."""
    b_y = tl.load(p_y, mask=m_y)
    for i_s in tl.static_range(1, SPLITS):
        b_y += tl.load(p_y + i_s * split_stride, mask=m_y)
    return b_y


@triton.jit
def expand_token(
    p_out, p_y, split_stride, p_token_id, p_a, p_b, rank, scale, o_n, width,
    b_old, b_factor, b_new, b_bias,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    m_n = o_n < width
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        # [BLOCK_R]
        if p_token_id is None:
            b_y = load_shrunk(p_y + o_r, split_stride, None, SPLITS)
        else:
            p_row = p_a + tl.load(p_token_id).to(tl.int64) * rank
            b_y = tl.load(p_row + o_r, mask=m_r, other=0.0).to(tl.float32)
        # [BLOCK_R, BLOCK_N]
        p_block = p_b + o_r.to(tl.int64)[:, None] * width + o_n[None, :]
        b_b = tl.load(p_block, mask=m_r[:, None] & m_n[None, :], other=0.0)
        b_sum += tl.sum(b_y[:, None] * b_b.to(tl.float32), axis=0)
        i_r += 1
    b_out = tl.load(p_out + o_n, mask=m_n, other=0.0).to(tl.float32)
    if VECTORS:
        b_out = (b_out - b_old + scale * b_sum) * b_factor + b_new + b_bias
    else:
        b_out += scale * b_sum
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


@triton.jit
def expand_tile(
    p_out, p_y, split_stride, p_token_id, p_a, p_b, rank, scale, o_n, width, num_tokens, out_stride,
    b_old, b_factor, b_new, b_bias,
    Y_STRIDE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < num_tokens
    m_n = o_n < width
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        # [BLOCK_M, BLOCK_R]
        if p_token_id is None:
            p_block = p_y + o_m.to(tl.int64)[:, None] * Y_STRIDE + o_r[None, :]
            b_y = load_shrunk(p_block, split_stride, m_m[:, None], SPLITS)
        else:
            b_id = tl.load(p_token_id + o_m, mask=m_m, other=0).to(tl.int64)
            p_block = p_a + b_id[:, None] * rank + o_r[None, :]
            b_y = tl.load(p_block, mask=m_m[:, None] & m_r[None, :], other=0.0)
        # [BLOCK_R, BLOCK_N]
        p_block = p_b + o_r.to(tl.int64)[:, None] * width + o_n[None, :]
        b_b = tl.load(p_block, mask=m_r[:, None] & m_n[None, :], other=0.0)
        b_sum = tl.dot(b_y.to(b_b.dtype), b_b, b_sum, input_precision=PRECISION)
        i_r += 1
    p_block = p_out + o_m.to(tl.int64)[:, None] * out_stride + o_n[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    b_out = tl.load(p_block, mask=m_out, other=0.0).to(tl.float32)
    if VECTORS:
        b_out = (b_out - b_old[None, :] + scale * b_sum) * b_factor[None, :]
        b_out += b_new[None, :] + b_bias[None, :]
    else:
        b_out += scale * b_sum
    tl.store(p_block, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=VARYING)
def expand_kernel(
    out, y, token_ids, base_bias, arena, rows, items, first_target, num_tokens, out_stride,
    TARGET_STEPS: tl.constexpr, TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr,
    OUT_OFFSETS: tl.constexpr, OUT_FEATURES: tl.constexpr,
    Y_RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TILE_BLOCK_R: tl.constexpr,
    HAS_TILES: tl.constexpr, EXPERTS: tl.constexpr, VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, o_k : o_k + n_k] += scale * (sum over s of y[s, t, k, :R]) @ B_k.

    With `token_ids` [T] instead of y an embedding: its rows of A, of B's rank, take the place of
    the sum. With VECTORS adapters may have vectors over the outputs.
    out: [T, >= end of the last slice]; y: [S, T, K, Y_RANK] fp32; base_bias: [the same] or None.
    Grid: (items, blocks of BLOCK_N columns, target after target).
    """
    start, count, slot, kind, expert = load_item(items, EXPERTS)
    if kind == NOTHING:
        return
    K: tl.constexpr = len(TARGET_STEPS)
    # Whose columns are ours? Selects between constants keep what alignment they share.
    i_n = tl.program_id(1)
    i_k = 0
    step = 0
    width = 0
    offset = 0
    first_block = 0
    end_block = 0
    for k in tl.static_range(K):
        is_ours = i_n >= end_block
        i_k = tl.where(is_ours, k, i_k)
        step = tl.where(is_ours, TARGET_STEPS[k], step)
        width = tl.where(is_ours, OUT_FEATURES[k], width)
        offset = tl.where(is_ours, OUT_OFFSETS[k], offset)
        first_block = tl.where(is_ours, end_block, first_block)
        end_block += (OUT_FEATURES[k] + BLOCK_N - 1) // BLOCK_N
    target = first_target + step
    b_offset, rank, scale = load_place(
        arena, rows, slot, expert, target, B, TABLE_TARGETS, GRANULE, EXPERTS
    )
    o_n = (i_n - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_old = None
    b_factor = None
    b_new = None
    b_bias = None
    if VECTORS:
        if rank == 0 and not has_base_bias(rows, slot, target, TABLE_TARGETS):
            return
        b_old, b_factor, b_new, b_bias = load_outputs(
            arena, rows, slot, target, base_bias, offset, o_n, o_n < width, TABLE_TARGETS, GRANULE
        )
    elif rank == 0:
        return

    p_out = out + start.to(tl.int64) * out_stride + offset
    p_b = arena + b_offset
    if token_ids is None:
        p_a = None
        p_token_id = None
        p_y = y + (start.to(tl.int64) * K + i_k) * Y_RANK
    else:
        a_offset, _, _ = load_place(
            arena, rows, slot, expert, target, A, TABLE_TARGETS, GRANULE, EXPERTS
        )
        p_a = arena + a_offset
        p_token_id = token_ids + start
        p_y = None
    split_stride = tl.cast(num_tokens, tl.int64) * (K * Y_RANK)
    if kind == TOKEN:
        expand_token(
            p_out, p_y, split_stride, p_token_id, p_a, p_b, rank, scale, o_n, width,
            b_old, b_factor, b_new, b_bias, SPLITS, BLOCK_N, BLOCK_R, VECTORS,
        )  # fmt: skip
    elif HAS_TILES:
        expand_tile(
            p_out, p_y, split_stride, p_token_id, p_a, p_b, rank, scale, o_n, width, count,
            out_stride, b_old, b_factor, b_new, b_bias,
            K * Y_RANK, SPLITS, BLOCK_M, BLOCK_N, TILE_BLOCK_R, PRECISION, VECTORS,
        )  # fmt: skip
