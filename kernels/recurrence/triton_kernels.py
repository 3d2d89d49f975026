"""The Triton kernels of recurrences.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, R rows, S segments, H
value heads, K and V elements of keys and values. Segments are as in `segments.DeviceSegments`: a
slot below 0 is written by none.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from kernels.recurrence.reference import L2_EPS as EPS_OF_LENGTHS

L2_EPS = tl.constexpr(EPS_OF_LENGTHS)
CHUNK = tl.constexpr(16)
"""Tokens that are computed at once: as few as tensor cores multiply. With more, the products of
their own grow, and nothing fits the registers."""

VARYING = ("num_tokens", "num_heads")
"""They change from step to step, or are no reason to compile."""


@triton.jit
def sigmoid(b_x):
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit(do_not_specialize=VARYING)
def causal_conv_kernel(
    out, x, weight, states, tokens, num_tokens, x_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """See `reference.causal_conv` or, IS_GATED, `gated_conv`. x: [T, CHANNELS], or three times as
    many, rows so far apart; out: [T, CHANNELS]; weight: fp32 [CHANNELS, SIZE]; states: fp32 [slots,
    SIZE - 1, CHANNELS]; tokens: int32 [T, 3]. Each token computes alone, and a segment's last one
    writes its state. Grid: (blocks of tokens, blocks of channels)."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_t = o_t < num_tokens
    m_c = (o_c < CHANNELS)[None, :]
    dtype = out.dtype.element_ty
    b_before = tl.load(tokens + o_t * 3, mask=m_t, other=0)
    b_read = tl.load(tokens + o_t * 3 + 1, mask=m_t, other=0).to(tl.int64)
    b_written = tl.load(tokens + o_t * 3 + 2, mask=m_t, other=-1).to(tl.int64)
    p_read = states + (b_read * ((SIZE - 1) * CHANNELS))[:, None] + o_c[None, :]
    p_written = states + (b_written * ((SIZE - 1) * CHANNELS))[:, None] + o_c[None, :]
    m_written = (b_written >= 0)[:, None] & m_c
    # [BLOCK_T, BLOCK_C]
    b_sum = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for j in tl.static_range(SIZE):
        # The state has the inputs before the row's first token, in order.
        b_back = SIZE - 1 - j
        m_new = (b_before >= b_back) & m_t
        p_x = x + (o_t - b_back).to(tl.int64)[:, None] * x_stride + o_c[None, :]
        b_new = tl.load(p_x, mask=m_new[:, None] & m_c, other=0.0).to(tl.float32)
        if IS_GATED:
            b_x = tl.load(p_x + 2 * CHANNELS, mask=m_new[:, None] & m_c, other=0.0)
            b_new = (b_new * b_x.to(tl.float32)).to(dtype).to(tl.float32)
        p_old = p_read + ((b_before + j) * CHANNELS)[:, None]
        b_old = tl.load(p_old, mask=(~m_new & m_t)[:, None] & m_c, other=0.0)
        b_in = tl.where(m_new[:, None], b_new, b_old)
        b_weight = tl.load(weight + o_c * SIZE + j, mask=o_c < CHANNELS, other=0.0)
        b_sum += b_weight[None, :] * b_in
        if j > 0:
            tl.store(p_written + (j - 1) * CHANNELS, b_in, mask=m_written)
    b_sum = b_sum.to(dtype).to(tl.float32)
    if IS_GATED:
        p_gate = x + o_t.to(tl.int64)[:, None] * x_stride + CHANNELS + o_c[None, :]
        b_sum *= tl.load(p_gate, mask=m_t[:, None] & m_c, other=0.0).to(tl.float32)
    else:
        b_sum *= sigmoid(b_sum)
    p_out = out + o_t.to(tl.int64)[:, None] * CHANNELS + o_c[None, :]
    tl.store(p_out, b_sum.to(dtype), mask=m_t[:, None] & m_c)


