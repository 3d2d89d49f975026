"""Parts of the Triton kernels that prepare heads: their norms, their rotation, their store.

Names as in `triton_kernels`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def normalised(
    b_x1, b_x2, b_x3, p_weight, o_t, m_t, o_1, o_2, o_3, m_d, m_3, eps,
    D: tl.constexpr, OF_TOKENS: tl.constexpr,
):  # fmt: skip
    """RMSNorm over a head, whose parts lie at these offsets; the product with the weight is in the
    weight's dtype. OF_TOKENS: each token has its own."""
    dtype = p_weight.dtype.element_ty
    total = tl.sum(b_x1 * b_x1, axis=1) + tl.sum(b_x2 * b_x2, axis=1)
    total += tl.sum(b_x3 * b_x3, axis=1)
    factor = 1.0 / tl.sqrt(total / D + eps)
    p_w = p_weight
    m_w = m_d[None, :]
    m_w3 = m_3[None, :]
    if OF_TOKENS:
        p_w += o_t[:, None] * D
        m_w = m_w & m_t[:, None]
        m_w3 = m_w3 & m_t[:, None]
    b_w1 = tl.load(p_w + o_1[None, :], mask=m_w, other=0.0)
    b_w2 = tl.load(p_w + o_2[None, :], mask=m_w, other=0.0)
    b_w3 = tl.load(p_w + o_3[None, :], mask=m_w3, other=0.0)
    b_x1 = (b_x1 * factor[:, None]).to(dtype) * b_w1
    b_x2 = (b_x2 * factor[:, None]).to(dtype) * b_w2
    b_x3 = (b_x3 * factor[:, None]).to(dtype) * b_w3
    return b_x1.to(tl.float32), b_x2.to(tl.float32), b_x3.to(tl.float32)


@triton.jit
def rotated(b_x1, b_x2, p_cos, p_sin, o_rows, m_block, o_d, HALF: tl.constexpr):
    """The first part turns with the second. `sin` [T, 2 * HALF] has the sign of the rotation.
    Products are rounded to its dtype, as transformers does in 16 bits."""
    dtype = p_sin.dtype.element_ty
    o_1 = o_rows[:, None] + o_d[None, :]
    b_cos1 = tl.load(p_cos + o_1, mask=m_block, other=0.0).to(tl.float32)
    b_cos2 = tl.load(p_cos + o_1 + HALF, mask=m_block, other=0.0).to(tl.float32)
    b_sin1 = tl.load(p_sin + o_1, mask=m_block, other=0.0).to(tl.float32)
    b_sin2 = tl.load(p_sin + o_1 + HALF, mask=m_block, other=0.0).to(tl.float32)
    b_y1 = (b_x1 * b_cos1).to(dtype).to(tl.float32) + (b_x2 * b_sin1).to(dtype).to(tl.float32)
    b_y2 = (b_x2 * b_cos2).to(dtype).to(tl.float32) + (b_x1 * b_sin2).to(dtype).to(tl.float32)
    return b_y1, b_y2


@triton.jit
def prepared(
    b_x1, b_x2, b_x3, norm, cos, sin, o_t, m_t, o_d, o_1, o_2, o_3, m_d, m_3, eps, dtype,
    D: tl.constexpr, HALF: tl.constexpr, NORMS_ROTATED: tl.constexpr, OF_TOKENS: tl.constexpr,
):  # fmt: skip
    """The parts of heads, normed and rotated, each where there is something to do it with, or the
    other way round; rounded to `dtype` between."""
    if norm is not None and not NORMS_ROTATED:
        b_x1, b_x2, b_x3 = normalised(
            b_x1, b_x2, b_x3, norm, o_t, m_t, o_1, o_2, o_3, m_d, m_3, eps, D, OF_TOKENS
        )  # fmt: skip
        b_x1, b_x2 = b_x1.to(dtype).to(tl.float32), b_x2.to(dtype).to(tl.float32)
    if cos is not None:
        m_block = m_t[:, None] & (o_d < HALF)[None, :]
        b_x1, b_x2 = rotated(b_x1, b_x2, cos, sin, o_t * (2 * HALF), m_block, o_d, HALF)
    if norm is not None and NORMS_ROTATED:
        b_x1, b_x2 = b_x1.to(dtype).to(tl.float32), b_x2.to(dtype).to(tl.float32)
        b_x1, b_x2, b_x3 = normalised(
            b_x1, b_x2, b_x3, norm, o_t, m_t, o_1, o_2, o_3, m_d, m_3, eps, D, OF_TOKENS
        )  # fmt: skip
    return b_x1, b_x2, b_x3


