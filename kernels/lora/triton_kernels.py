"""The Triton kernels: shrink to the rank, then expand to the outputs.

Both read the same few things: the arena, the table's rows and the plan's work items. Nothing in a
launch depends on an adapter; ranks and positions are loaded on the device. Program (i, j) takes
item i: tokens of one slot, which `tl.dot` multiplies. These are rows of one token, or a tile of
longer rows. An item of kind 0 ends at once, and so does an item whose slot lacks the target.

Shrink has A's rank, expand B's rank; y between them has as many numbers per token. If devices share
the first product, A has a part of the ranks, and expand reads the parts of all devices, one after
the other. `gather` then writes y of an embedding; if A is whole, expand itself looks up its rows.
With EXPERTS, targets are mixtures and items name an expert: A and B are segments that begin with an
index. With FLOAT8, A and B are float8; they are converted in registers.

With PARTS > 1, a slot from FIRST_MIX on is the first row of a mix; PARTS is 1 in steps without
mixes. Both kernels walk the rows of its parts; absent parts have rank 0. The parts first replace
the base's outputs, then each adds its products, in fp32, rounded once.

A token's numbers do not depend on the batch. A row of a product depends on no other row. A sum over
`in` is cut into chunks of fixed size that are added in a fixed order, whether one program walks all
of them or each has a program of its own.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, K targets of the group,
S splits of `in`, P parts of a mix, R rank of A or B of one adapter for one target.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .plan import ITEM_NOTHING, ITEM_ROWS, ITEM_TILE, ROWS_TOKENS, TILE_TOKENS
from .triton_items import A, B, load_item, load_place, load_tokens, load_values, num_parts
from .triton_outputs import has_base_bias, load_base, plus_product, product

NOTHING = tl.constexpr(ITEM_NOTHING)
ROWS = tl.constexpr(ITEM_ROWS)
TILE = tl.constexpr(ITEM_TILE)
ROWS_SIZE = tl.constexpr(ROWS_TOKENS)
TILE_SIZE = tl.constexpr(TILE_TOKENS)

# Their values change from layer to layer and from step to step: none is worth a compilation.
VARYING = ("first_target", "num_tokens", "num_pairs", "num_items", "num_blocks")


@triton.jit
def shrink_part(
    p_y, p_x, p_a, rank, first_k, m_m, dtype,
    IN: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiplies an item's rows of x, `p_x` [BLOCK_M], by A, over NUM_CHUNKS chunks."""
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
                p_block = p_x[:, None] + o_k[None, :]
                b_x = tl.load(p_block, mask=m_m[:, None] & m_k[None, :], other=0.0)
                # [BLOCK_R, BLOCK_K]
                p_block = p_a + o_r.to(tl.int64)[:, None] * IN + o_k[None, :]
                b_a = load_values(p_block, m_r[:, None] & m_k[None, :], dtype)
                b_sum = tl.dot(b_x, tl.trans(b_a), b_sum, input_precision=PRECISION)
            b_y += b_sum
        tl.store(p_y[:, None] + o_r[None, :], b_y, mask=m_m[:, None])
        i_r += 1