@triton.jit
def gates(p_b, p_a, log_rate, bias, i_h, m):
    """How much of a correction is made, and the logarithm of the state's decay: of one token, or of
    a block of them. They are 0 for tokens that `m` leaves out."""
    dtype = p_b.dtype.element_ty
    b_beta = sigmoid(tl.load(p_b, mask=m, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    b_x = tl.load(p_a, mask=m, other=0.0).to(tl.float32) + tl.load(bias + i_h)
    b_softplus = tl.where(b_x > 20.0, b_x, tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0))))
    b_decay = -tl.exp(tl.load(log_rate + i_h)) * b_softplus
    return tl.where(m, b_beta, 0.0), tl.where(m, b_decay, 0.0)


@triton.jit
def delta_token(b_state, b_q, b_k, b_v, beta, decay, scale):
    """The state behind a token, [BLOCK_K, BLOCK_V], and its output."""
    b_q *= scale / tl.sqrt(tl.sum(b_q * b_q, axis=0) + L2_EPS)
    b_k *= 1.0 / tl.sqrt(tl.sum(b_k * b_k, axis=0) + L2_EPS)
    b_state *= tl.exp(decay)
    b_delta = (b_v - tl.sum(b_k[:, None] * b_state, axis=0)) * beta
    b_state += b_k[:, None] * b_delta[None, :]
    return b_state, tl.sum(b_q[:, None] * b_state, axis=0)


