"""The Triton kernels of paged attention: angles, store, decode, combine, prefill.

All read where things lie from device memory: page tables, context lengths, where a row's queries
start. A grid depends on the number of rows or tiles and on nothing else, so that one captured graph
serves any lengths. The cache is laid out in rows (see kv_cache.py); its strides are arguments.

A row's numbers do not depend on the batch: how its context is cut into segments follows from its
own length, and `combine` adds them in their order. Whose segments a program takes does depend on
it, so that a long row's are spread over the device instead of holding up all others.

A cache in FP8 is passed as the bytes of its codes, `kv`, and as `scales`, in the same memory; else
these are None.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, R rows, G query heads
that share a key head, D head_dim, S segments of all rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from kernels.attention.triton_heads import (
    normalised,
    prepared,
    store_codes,
    store_parts,
    widened,
)
from kernels.elementwise.triton_kernels import plus_addend

# Their values change from step to step: none is worth a compilation.
VARYING = ("num_rows", "num_tokens", "tokens_each", "pair_stride")
LOG2_E = tl.constexpr(1.4426950408889634)
SCALE_BYTES = tl.constexpr(4)
WIDENED_SHARE = tl.constexpr(256.0)


@triton.jit
def norm_rows_kernel(
    x, weight, eps, x_stride, SIZE: tl.constexpr, OF_TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """RMSNorm of rows [SIZE] that lie `x_stride` apart, in place; the product with the weight, or,
    OF_TOKENS, with the row's own, is in the weight's dtype. Grid: (rows,)."""
    p_x = x + tl.program_id(0).to(tl.int64) * x_stride
    o = tl.arange(0, BLOCK)
    m = o < SIZE
    # [BLOCK]
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
    b_x *= 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / SIZE + eps)
    p_weight = weight
    if OF_TOKENS:
        p_weight += tl.program_id(0).to(tl.int64) * SIZE
    b_weight = tl.load(p_weight + o, mask=m, other=0.0)
    b_out = b_x.to(weight.dtype.element_ty).to(tl.float32) * b_weight.to(tl.float32)
    tl.store(p_x + o, b_out.to(x.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=VARYING)
def rotary_angles_kernel(
    cos, sin, positions, inverse_frequencies, scaling, pair_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `reference.rotary_angles`. cos, sin: [T, 2 * HALF]. Each next pair's positions lie
    `pair_stride` behind, or are the same (0). Grid: (T,)."""
    i_token = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < HALF
    dtype = cos.dtype.element_ty
    # [BLOCK]
    b_frequency = tl.load(inverse_frequencies + o, mask=m, other=0.0)
    p_positions = positions + i_token + o.to(tl.int64) * pair_stride
    b_angle = tl.load(p_positions, mask=m, other=0).to(tl.float32) * b_frequency
    b_cos = (tl.cos(b_angle) * scaling).to(dtype)
    b_sin = (tl.sin(b_angle) * scaling).to(dtype)
    o_out = i_token * (2 * HALF) + o
    tl.store(cos + o_out, b_cos, mask=m)
    tl.store(cos + o_out + HALF, b_cos, mask=m)
    tl.store(sin + o_out, -b_sin, mask=m)
    tl.store(sin + o_out + HALF, b_sin, mask=m)