@triton.jit
def store_parts(
    p, b_x1, b_x2, b_x3, o_1, o_2, o_3, m_block, m_rest, D: tl.constexpr, HALF: tl.constexpr
):
    """Writes the parts of heads to where `p`, [tokens, 1], begins."""
    dtype = p.dtype.element_ty
    tl.store(p + o_1[None, :], b_x1.to(dtype), mask=m_block)
    tl.store(p + o_2[None, :], b_x2.to(dtype), mask=m_block)
    if 2 * HALF < D:
        tl.store(p + o_3[None, :], b_x3.to(dtype), mask=m_rest)


@triton.jit
def store_codes(
    p, p_scale, b_x1, b_x2, b_x3, o_1, o_2, o_3, m_t, m_block, m_rest, dtype,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Writes the parts of heads, rounded to `dtype`, as codes of FP8 to where `p`, [tokens, 1],
    begins, and each head's scale to `p_scale`, [tokens]: see `kv_cache.to_fp8`."""
    b_x1 = b_x1.to(dtype).to(tl.float32)
    b_x2 = b_x2.to(dtype).to(tl.float32)
    b_x3 = b_x3.to(dtype).to(tl.float32)
    b_largest = tl.maximum(tl.max(tl.abs(b_x1), axis=1), tl.max(tl.abs(b_x2), axis=1))
    b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_x3), axis=1))
    b_scale = tl.maximum(tl.div_rn(b_largest, 448.0), 1.1754943508222875e-38)
    # Maxima leave out NaN.
    b_fault = tl.sum(b_x1 * 0.0, axis=1) + tl.sum(b_x2 * 0.0, axis=1) + tl.sum(b_x3 * 0.0, axis=1)
    b_scale += b_fault
    tl.store(p_scale, b_scale, mask=m_t)
    tl.store(p + o_1[None, :], codes_of(b_x1, b_scale), mask=m_block)
    tl.store(p + o_2[None, :], codes_of(b_x2, b_scale), mask=m_block)
    if 2 * HALF < D:
        tl.store(p + o_3[None, :], codes_of(b_x3, b_scale), mask=m_rest)


@triton.jit
def codes_of(b_x, b_scale):
    """x / scale of heads [tokens, n], rounded to codes of FP8, to the nearest and ties to even.
    Written in whole numbers: devices before 8.9 have no conversion to FP8."""
    b_y = tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape))
    b_bits = b_y.to(tl.uint32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_normal = ((b_size + 0x7FFFF + ((b_size >> 20) & 1)) >> 20) - (120 << 3)
    # The last place of numbers above 2^14 is 2^-9, as that of the smallest codes.
    b_shifted = b_size.to(tl.float32, bitcast=True) + 16384.0
    b_small = b_shifted.to(tl.uint32, bitcast=True) - 0x46800000
    b_code = tl.where(b_size < 0x3C800000, b_small, b_normal)
    b_code = tl.minimum(b_code, 0x7E)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def widened(b_codes, dtype: tl.constexpr):
    """Codes of FP8 in a wider dtype, exactly, over WIDENED_SHARE: the bits of half precision of a
    number 2^8 smaller. Devices before 8.9 have no conversion from FP8. The codes of NaN are numbers
    here: a vector with NaN has NaN for its scale."""
    b_code = b_codes.to(tl.uint16)
    b_bits = ((b_code & 0x80) << 8) | ((b_code & 0x7F) << 7)
    return b_bits.to(tl.float16, bitcast=True).to(dtype)