@triton.jit(do_not_specialize=VARYING)
def delta_step_kernel(
    out, qkv, b, a, log_rate, bias, states, firsts, starts, read, written, gate_stride, scale,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OF_ALL: tl.constexpr,
):  # fmt: skip
    """See `reference.delta_rule`: the rows of one token or, OF_ALL, of any number, a token after
    the other. qkv: [T, q, k and v of all heads]; b, a: [T, H], rows so far apart; log_rate, bias:
    fp32 [H]; states: fp32 [slots, H, K, V]; out: [T, H * V]. Grid: (R, H, blocks of values)."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    first_segment, last_segment = tl.load(firsts + i_r), tl.load(firsts + i_r + 1)
    num_tokens = tl.load(starts + last_segment) - tl.load(starts + first_segment)
    if num_tokens == 0 or (num_tokens > 1 and not OF_ALL):
        return
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    p_states = states + i_h * (K * V) + o_k[:, None] * V + o_v[None, :]
    slot = tl.load(read + first_segment).to(tl.int64)
    b_state = tl.load(p_states + slot * (NUM_VALUE_HEADS * K * V), mask=m_state, other=0.0)
    KEYS: tl.constexpr = NUM_KEY_HEADS * K
    p_head = qkv + i_h // (NUM_VALUE_HEADS // NUM_KEY_HEADS) * K + o_k
    p_value = qkv + 2 * KEYS + i_h * V + o_v
    for i_segment in tl.range(first_segment, last_segment):
        begin = tl.load(starts + i_segment)
        for i_token in tl.range(0, tl.load(starts + i_segment + 1) - begin):
            token = begin.to(tl.int64) + i_token
            o_row = token * (2 * KEYS + NUM_VALUE_HEADS * V)
            b_q = tl.load(p_head + o_row, mask=m_k, other=0.0).to(tl.float32)
            b_k = tl.load(p_head + o_row + KEYS, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(p_value + o_row, mask=m_v, other=0.0).to(tl.float32)
            o_gate = token * gate_stride + i_h
            beta, decay = gates(b + o_gate, a + o_gate, log_rate, bias, i_h, token >= 0)
            b_state, b_out = delta_token(b_state, b_q, b_k, b_v, beta, decay, scale)
            p_out = out + (token * NUM_VALUE_HEADS + i_h) * V + o_v
            tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_v)
        slot = tl.load(written + i_segment).to(tl.int64)
        if slot >= 0:
            tl.store(p_states + slot * (NUM_VALUE_HEADS * K * V), b_state, mask=m_state)


@triton.jit
def solved(b_system, b_wanted, PRECISION: tl.constexpr):
    """The x of (1 + system) x = wanted, for a `system` [CHUNK, CHUNK] that is 0 on its diagonal and
    above. It is inverted row by row: powers of it would be huge where keys are the same."""
    o = tl.arange(0, CHUNK)
    b_inverse = -b_system
    for i in tl.static_range(2, CHUNK):
        m_row = (o == i)[:, None]
        b_row = tl.sum(tl.where(m_row, b_system, 0.0), axis=0)
        # Row i of the system is 0 from column i on, so that only rows before it count.
        b_made = -b_row - tl.sum(b_row[:, None] * b_inverse, axis=0)
        b_inverse = tl.where(m_row, b_made[None, :], b_inverse)
    return b_wanted + tl.dot(b_inverse, b_wanted, input_precision=PRECISION)


@triton.jit
def delta_chunk(
    b_state, out, p_head, p_value, p_b, p_a, log_rate, bias, start, end, i_h, gate_stride, scale,
    m_k, m_v, ROW: tl.constexpr, KEYS: tl.constexpr, OUT_ROW: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the state after a chunk of tokens from `start` on, up to `end`; stores their outputs.
    The pointers are of the head, for token 0."""
    o_c = tl.arange(0, CHUNK)
    o_t = (start + o_c).to(tl.int64)
    m_t = start + o_c < end
    m_q = m_t[:, None] & m_k[None, :]
    m_o = m_t[:, None] & m_v[None, :]
    # [CHUNK, BLOCK_K], [CHUNK, BLOCK_V], [CHUNK]
    p_q = p_head + o_t[:, None] * ROW
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_k = tl.load(p_q + KEYS, mask=m_q, other=0.0)
    b_v = tl.load(p_value + o_t[:, None] * ROW, mask=m_o, other=0.0).to(tl.float32)
    b_beta, b_decay = gates(
        p_b + o_t * gate_stride, p_a + o_t * gate_stride, log_rate, bias, i_h, m_t
    )
    b_wide = b_q.to(tl.float32)
    b_of_q = scale / tl.sqrt(tl.sum(b_wide * b_wide, axis=1) + L2_EPS)
    b_wide = b_k.to(tl.float32)
    b_of_k = 1.0 / tl.sqrt(tl.sum(b_wide * b_wide, axis=1) + L2_EPS)
    b_total = tl.cumsum(b_decay, axis=0)
    b_from_start = tl.exp(b_total)
    last = tl.sum(b_decay, axis=0)
    # From token j to token i, [CHUNK, CHUNK]; later ones have no part in earlier ones.
    m_before = o_c[:, None] > o_c[None, :]
    m_seen = o_c[:, None] >= o_c[None, :]
    b_between = tl.exp(tl.where(m_seen, b_total[:, None] - b_total[None, :], 0.0)) * b_of_k[None, :]
    b_keys = tl.trans(b_k)
    b_system = tl.dot(b_k, b_keys, input_precision=PRECISION) * (b_of_k * b_beta)[:, None]
    b_system = tl.where(m_before, b_system * b_between, 0.0)
    b_seen = tl.dot(b_k.to(tl.float32), b_state, input_precision=PRECISION)
    b_wanted = b_v * b_beta[:, None] - b_seen * (b_of_k * b_beta * b_from_start)[:, None]
    b_deltas = solved(b_system, b_wanted, SOLVE_PRECISION)
    b_scores = tl.dot(b_q, b_keys, input_precision=PRECISION) * b_of_q[:, None]
    b_scores = tl.where(m_seen, b_scores * b_between, 0.0)
    b_out = tl.dot(b_q.to(tl.float32), b_state, input_precision=PRECISION)
    b_out *= (b_of_q * b_from_start)[:, None]
    b_out += tl.dot(b_scores, b_deltas, input_precision=PRECISION)
    tl.store(out + o_t[:, None] * OUT_ROW, b_out.to(out.dtype.element_ty), mask=m_o)
    b_deltas *= (b_of_k * tl.exp(last - b_total))[:, None]
    b_keys = b_keys.to(tl.float32)
    return b_state * tl.exp(last) + tl.dot(b_keys, b_deltas, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def delta_chunks_kernel(
    out, qkv, b, a, log_rate, bias, states, firsts, starts, read, written, gate_stride, scale,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """See `reference.delta_rule`: the rows of several tokens, a chunk after the other, with the
    state in registers. Shapes and grid as of `delta_step_kernel`."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    first_segment, last_segment = tl.load(firsts + i_r), tl.load(firsts + i_r + 1)
    if tl.load(starts + last_segment) - tl.load(starts + first_segment) < 2:
        return
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    p_states = states + i_h * (K * V) + o_k[:, None] * V + o_v[None, :]
    slot = tl.load(read + first_segment).to(tl.int64)
    b_state = tl.load(p_states + slot * (NUM_VALUE_HEADS * K * V), mask=m_state, other=0.0)
    KEYS: tl.constexpr = NUM_KEY_HEADS * K
    ROW: tl.constexpr = 2 * KEYS + NUM_VALUE_HEADS * V
    i_key_head = i_h // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    p_head = qkv + i_key_head * K + o_k[None, :]
    p_value = qkv + 2 * KEYS + i_h * V + o_v[None, :]
    p_out = out + i_h * V + o_v[None, :]
    for i_segment in tl.range(first_segment, last_segment):
        end = tl.load(starts + i_segment + 1)
        for start in tl.range(tl.load(starts + i_segment), end, CHUNK):
            b_state = delta_chunk(
                b_state, p_out, p_head, p_value, b + i_h, a + i_h, log_rate, bias, start, end, i_h,
                gate_stride, scale, m_k, m_v, ROW, KEYS, NUM_VALUE_HEADS * V,
                PRECISION, SOLVE_PRECISION,
            )  # fmt: skip
        slot = tl.load(written + i_segment).to(tl.int64)
        if slot >= 0:
            tl.store(p_states + slot * (NUM_VALUE_HEADS * K * V), b_state, mask=m_state)


@triton.jit(do_not_specialize=VARYING)
def gated_norm_kernel(
    x, gate, weight, eps, num_heads, gate_stride,
    SIZE: tl.constexpr, OF_TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """See `reference.gated_norm`, in place. x: [T, heads * SIZE]; gate: as x, rows so far apart;
    weight: [SIZE], or, OF_TOKENS, [T, SIZE]. Grid: (T, blocks of heads)."""
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o = tl.arange(0, BLOCK_S)
    m_s = o < SIZE
    m = (o_h < num_heads)[:, None] & m_s[None, :]
    dtype = x.dtype.element_ty
    o_head = o_h[:, None] * SIZE + o[None, :]
    # [BLOCK_H, BLOCK_S]
    p_x = x + i_token * num_heads * SIZE + o_head
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_x *= (1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / SIZE + eps))[:, None]
    p_weight = weight
    if OF_TOKENS:
        p_weight += i_token * SIZE
    b_weight = tl.load(p_weight + o, mask=m_s, other=0.0).to(tl.float32)
    b_scaled = (b_weight[None, :] * b_x.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    b_gate = tl.load(gate + i_token * gate_stride + o_head, mask=m, other=0.0).to(tl.float32)
    tl.store(p_x, (b_scaled * (b_gate * sigmoid(b_gate))).to(dtype), mask=m)


@triton.jit
def gate_heads_kernel(x, gate, SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """See `reference.gate_heads`, in place. Both: [T, SIZE]. Grid: (T, blocks)."""
    i_token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    m = o < SIZE
    dtype = x.dtype.element_ty
    b_x = tl.load(x + i_token * SIZE + o, mask=m, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + i_token * SIZE + o, mask=m, other=0.0).to(tl.float32)
    b_gate = sigmoid(b_gate).to(dtype).to(tl.float32)
    tl.store(x + i_token * SIZE + o, (b_x * b_gate).to(dtype), mask=m)
