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
