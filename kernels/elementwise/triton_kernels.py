"""The Triton kernels of what lies between the projections: each is one pass over its rows.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, N rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def plus_addend(b_x, p_addend, m, has_adapter, dtype):
    """b_x, fp32 values of `dtype`, plus their part of an `Addend`, rounded to it; of tokens without
    an adapter b_x itself."""
    b_addend = tl.load(p_addend, mask=m, other=0.0).to(tl.float32)
    return tl.where(has_adapter, (b_x + b_addend).to(dtype).to(tl.float32), b_x)


@triton.jit
def add_rms_norm_kernel(
    out, hidden, delta, weight, bias, rows, addend, slots, eps, delta_scale, sum_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_SCALED: tl.constexpr, IS_CENTRED: tl.constexpr,
    ROWS_PER_WEIGHT: tl.constexpr,
):  # fmt: skip
    """See `reference.add_rms_norm`. hidden, delta, addend: [T, SIZE]; slots: [T]; out: [N,
    SIZE]; `delta`, `bias`, `rows`, `addend` with `slots` may be None. weight and bias: [SIZE], or
    one for each ROWS_PER_WEIGHT rows of `out`. Grid: (N,)."""
    i_out = tl.program_id(0).to(tl.int64)
    i_row = i_out if rows is None else tl.load(rows + i_out)
    o = tl.arange(0, BLOCK)
    m = o < SIZE
    dtype = hidden.dtype.element_ty
    # [BLOCK]
    b_x = tl.load(hidden + i_row * SIZE + o, mask=m, other=0.0).to(tl.float32)
    if addend is not None:
        has_adapter = tl.load(slots + i_row) >= 0
        if delta is None:
            b_x = plus_addend(b_x, addend + i_row * SIZE + o, m, has_adapter, dtype)
    if delta is not None:
        b_delta = tl.load(delta + i_row * SIZE + o, mask=m, other=0.0).to(tl.float32)
        if addend is not None:
            b_delta = plus_addend(b_delta, addend + i_row * SIZE + o, m, has_adapter, dtype)
        if IS_SCALED:
            b_delta = (b_delta * delta_scale).to(dtype).to(tl.float32)
        b_x += b_delta
        b_sum = b_x.to(dtype)
        if IS_SCALED:
            b_sum = (b_sum.to(tl.float32) * sum_scale).to(dtype)
        if rows is None:
            tl.store(hidden + i_row * SIZE + o, b_sum, mask=m)
        b_x = b_sum.to(tl.float32)
    if IS_CENTRED:
        b_x = tl.where(m, b_x - tl.sum(b_x, axis=0) / SIZE, 0.0)
    b_x *= 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / SIZE + eps)
    o_weight = o
    if ROWS_PER_WEIGHT > 0:
        o_weight = (i_out // ROWS_PER_WEIGHT) * SIZE + o
    b_weight = tl.load(weight + o_weight, mask=m, other=0.0)
    b_out = b_x.to(weight.dtype.element_ty).to(tl.float32) * b_weight.to(tl.float32)
    if bias is not None:
        b_out += tl.load(bias + o_weight, mask=m, other=0.0)
    tl.store(out + i_out * SIZE + o, b_out.to(dtype), mask=m)


@triton.jit
def swiglu_kernel(
    out, gate, up, addend, slots, gate_stride, up_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    """See `reference.swiglu`, or, IS_GELU, `geglu`. gate, up: [T, SIZE], rows so far apart; out:
    [T, SIZE]; addend: [T, 2 * SIZE], the gate's part first, and slots: [T], or None. Grid: (T,
    blocks)."""
    i_token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    dtype = out.dtype.element_ty
    # [BLOCK]
    b_gate = tl.load(gate + i_token * gate_stride + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + i_token * up_stride + o, mask=m, other=0.0).to(tl.float32)
    if addend is not None:
        has_adapter = tl.load(slots + i_token) >= 0
        p_addend = addend + i_token * (2 * SIZE) + o
        b_gate = plus_addend(b_gate, p_addend, m, has_adapter, dtype)
        b_up = plus_addend(b_up, p_addend + SIZE, m, has_adapter, dtype)
    b_logit = b_gate
    if IS_GELU:  # 0.5 x (1 + tanh(u)) = x * sigmoid(2 u)
        b_logit = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_active = (b_gate / (1.0 + tl.exp(-b_logit))).to(dtype).to(tl.float32)
    tl.store(out + i_token * SIZE + o, (b_active * b_up).to(dtype), mask=m)


@triton.jit
def clamped_swiglu_kernel(
    out, gate, up, gate_stride, up_stride, alpha, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """See `reference.clamped_swiglu`. Shapes and grid as of `swiglu_kernel`."""
    i_token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    # [BLOCK]
    b_gate = tl.load(gate + i_token * gate_stride + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + i_token * up_stride + o, mask=m, other=0.0).to(tl.float32)
    b_gate = tl.minimum(b_gate, limit, propagate_nan=tl.PropagateNan.ALL)
    b_up = tl.clamp(b_up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    b_out = (b_up + 1.0) * (b_gate / (1.0 + tl.exp(-alpha * b_gate)))
    tl.store(out + i_token * SIZE + o, b_out.to(out.dtype.element_ty), mask=m)