@triton.jit(do_not_specialize=VARYING)
def store_kernel(
    qkv, kv, scales, cells, cos, sin, q_norm, k_norm, v_norm, q_scale, addend, slots, num_tokens,
    tokens_each, eps, qkv_stride, page_stride, head_stride, side_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    NORMS_ROTATED: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
    Q_OF_TOKENS: tl.constexpr, K_OF_TOKENS: tl.constexpr, V_OF_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Norms and rotates q in place; norms and rotates k, norms v, and puts k and v into their
    cells.

    qkv: [T, (NUM_HEADS + 2 * NUM_KV_HEADS) * D], or, VALUES_ARE_KEYS, without v; kv, scales: one
    layer of the cache; cells int64 [T]; cos, sin: [T, 2 * HALF], or None; q_norm, k_norm, v_norm:
    [D], or None, or, OF_TOKENS, [T, D]; q_scale: [T], or None. addend: as qkv, its rows as far
    apart, and slots: [T], or None: added before anything else. A head is two parts that turn with
    each other, HALF each, and what does not turn. Grid: (programs of `tokens_each` tokens, heads of
    q, k and v; of q alone: nothing is stored).

    A program computes its tokens one after the other. The same instructions compute one token and
    many, so a token's bits do not depend on their number.
    """
    i_h = tl.program_id(1)
    i_read = i_h
    if VALUES_ARE_KEYS and i_h >= NUM_HEADS + NUM_KV_HEADS:
        i_read = i_h - NUM_KV_HEADS
    o_d = tl.arange(0, BLOCK_H)
    m_d = o_d < HALF
    o_1 = 2 * o_d if IS_INTERLEAVED else o_d
    o_2 = 2 * o_d + 1 if IS_INTERLEAVED else HALF + o_d
    o_3 = 2 * HALF + tl.arange(0, BLOCK_R)
    m_3 = o_3 < D
    dtype = qkv.dtype.element_ty
    for i_token in range(tokens_each):
        o_t = tl.program_id(0) * tokens_each + i_token + tl.arange(0, 1)
        m_t = o_t < num_tokens
        m_block = m_t[:, None] & m_d[None, :]
        m_rest = m_t[:, None] & m_3[None, :]
        o_t = o_t.to(tl.int64)
        # [1, BLOCK_H] twice, [1, BLOCK_R]
        p_x = qkv + o_t[:, None] * qkv_stride + i_read * D
        b_x1 = tl.load(p_x + o_1[None, :], mask=m_block, other=0.0).to(tl.float32)
        b_x2 = tl.load(p_x + o_2[None, :], mask=m_block, other=0.0).to(tl.float32)
        b_x3 = tl.zeros([1, BLOCK_R], dtype=tl.float32)
        if 2 * HALF < D:
            b_x3 = tl.load(p_x + o_3[None, :], mask=m_rest, other=0.0).to(tl.float32)
        if addend is not None:
            has_adapter = (tl.load(slots + o_t, mask=m_t, other=-1) >= 0)[:, None]
            p_addend = addend + o_t[:, None] * qkv_stride + i_read * D
            b_x1 = plus_addend(b_x1, p_addend + o_1[None, :], m_block, has_adapter, dtype)
            b_x2 = plus_addend(b_x2, p_addend + o_2[None, :], m_block, has_adapter, dtype)
            if 2 * HALF < D:
                b_x3 = plus_addend(b_x3, p_addend + o_3[None, :], m_rest, has_adapter, dtype)
        if i_h < NUM_HEADS:
            b_x1, b_x2, b_x3 = prepared(
                b_x1, b_x2, b_x3, q_norm, cos, sin, o_t, m_t, o_d, o_1, o_2, o_3,
                m_d, m_3, eps, dtype, D, HALF, NORMS_ROTATED, Q_OF_TOKENS,
            )  # fmt: skip
            if q_scale is not None:
                b_scale = tl.load(q_scale + o_t, mask=m_t, other=0.0).to(tl.float32)[:, None]
                b_x1 = b_x1.to(dtype).to(tl.float32) * b_scale
                b_x2 = b_x2.to(dtype).to(tl.float32) * b_scale
                b_x3 = b_x3.to(dtype).to(tl.float32) * b_scale
            store_parts(p_x, b_x1, b_x2, b_x3, o_1, o_2, o_3, m_block, m_rest, D, HALF)
        else:
            i_kv = i_h - NUM_HEADS
            i_side = i_kv // NUM_KV_HEADS
            if i_side == 0:
                b_x1, b_x2, b_x3 = prepared(
                    b_x1, b_x2, b_x3, k_norm, cos, sin, o_t, m_t, o_d, o_1, o_2,
                    o_3, m_d, m_3, eps, dtype, D, HALF, NORMS_ROTATED, K_OF_TOKENS,
                )  # fmt: skip
            elif v_norm is not None:
                b_x1, b_x2, b_x3 = normalised(
                    b_x1, b_x2, b_x3, v_norm, o_t, m_t, o_1, o_2, o_3, m_d, m_3, eps, D, V_OF_TOKENS
                )  # fmt: skip
            b_cell = tl.load(cells + o_t, mask=m_t, other=0)
            o_cell = (b_cell // PAGE_SIZE) * page_stride + (b_cell % PAGE_SIZE) * D
            o_cell += (i_kv % NUM_KV_HEADS) * head_stride + i_side * side_stride
            p_kv = kv + o_cell[:, None]
            if scales is None:
                store_parts(p_kv, b_x1, b_x2, b_x3, o_1, o_2, o_3, m_block, m_rest, D, HALF)
            else:
                o_scale = (b_cell // PAGE_SIZE) * (page_stride // SCALE_BYTES)
                o_scale += (i_kv % NUM_KV_HEADS) * (head_stride // SCALE_BYTES)
                p_scale = scales + o_scale + i_side * PAGE_SIZE + b_cell % PAGE_SIZE
                store_codes(
                    p_kv, p_scale, b_x1, b_x2, b_x3, o_1, o_2, o_3, m_t, m_block, m_rest,
                    dtype, D, HALF,
                )  # fmt: skip


@triton.jit
def load_pair(
    p_kv, p_pages, o_n, m_n, o_d, m_d, page_stride, side_stride,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, BLOCK_D] of the positions `o_n` of one row and key head."""
    b_page = tl.load(p_pages + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
    p_k = p_kv + (b_page * page_stride + (o_n % PAGE_SIZE) * D)[:, None] + o_d[None, :]
    m_kv = m_n[:, None] & m_d[None, :]
    b_k = tl.load(p_k, mask=m_kv, other=0.0)
    b_v = tl.load(p_k + side_stride, mask=m_kv, other=0.0)
    return b_k, b_v


@triton.jit
def load_scales(p_scales, p_pages, o_n, m_n, page_stride, PAGE_SIZE: tl.constexpr):
    """The scales of keys and values [BLOCK_N] of the positions `o_n` of one row and key head."""
    b_page = tl.load(p_pages + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
    p_key = p_scales + b_page * (page_stride // SCALE_BYTES) + o_n % PAGE_SIZE
    b_ks = tl.load(p_key, mask=m_n, other=0.0)
    b_vs = tl.load(p_key + PAGE_SIZE, mask=m_n, other=0.0)
    return b_ks * WIDENED_SHARE, b_vs * WIDENED_SHARE


@triton.jit
def attended(
    b_acc, b_max, b_sum, b_q, b_k, b_v, b_ks, b_vs, m_seen, scale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One more block of keys and values in a running softmax (base 2), and their scales, or None.
    SOFTCAP 0: none."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if b_ks is not None:
        b_s *= b_ks[None, :]
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + e^(2x))
        b_tanh = 1.0 - 2.0 / (1.0 + tl.exp(b_s * (2.0 * scale / SOFTCAP)))
        b_s = b_tanh * (SOFTCAP * LOG2_E)
    else:
        b_s *= scale * LOG2_E
    b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    # A query that has seen nothing yet has no maximum.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_keep = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_keep + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_keep[:, None]
    if b_vs is not None:
        b_p *= b_vs[None, :]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    parts, lses, q, kv, scales, query_starts, context_lengths, table_rows, page_table,
    segment_starts, num_rows, scale, q_stride, table_stride, page_stride, head_stride, side_stride,
    NUM_KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of one query: the G heads of one key head over one segment of a context, and then the
    next one that is this program's.

    q: [T, heads, D]; segment_starts: int32 [R + 1]; parts [S, heads, D] and lses [S, heads], fp32,
    have room for the S that `segment_starts` ends with. WINDOW 0: none. Grid: any (n,).
    """
    o_r = tl.arange(0, BLOCK_ROWS)
    num_items = tl.load(segment_starts + num_rows) * NUM_KV_HEADS
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m_q = (o_g < G)[:, None] & m_d[None, :]
    for i_item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i_segment = i_item // NUM_KV_HEADS
        i_h = i_item % NUM_KV_HEADS
        # Read for each item: to keep it would take registers that fewer programs per SM have.
        b_end = tl.load(segment_starts + 1 + o_r, mask=o_r < num_rows, other=0x7FFFFFFF)
        i_r = tl.sum((b_end <= i_segment).to(tl.int32), axis=0)
        first_segment = tl.load(segment_starts + i_r)
        num_segments = tl.load(segment_starts + i_r + 1) - first_segment
        context = tl.load(context_lengths + i_r)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(context - WINDOW, 0)
        first_block = first // BLOCK_N
        share = tl.cdiv(tl.cdiv(context, BLOCK_N) - first_block, num_segments)
        begin = (first_block + (i_segment - first_segment) * share) * BLOCK_N
        end = tl.minimum(begin + share * BLOCK_N, context)

        o_head = i_h * G + o_g
        token = tl.load(query_starts + i_r).to(tl.int64)
        p_q = q + token * q_stride + o_head[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q, mask=m_q, other=0.0)
        p_pages = page_table + tl.load(table_rows + i_r).to(tl.int64) * table_stride
        p_kv = kv + i_h * head_stride
        b_acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
        b_max = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_G], dtype=tl.float32)
        for start in tl.range(begin, end, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_n = (o_n < end) & (o_n >= first)
            b_k, b_v = load_pair(
                p_kv, p_pages, o_n, m_n, o_d, m_d, page_stride, side_stride, PAGE_SIZE, D
            )  # fmt: skip
            b_ks = None
            b_vs = None
            if scales is not None:
                p_scales = scales + i_h * (head_stride // SCALE_BYTES)
                b_ks, b_vs = load_scales(p_scales, p_pages, o_n, m_n, page_stride, PAGE_SIZE)
                b_k, b_v = widened(b_k, b_q.dtype), widened(b_v, b_q.dtype)
            b_acc, b_max, b_sum = attended(
                b_acc, b_max, b_sum, b_q, b_k, b_v, b_ks, b_vs, m_n[None, :], scale,
                SOFTCAP, PRECISION,
            )  # fmt: skip
        # A segment without positions, before the window or behind the last block, has the weight 0.
        b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        o_part = i_segment.to(tl.int64) * (NUM_KV_HEADS * G) + o_head
        tl.store(parts + o_part[:, None] * D + o_d[None, :], b_out, mask=m_q)
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(lses + o_part, b_lse, mask=o_g < G)


@triton.jit
def combine_kernel(
    out, parts, lses, sinks, query_starts, segment_starts,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, MAX_SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = the parts of a row's segments, weighted by 2 ** lse, beside a head's sink, once for all
    of them. Rows without segments are left alone. out: [T, heads, D]; sinks: fp32 [heads], or None.
    Grid: (R, heads)."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    first_segment = tl.load(segment_starts + i_r)
    num_segments = tl.load(segment_starts + i_r + 1) - first_segment
    if num_segments == 0:
        return
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_lse = lses + first_segment.to(tl.int64) * NUM_HEADS + i_h
    o_all = tl.arange(0, MAX_SEGMENTS)
    b_all = tl.load(p_lse + o_all * NUM_HEADS, mask=o_all < num_segments, other=float("-inf"))
    largest = tl.max(b_all, axis=0)
    b_sum = tl.zeros([BLOCK_S], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in tl.range(0, num_segments, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        m_s = o_s < num_segments
        b_lse = tl.load(p_lse + o_s * NUM_HEADS, mask=m_s, other=float("-inf"))
        b_weight = tl.exp2(b_lse - largest)
        # [BLOCK_S, BLOCK_D]
        o_part = (first_segment + o_s).to(tl.int64) * NUM_HEADS + i_h
        p_part = parts + o_part[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)
        b_out += tl.sum(b_part * b_weight[:, None], axis=0)
        b_sum += b_weight
    total = tl.sum(b_sum, axis=0)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + i_h) * LOG2_E - largest)
    b_out = b_out / total
    token = tl.load(query_starts + i_r).to(tl.int64)
    p_out = out + (token * NUM_HEADS + i_h) * D + o_d
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_d)


@triton.jit
def attend_block(
    b_acc, b_max, b_sum, b_q, b_k, b_v, b_ks, b_vs, m_seen, scale,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Does the same as `attended`, without soft caps. A block gives the same bits with a mask that
    leaves out nothing and without one."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if b_ks is not None:
        b_s *= b_ks[None, :]
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1) * (scale * LOG2_E))
    b_base = b_new
    if MASKED:
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    # Written out: the compiler might fuse the two in one of the loops alone.
    b_p = tl.exp2(tl.fma(b_s, scale * LOG2_E, -b_base[:, None]))
    b_keep = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_keep + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_keep[:, None]
    if b_vs is not None:
        b_p *= b_vs[None, :]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit
def attend_blocks(
    b_acc, b_max, b_sum, b_q, p_kv, p_scales, p_pages, b_position, b_last, begin, end, scale,
    page_stride, side_stride,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds blocks of the positions from `begin` to `end` to a running softmax. Queries at
    `b_position` [BLOCK_M] see those up to `b_last`."""
    o_d = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_k, b_v = load_pair(
            p_kv, p_pages, o_n, o_n < end, o_d, o_d < D, page_stride, side_stride, PAGE_SIZE, D
        )  # fmt: skip
        b_ks = None
        b_vs = None
        if p_scales is not None:
            b_ks, b_vs = load_scales(p_scales, p_pages, o_n, o_n < end, page_stride, PAGE_SIZE)
            b_k, b_v = widened(b_k, b_q.dtype), widened(b_v, b_q.dtype)
        # No query of the row sees more than its context: this leaves out what lies there, too.
        m_seen = o_n[None, :] <= b_last[:, None]
        if WINDOW > 0:
            m_seen = m_seen & (o_n[None, :] > b_position[:, None] - WINDOW)
        if SOFTCAP > 0 or b_q.dtype == tl.float32:  # which are never whole: see `prefill_kernel`
            b_acc, b_max, b_sum = attended(
                b_acc, b_max, b_sum, b_q, b_k, b_v, b_ks, b_vs, m_seen, scale, SOFTCAP, PRECISION
            )  # fmt: skip
        else:
            b_acc, b_max, b_sum = attend_block(
                b_acc, b_max, b_sum, b_q, b_k, b_v, b_ks, b_vs, m_seen, scale, True, PRECISION
            )  # fmt: skip
    return b_acc, b_max, b_sum


@triton.jit
def attend_whole_blocks(
    b_acc, b_max, b_sum, b_q, p_kv, p_scales, p_pages, begin, end, scale, page_stride, side_stride,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Does the same as `attend_blocks` without masks, for whole blocks that all queries see."""
    o_d = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_page = tl.load(p_pages + o_n // PAGE_SIZE).to(tl.int64)
        p_k = p_kv + (b_page * page_stride + (o_n % PAGE_SIZE) * D)[:, None] + o_d[None, :]
        if BLOCK_D == D:
            b_k, b_v = tl.load(p_k), tl.load(p_k + side_stride)
        else:
            m_d = (o_d < D)[None, :]
            b_k = tl.load(p_k, mask=m_d, other=0.0)
            b_v = tl.load(p_k + side_stride, mask=m_d, other=0.0)
        b_ks = None
        b_vs = None
        if p_scales is not None:
            b_ks, b_vs = load_scales(p_scales, p_pages, o_n, o_n < end, page_stride, PAGE_SIZE)
            b_k, b_v = widened(b_k, b_q.dtype), widened(b_v, b_q.dtype)
        b_acc, b_max, b_sum = attend_block(
            b_acc, b_max, b_sum, b_q, b_k, b_v, b_ks, b_vs, None, scale, False, PRECISION
        )  # fmt: skip
    return b_acc, b_max, b_sum


@triton.jit
def prefill_kernel(
    out, q, kv, scales, sinks, ends, tiles, query_starts, context_lengths, table_rows, page_table,
    scale, q_stride, table_stride, page_stride, head_stride, side_stride,
    NUM_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M neighbouring queries of one row and head over all that they see.

    sinks: fp32 [NUM_HEADS], or None; ends: int32 [T], as in `AttentionPlan`, or None; tiles: int32
    [n, 2], row and first query in it; behind the row's last query a tile is empty. PARTS programs
    compute a tile. Grid: (NUM_HEADS, n * PARTS): heads that share keys run beside each other, and
    the last tiles, which are the longest of a prompt, begin first.
    """
    i_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    i_r = tl.load(tiles + i_tile // PARTS * 2)
    first_query = tl.load(tiles + i_tile // PARTS * 2 + 1) + i_tile % PARTS * BLOCK_M
    i_h = tl.program_id(0)
    row_start = tl.load(query_starts + i_r)
    num_queries = tl.load(query_starts + i_r + 1) - row_start
    if first_query >= num_queries:
        return
    context = tl.load(context_lengths + i_r)

    o_m = first_query + tl.arange(0, BLOCK_M)
    b_position = context - num_queries + o_m
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m_q = (o_m < num_queries)[:, None] & m_d[None, :]
    o_token = (row_start + o_m).to(tl.int64)
    p_q = q + o_token[:, None] * q_stride + i_h * D + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    p_pages = page_table + tl.load(table_rows + i_r).to(tl.int64) * table_stride
    p_kv = kv + (i_h // G) * head_stride
    p_scales = None
    if scales is not None:
        p_scales = scales + (i_h // G) * (head_stride // SCALE_BYTES)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    first_position = context - num_queries + first_query
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    elif SOFTCAP == 0 and q.dtype.element_ty.primitive_bitwidth == 16:
        # Soft caps are not in it; and in fp32 it would spill.
        begin = (first_position + 1) // BLOCK_N * BLOCK_N
        b_acc, b_max, b_sum = attend_whole_blocks(
            b_acc, b_max, b_sum, b_q, p_kv, p_scales, p_pages, 0, begin, scale, page_stride,
            side_stride, PAGE_SIZE, D, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    b_last = b_position
    end = tl.minimum(first_position + BLOCK_M, context)
    if ends is not None:
        b_end = tl.load(ends + o_token, mask=o_m < num_queries, other=0)
        b_last = tl.maximum(b_position, b_end - 1)
        end = tl.maximum(end, tl.max(b_end, axis=0))
    b_acc, b_max, b_sum = attend_blocks(
        b_acc, b_max, b_sum, b_q, p_kv, p_scales, p_pages, b_position, b_last, begin, end, scale,
        page_stride, side_stride, PAGE_SIZE, D, WINDOW, SOFTCAP, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    if sinks is not None:
        # Infinite, where all scores are far below the sink: the quotient is then 0.
        b_sum += tl.exp2(tl.load(sinks + i_h) * LOG2_E - b_max)
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_out = out + (o_token * NUM_HEADS + i_h)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_q)