@triton.jit
def shrink_item(
    y, x, order, arena, rows, start, count, slot, expert, target, i_k, i_s, num_tokens, x_stride,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, K: tl.constexpr, Y_RANK: tl.constexpr,
    IN: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    EXPERTS: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    FIRST_MIX: tl.constexpr,
):  # fmt: skip
    """Shrinks an item's tokens, for each part of a mix, over the chunks of split i_s."""
    b_token, m_m = load_tokens(order, start, count, BLOCK_M)
    p_x = x + b_token * x_stride
    for i_p in range(num_parts(slot, PARTS, FIRST_MIX)):
        p_a, rank, _ = load_place(
            arena, rows, slot + i_p, expert, target, A, TABLE_TARGETS, GRANULE, EXPERTS, FLOAT8
        )
        first_row = (i_s.to(tl.int64) * PARTS + i_p) * num_tokens
        p_y = y + ((first_row + b_token) * K + i_k) * Y_RANK
        shrink_part(  # of rank 0 nothing is computed
            p_y, p_x, p_a, rank, i_s * (NUM_CHUNKS * CHUNK), m_m, arena.dtype.element_ty,
            IN, CHUNK, NUM_CHUNKS, BLOCK_M, BLOCK_K, BLOCK_R, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def shrink_kernel(
    y, x, arena, rows, items, order, first_target, num_tokens, x_stride,
    TARGET_STEPS: tl.constexpr, TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr,
    IN: tl.constexpr, Y_RANK: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TILE_BLOCK_K: tl.constexpr, TILE_BLOCK_R: tl.constexpr,
    HAS_TILES: tl.constexpr, EXPERTS: tl.constexpr, FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, FIRST_MIX: tl.constexpr,
):  # fmt: skip
    """y[s, p, t, k, :R] = x[t] @ A_k.T over the chunks of split s, in fp32.

    y: [S, P, T, K, Y_RANK] fp32, Y_RANK a multiple of both rank blocks: whole blocks are written,
    zero beyond R, so that they can be read without a mask. x: [T, IN]. Grid: (items, K * S).
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
    NUM_CHUNKS: tl.constexpr = ((IN + CHUNK - 1) // CHUNK + SPLITS - 1) // SPLITS  # of a split
    target = first_target + step
    if kind == ROWS:
        shrink_item(
            y, x, order, arena, rows, start, count, slot, expert, target, i_k, i_s, num_tokens,
            x_stride, TABLE_TARGETS, GRANULE, K, Y_RANK, IN, CHUNK, NUM_CHUNKS,
            ROWS_SIZE, BLOCK_K, BLOCK_R, EXPERTS, FLOAT8, PRECISION, PARTS, FIRST_MIX,
        )  # fmt: skip
    elif HAS_TILES:
        shrink_item(
            y, x, order, arena, rows, start, count, slot, expert, target, i_k, i_s, num_tokens,
            x_stride, TABLE_TARGETS, GRANULE, K, Y_RANK, IN, CHUNK, NUM_CHUNKS,
            TILE_SIZE, TILE_BLOCK_K, TILE_BLOCK_R, EXPERTS, FLOAT8, PRECISION, PARTS, FIRST_MIX,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def gather_kernel(
    y, token_ids, arena, rows, items, order, first_target,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, Y_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """y[0, t, 0, :R] = A[token_ids[t]], of an embedding, in fp32.

    y: [1, T, 1, Y_RANK] fp32, written as by `shrink_kernel`. token_ids: [T]. Grid: (items,).
    """
    start, count, slot, kind, expert = load_item(items, False)
    if kind == NOTHING:
        return
    p_a, rank, _ = load_place(
        arena, rows, slot, expert, first_target, A, TABLE_TARGETS, GRANULE, False, FLOAT8
    )
    b_token, m_m = load_tokens(order, start, count, BLOCK_M)
    # [BLOCK_M]
    b_id = tl.load(token_ids + b_token, mask=m_m, other=0).to(tl.int64)
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        # [BLOCK_M, BLOCK_R]
        p_block = p_a + b_id[:, None] * rank + o_r[None, :]
        m_y = m_m[:, None] & (o_r < rank)[None, :]
        b_y = load_values(p_block, m_y, arena.dtype.element_ty)
        p_block = y + b_token[:, None] * Y_RANK + o_r[None, :]
        tl.store(p_block, b_y.to(tl.float32), mask=m_m[:, None])
        i_r += 1


@triton.jit
def load_shrunk(p_y, split_stride, m_y, SPLITS: tl.constexpr):
    """A block of y: its splits, added in order."""
    b_y = tl.load(p_y, mask=m_y, other=0.0)
    for i_s in tl.static_range(1, SPLITS):
        b_y += tl.load(p_y + i_s * split_stride, mask=m_y, other=0.0)
    return b_y


@triton.jit
def load_ranks(
    y, split_stride, token_ids, arena, rows, b_token, m_m, slot, expert, target, first_row, i_k,
    rank, o_r,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, K: tl.constexpr, Y_RANK: tl.constexpr,
    SPLITS: tl.constexpr, EXPERTS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """The shrunk rows of an item's tokens and one row of the table, [BLOCK_M, BLOCK_R]."""
    if token_ids is None:
        p_y = y + ((first_row + b_token) * K + i_k) * Y_RANK
        # Written to the end of a block of ranks, of 16 at least: vectors are either read or not.
        m_y = m_m[:, None] & (o_r < (rank + 15) // 16 * 16)[None, :]
        b_y = load_shrunk(p_y[:, None] + o_r[None, :], split_stride, m_y, SPLITS)
    else:
        p_a, _, _ = load_place(
            arena, rows, slot, expert, target, A, TABLE_TARGETS, GRANULE, EXPERTS, FLOAT8
        )
        b_id = tl.load(token_ids + b_token, mask=m_m, other=0).to(tl.int64)
        p_block = p_a + b_id[:, None] * rank + o_r[None, :]
        m_y = m_m[:, None] & (o_r < rank)[None, :]
        b_y = load_values(p_block, m_y, arena.dtype.element_ty)
    return b_y


@triton.jit
def load_b(p_b, rank, o_r, o_n, width, dtype):
    """A block of B, [BLOCK_R, BLOCK_N]."""
    p_block = p_b + o_r.to(tl.int64)[:, None] * width + o_n[None, :]
    return load_values(p_block, (o_r < rank)[:, None] & (o_n < width)[None, :], dtype)


@triton.jit
def expand_part(
    y, split_stride, token_ids, arena, rows, b_token, m_m, slot, expert, target, first_row, i_k,
    p_b, rank, o_n, width,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, K: tl.constexpr, Y_RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    EXPERTS: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns y @ B of an item's tokens and one row of the table, [BLOCK_M, BLOCK_N]."""
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    i_r = 0
    while i_r * BLOCK_R < rank:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        b_y = load_ranks(
            y, split_stride, token_ids, arena, rows, b_token, m_m, slot, expert, target, first_row,
            i_k, rank, o_r, TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS, EXPERTS, FLOAT8,
        )  # fmt: skip
        b_b = load_b(p_b, rank, o_r, o_n, width, arena.dtype.element_ty)
        b_sum = tl.dot(b_y.to(b_b.dtype), b_b, b_sum, input_precision=PRECISION)
        i_r += 1
    return b_sum


@triton.jit
def expand_item(
    out, out_stride, y, split_stride, token_ids, base_bias, arena, rows, order, start, count, slot,
    expert, target, part_rows, i_k, parts, p_b, rank, scale, offset, first_n, end_n, width,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, K: tl.constexpr, Y_RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    EXPERTS: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr, VECTORS: tl.constexpr,
    PARTS: tl.constexpr, WALK: tl.constexpr, BESIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Changes columns [first_n, end_n) of an item's outputs. They are one block of BLOCK_N columns,
    or several with WALK. The first part's B and scale are given."""
    dtype = out.dtype.element_ty
    b_token, m_m = load_tokens(order, start, count, BLOCK_M)
    p_rows = out + offset + b_token[:, None] * out_stride
    if WALK:
        # The shrunk rows are read once, and the blocks of B ahead of their products.
        o_r = tl.arange(0, BLOCK_R)
        b_y = load_ranks(
            y, split_stride, token_ids, arena, rows, b_token, m_m, slot, expert, target, 0, i_k,
            rank, o_r, TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS, EXPERTS, FLOAT8,
        ).to(arena.dtype.element_ty)  # fmt: skip
        for block_n in range(first_n, end_n, BLOCK_N):
            o_n = block_n + tl.arange(0, BLOCK_N)
            m_out = m_m[:, None] & (o_n < width)[None, :]
            b_b = load_b(p_b, rank, o_r, o_n, width, arena.dtype.element_ty)
            if BESIDE:
                b_out = scale * tl.dot(b_y, b_b, input_precision=PRECISION)
            else:
                b_out = tl.load(p_rows + o_n[None, :], mask=m_out, other=0.0).to(tl.float32)
                b_sum = tl.dot(b_y, b_b, input_precision=PRECISION)
                b_sum = (scale * b_sum).to(dtype) if ROUNDS else b_sum
                b_out = plus_product(b_out, b_sum, scale, 0.0, False, ROUNDS)
            tl.store(p_rows + o_n[None, :], b_out.to(dtype), mask=m_out)
    else:
        o_n = first_n + tl.arange(0, BLOCK_N)
        expand_block(
            p_rows + o_n[None, :], y, split_stride, token_ids, base_bias, arena, rows,
            b_token, m_m, slot, expert, target, part_rows, i_k, parts, p_b, rank, scale,
            offset, o_n, width, TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS,
            BLOCK_M, BLOCK_N, BLOCK_R, EXPERTS, FLOAT8, PRECISION, VECTORS, PARTS, BESIDE, ROUNDS,
        )  # fmt: skip


@triton.jit
def expand_block(
    p_block, y, split_stride, token_ids, base_bias, arena, rows, b_token, m_m, slot, expert, target,
    part_rows, i_k, parts, p_b, rank, scale, offset, o_n, width,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, K: tl.constexpr, Y_RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    EXPERTS: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr, VECTORS: tl.constexpr,
    PARTS: tl.constexpr, BESIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Changes a block of columns of an item's outputs, [BLOCK_M, BLOCK_N], by adapters of any rank
    and kind. Outputs are read as late as they can be: they take registers."""
    m_n = o_n < width
    b_sum = expand_part(
        y, split_stride, token_ids, arena, rows, b_token, m_m, slot, expert, target,
        0, i_k, p_b, rank, o_n, width, TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS,
        BLOCK_M, BLOCK_N, BLOCK_R, EXPERTS, FLOAT8, PRECISION,
    )  # fmt: skip
    m_out = m_m[:, None] & m_n[None, :]
    dtype = p_block.dtype.element_ty
    if ROUNDS:  # narrow until it is added
        b_sum, b_bias = product(
            b_sum, scale, arena, rows, slot, target, base_bias, offset, o_n, m_n, dtype,
            TABLE_TARGETS, GRANULE, VECTORS, ROUNDS,
        )  # fmt: skip
    b_out = load_base(
        p_block, m_out, arena, rows, slot, target, parts, base_bias, offset, o_n, m_n,
        TABLE_TARGETS, GRANULE, VECTORS, BESIDE,
    )  # fmt: skip
    if not ROUNDS:
        b_sum, b_bias = product(
            b_sum, scale, arena, rows, slot, target, base_bias, offset, o_n, m_n, dtype,
            TABLE_TARGETS, GRANULE, VECTORS, ROUNDS,
        )  # fmt: skip
    b_out = plus_product(b_out, b_sum, scale, b_bias, VECTORS, ROUNDS)
    if PARTS > 1:
        for i_p in range(1, parts):
            p_b, rank, scale = load_place(
                arena, rows, slot + i_p, expert, target, B, TABLE_TARGETS, GRANULE, EXPERTS, FLOAT8
            )
            b_sum = expand_part(
                y, split_stride, token_ids, arena, rows, b_token, m_m, slot + i_p, expert, target,
                i_p * part_rows, i_k, p_b, rank, o_n, width,
                TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
                EXPERTS, FLOAT8, PRECISION,
            )  # fmt: skip
            b_sum, b_bias = product(
                b_sum, scale, arena, rows, slot + i_p, target, base_bias, offset, o_n, m_n, dtype,
                TABLE_TARGETS, GRANULE, VECTORS, ROUNDS,
            )  # fmt: skip
            b_out = plus_product(b_out, b_sum, scale, b_bias, VECTORS, ROUNDS)
    tl.store(p_block, b_out.to(dtype), mask=m_out)


@triton.jit
def find_columns(
    num_blocks, TARGET_STEPS: tl.constexpr, OUT_OFFSETS: tl.constexpr, OUT_FEATURES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The columns of this program: their target in the group and its step, width and offset, and
    the first and the end of them in the target. Selects between constants keep the alignment that
    these share."""
    i_n = tl.program_id(1)
    i_k = 0
    step = 0
    width = 0
    offset = 0
    first = 0
    end = 0
    for k in tl.static_range(len(TARGET_STEPS)):
        is_ours = i_n >= end
        i_k = tl.where(is_ours, k, i_k)
        step = tl.where(is_ours, TARGET_STEPS[k], step)
        width = tl.where(is_ours, OUT_FEATURES[k], width)
        offset = tl.where(is_ours, OUT_OFFSETS[k], offset)
        first = tl.where(is_ours, end, first)
        end += ((OUT_FEATURES[k] + BLOCK_N - 1) // BLOCK_N + num_blocks - 1) // num_blocks
    first_n = (i_n - first) * num_blocks * BLOCK_N
    return i_k, step, width, offset, first_n, tl.minimum(first_n + num_blocks * BLOCK_N, width)


@triton.jit(do_not_specialize=VARYING)
def expand_kernel(
    out, y, token_ids, base_bias, arena, rows, items, order, first_target, num_tokens, out_stride,
    num_blocks,
    TARGET_STEPS: tl.constexpr, TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr,
    OUT_OFFSETS: tl.constexpr, OUT_FEATURES: tl.constexpr,
    Y_RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TILE_BLOCK_R: tl.constexpr,
    HAS_TILES: tl.constexpr, EXPERTS: tl.constexpr, FLOAT8: tl.constexpr, VECTORS: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, FIRST_MIX: tl.constexpr, WALK: tl.constexpr,
    BESIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """out[t, o_k : o_k + n_k] += scale * (sum over s of y[s, p, t, k, :R]) @ B_k.

    With `token_ids` [T] instead of y an embedding: its rows of A, of B's rank, take the place of
    the sum. With VECTORS adapters may have vectors over the outputs. With WALK programs of rows
    walk several blocks, and one block holds all ranks. ROUNDS: products are rounded to out's dtype
    before they are added. BESIDE: out gets the products themselves, and 0 where an adapter lacks
    the target; there are no vectors, mixes or experts.
    out: [T, >= end of the last slice]; y: [S, P, T, K, Y_RANK] fp32; base_bias: [columns of out] or
    None. Grid: (items, num_blocks blocks of BLOCK_N columns, target after target).
    """
    start, count, slot, kind, expert = load_item(items, EXPERTS)
    if kind == NOTHING:
        return
    K: tl.constexpr = len(TARGET_STEPS)
    i_k, step, width, offset, first_n, end_n = find_columns(
        num_blocks, TARGET_STEPS, OUT_OFFSETS, OUT_FEATURES, BLOCK_N
    )
    target = first_target + step
    p_b, rank, scale = load_place(
        arena, rows, slot, expert, target, B, TABLE_TARGETS, GRANULE, EXPERTS, FLOAT8
    )
    parts = num_parts(slot, PARTS, FIRST_MIX)
    if PARTS == 1 and not BESIDE:
        if VECTORS:
            if rank == 0 and not has_base_bias(rows, slot, target, TABLE_TARGETS):
                return
        elif rank == 0:
            return
    part_rows = tl.cast(num_tokens, tl.int64)
    split_stride = part_rows * (PARTS * K * Y_RANK)
    if kind == ROWS:
        expand_item(
            out, out_stride, y, split_stride, token_ids, base_bias, arena, rows, order, start,
            count, slot, expert, target, part_rows, i_k, parts, p_b, rank, scale, offset,
            first_n, end_n, width, TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS,
            ROWS_SIZE, BLOCK_N, BLOCK_R, EXPERTS, FLOAT8, PRECISION, VECTORS, PARTS, WALK, BESIDE,
            ROUNDS,
        )  # fmt: skip
    elif HAS_TILES:
        expand_item(
            out, out_stride, y, split_stride, token_ids, base_bias, arena, rows, order, start,
            count, slot, expert, target, part_rows, i_k, parts, p_b, rank, scale, offset,
            first_n, end_n, width, TABLE_TARGETS, GRANULE, K, Y_RANK, SPLITS,
            TILE_SIZE, BLOCK_N, TILE_BLOCK_R, EXPERTS, FLOAT8, PRECISION, VECTORS, PARTS, False,
            BESIDE, ROUNDS,
        )  # fmt: skip


@triton.jit
def mark_tiles_kernel(keys, items, order):
    """See `pair_plan.order_tokens`: adds 1 to the keys of tokens in tiles. Grid: (items,)."""
    start, count, slot, kind, _ = load_item(items, False)
    if kind == TILE:
        b_token, m_m = load_tokens(order, start, count, TILE_SIZE)
        b_key = tl.zeros([TILE_SIZE], dtype=tl.int32) + 2 * slot + 1
        tl.store(keys + b_token, b_key, mask=m_m)


@triton.jit(do_not_specialize=VARYING)
def describe_pairs_kernel(
    slots, experts, keys, items, token_keys, token_experts, rows, starts, num_pairs, num_items,
    LACKS_PAIRS: tl.constexpr, FIRST_EXPERT: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `pair_plan.plan_pairs`: slots, experts and keys of all pairs. Clears all items. With
    LACKS_PAIRS, places behind the experts' own pairs are as without an adapter. token_experts,
    rows: [T, NUM_CHOSEN]. Grid: (blocks,)."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < num_pairs
    b_pair = tl.load(rows + o, mask=m, other=0)
    b_expert = tl.load(token_experts + o, mask=m, other=0)
    b_key = tl.load(token_keys + o // NUM_CHOSEN, mask=m, other=0)
    if LACKS_PAIRS:
        m_none = m & (o >= tl.load(starts + NUM_EXPERTS))
        tl.store(slots + o, tl.full([BLOCK], -1, tl.int32), mask=m_none)
        tl.store(experts + o, tl.zeros([BLOCK], tl.int32), mask=m_none)
        tl.store(keys + o, tl.full([BLOCK], -2, tl.int32), mask=m_none)
        b_expert -= FIRST_EXPERT
        m &= b_pair < num_pairs
    tl.store(slots + b_pair, b_key >> 1, mask=m)
    tl.store(experts + b_pair, b_expert, mask=m)
    tl.store(keys + b_pair, b_key, mask=m)
    for i in tl.static_range(5):  # there are no more items than pairs
        o_item = (tl.program_id(0) * 5 + i) * BLOCK + tl.arange(0, BLOCK)
        tl.store(items + o_item, tl.zeros([BLOCK], tl.int32), mask=o_item < 5 * num_items)


@triton.jit
def load_begins(keys, experts, o, num_pairs):
    """Key and expert of pairs, and whether an item may begin there: as behind the last."""
    m = o < num_pairs
    m_before = m & (o > 0)
    b_key = tl.load(keys + o, mask=m, other=-2)
    b_expert = tl.load(experts + o, mask=m, other=0)
    b_begins = ~m | (o % tl.where((b_key & 1) == 0, ROWS_SIZE, TILE_SIZE) == 0)
    b_begins |= b_key != tl.load(keys + o - 1, mask=m_before, other=-2)
    b_begins |= b_expert != tl.load(experts + o - 1, mask=m_before, other=-1)
    return b_key, b_expert, b_begins


@triton.jit(do_not_specialize=VARYING)
def plan_items_kernel(items, keys, experts, num_pairs, num_items, CHUNK: tl.constexpr):
    """See `pair_plan.plan_pairs`: items of pairs, which were cleared. Each program has TILE_SIZE
    pairs, in which their items end, and counts those before. Grid: (programs,)."""
    first = tl.program_id(0) * TILE_SIZE
    num_before = 0
    for first_before in range(0, first, CHUNK):
        o_before = first_before + tl.arange(0, CHUNK)
        b_key, _, b_begins = load_begins(keys, experts, o_before, first)
        num_before += tl.sum((b_begins & (b_key >= 0)).to(tl.int32), axis=0)
    o = first + tl.arange(0, TILE_SIZE)
    b_key, b_expert, b_begins = load_begins(keys, experts, o, num_pairs)
    # [TILE_SIZE, TILE_SIZE]: which of the others the next begins with.
    b_next = tl.where(b_begins[None, :] & (o[None, :] > o[:, None]), o[None, :], first + TILE_SIZE)
    b_end = tl.min(b_next, axis=1)
    b_is = b_begins & (b_key >= 0)
    b_item = num_before + tl.cumsum(b_is.to(tl.int32), axis=0) - 1
    m = b_is & (b_item < num_items)
    p_item = items + b_item * 5
    tl.store(p_item, o, mask=m)
    tl.store(p_item + 1, b_end - o, mask=m)
    tl.store(p_item + 2, b_key >> 1, mask=m)
    tl.store(p_item + 3, tl.where((b_key & 1) == 0, ROWS, TILE), mask=m)
    tl.store(p_item + 4, b_expert, mask=m)
