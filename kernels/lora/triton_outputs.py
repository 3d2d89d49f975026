"""Adapters' changes of a block of outputs, in Triton: vectors over outputs, and products.

Names as in `triton_kernels`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .table import NUM_FIELDS

FIELDS = tl.constexpr(NUM_FIELDS)


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
    """The vectors to subtract from outputs, to multiply sums by, and to add after that: [BLOCK_N]
    each. See `reference.add_lora`."""
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
def load_base(
    p_block, m_out, arena, rows, slot, target, parts, base_bias, offset, o_n, m_n,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, VECTORS: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """A block of the base's outputs as adapters change them, in fp32; BESIDE: 0."""
    if BESIDE:
        return tl.zeros(m_out.shape, dtype=tl.float32)
    b_out = tl.load(p_block, mask=m_out, other=0.0).to(tl.float32)
    if VECTORS:
        for i_p in range(parts):
            b_old, b_factor, b_new, _ = load_outputs(
                arena, rows, slot + i_p, target, base_bias, offset, o_n, m_n, TABLE_TARGETS, GRANULE
            )
            b_out = (b_out - b_old[None, :]) * b_factor[None, :] + b_new[None, :]
    return b_out


@triton.jit
def product(
    b_sum, scale, arena, rows, slot, target, base_bias, offset, o_n, m_n, dtype,
    TABLE_TARGETS: tl.constexpr, GRANULE: tl.constexpr, VECTORS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """An adapter's addition to a block of columns, and its bias. Rounded, it stays narrow until it
    is added: it takes registers. Neither rounded nor with vectors, it has yet to be multiplied by
    the scale, which `plus_product` does."""
    b_bias = 0.0
    if VECTORS:
        _, b_magnitude, _, b_bias = load_outputs(
            arena, rows, slot, target, base_bias, offset, o_n, m_n, TABLE_TARGETS, GRANULE
        )
        b_sum = (scale * b_magnitude)[None, :] * b_sum
    elif ROUNDS:
        b_sum = scale * b_sum
    return b_sum.to(dtype) if ROUNDS else b_sum, b_bias


@triton.jit
def plus_product(b_out, b_sum, scale, b_bias, VECTORS: tl.constexpr, ROUNDS: tl.constexpr):
    """A block of columns with the results of `product` added."""
    if ROUNDS or VECTORS:
        b_out = b_out + b_sum.to(tl.float32)
    else:
        # Written out: the compiler fuses the two in some kernels, and a last bit would differ.
        b_out = tl.fma(b_sum, scale, b_out)
    if VECTORS:
        b_out += scale * b_bias[None, :]
    return b_out
