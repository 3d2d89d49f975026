"""The Triton kernels of products with quantised weights, which they dequantise in registers.

Codes of four bits come as words of 32 bits, in the order of `weight.QuantisedWeight`. Each word is
cut into four planes of two neighbours, which are halves of 16 bits: one mask and one or two
operations make numbers of the inputs' dtype of both at once. Memory is read for fp32 tables only.

With few rows a group's scale is a factor of the sum over the group, so that its weights are not
rounded. With many rows it is a factor of the weights, before they are rounded to the inputs' dtype.
A row's terms are added in one order, whichever rows share its block, and however many there are of
few, or of many.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, P pairs, E experts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import cuda_capability_geq

from kernels.experts.triton_kernels import find_tile
from kernels.quantised import formats, weight
from kernels.quantised.formats import Codes

PLANES, BLOCK_INPUTS = tl.constexpr(weight.PLANES), tl.constexpr(formats.BLOCK_INPUTS)
PLANE_INPUTS = tl.constexpr(formats.BLOCK_INPUTS // weight.PLANES)
"""A block of eight words has four planes, each of 16 neighbouring inputs."""
CODES_OF_BOTH, SIGN_OF_BOTH, REST_OF_BOTH = (
    tl.constexpr(mask) for mask in (0x000F000F, 0x00080008, 0x00070007)
)
"""Masks of a code of four bits, of its sign and of the rest, in both halves of a word."""
ROUNDS = tl.constexpr(1.5 * 2.0**23)
"""An fp32 number below 2**22 is rounded to a whole one by adding and subtracting it."""
TINY, LARGEST_INT8 = tl.constexpr(2.0**-126), tl.constexpr(127.0)

# Their values change from step to step, or are no reason to compile.
VARYING = ("num_rows", "num_steps", "steps_each", "num_splits", "num_tiles")

INT4_SHIFTS = {torch.bfloat16: 6, torch.float16: 9, torch.float32: 0}
"""Numbers made of INT4 and UINT4 codes are so many powers of two too small."""


def _words_of_table(dtype: torch.dtype, byte: int) -> list[tl.constexpr]:
    """Returns the low or the high bytes of NF4's 16 values as four words."""
    bits = Codes.NF4.table.to(dtype).view(torch.uint8)[byte::2].contiguous()
    return [tl.constexpr(word) for word in bits.view(torch.int32).tolist()]


BF16_LOW_0, BF16_LOW_1, BF16_LOW_2, BF16_LOW_3 = _words_of_table(torch.bfloat16, 0)
BF16_HIGH_0, BF16_HIGH_1, BF16_HIGH_2, BF16_HIGH_3 = _words_of_table(torch.bfloat16, 1)
FP16_LOW_0, FP16_LOW_1, FP16_LOW_2, FP16_LOW_3 = _words_of_table(torch.float16, 0)
FP16_HIGH_0, FP16_HIGH_1, FP16_HIGH_2, FP16_HIGH_3 = _words_of_table(torch.float16, 1)

if triton.knobs.runtime.interpret:

    @triton.jit
    def chosen_bytes(b_low, b_high, b_selector):
        """The four bytes of eight that nibbles of `b_selector` choose, as PTX's prmt. The
        interpreter has no functions of CUDA's library."""
        b_made = b_selector & 0
        for i in tl.static_range(4):
            b_place = (b_selector >> (4 * i)) & 7
            b_source = tl.where(b_place < 4, b_low, b_high)
            b_made |= ((b_source >> ((b_place & 3) * 8)) & 255) << (8 * i)
        return b_made

else:

    @triton.jit
    def chosen_bytes(b_low, b_high, b_selector):
        """The four bytes of eight that nibbles of `b_selector` choose: PTX's prmt."""
        return libdevice.byte_perm(b_low, b_high, b_selector)


@triton.jit
def looked_up(b_codes, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr):
    """The bytes, of a table of 16, of the lowest four codes of four bits."""
    b_low = chosen_bytes(W0, W1, b_codes & 0x7777)
    b_high = chosen_bytes(W2, W3, b_codes & 0x7777)
    # Byte i is of the lower half of the table, or, with the code's highest bit, of the upper.
    return chosen_bytes(b_low, b_high, ((b_codes >> 1) & 0x4444) | 0x3210)


@triton.jit
def joined(b_low, b_high):
    """[N, 2 * W] of two [N, W], in turns."""
    return tl.join(b_low, b_high).reshape([b_low.shape[0], 2 * b_low.shape[1]])


@triton.jit
def halves(b_both, dtype: tl.constexpr):
    """The numbers [N, 2 * W] of 16 bits in words [N, W]."""
    b_low = b_both.to(tl.int16).to(dtype, bitcast=True)
    b_high = (b_both >> 16).to(tl.int16).to(dtype, bitcast=True)
    return joined(b_low, b_high)


@triton.jit
def nf4_plane(b_words, J: tl.constexpr, dtype: tl.constexpr):
    """Makes numbers of NF4; see `plane`."""
    b_codes = b_words >> (J // 2 * 16)
    if dtype == tl.bfloat16:
        b_low = looked_up(b_codes, BF16_LOW_0, BF16_LOW_1, BF16_LOW_2, BF16_LOW_3)
        b_high = looked_up(b_codes, BF16_HIGH_0, BF16_HIGH_1, BF16_HIGH_2, BF16_HIGH_3)
    else:
        b_low = looked_up(b_codes, FP16_LOW_0, FP16_LOW_1, FP16_LOW_2, FP16_LOW_3)
        b_high = looked_up(b_codes, FP16_HIGH_0, FP16_HIGH_1, FP16_HIGH_2, FP16_HIGH_3)
    # The lower two of four numbers, or the upper two.
    return halves(chosen_bytes(b_low, b_high, 0x5140 if J % 2 == 0 else 0x7362), dtype)


@triton.jit
def fp32_plane(b_words, table, J: tl.constexpr, CODES: tl.constexpr):
    """Makes numbers in fp32 by `table`, fp32 [16]; see `plane`."""
    if CODES == "nf4":
        b_codes = joined((b_words >> (8 * J)) & 15, (b_words >> (8 * J + 4)) & 15)
    else:
        b_codes = joined((b_words >> (4 * J)) & 15, (b_words >> (4 * J + 16)) & 15)
    return tl.load(table + b_codes)


@triton.jit
def plane(b_words, table, J: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """The numbers [N, 2 * W] of plane J of words [N, W], before they are scaled. INT4's and UINT4's
    are too small; see `INT4_SHIFTS`.

    The bits of a code, as a number of dtype, are one below the normal ones: multiplied by a power
    of two it is exact. https://docs.nvidia.com/cuda/parallel-thread-execution/: `mul` supports such
    numbers.
    """
    if dtype == tl.float32:
        b_made = fp32_plane(b_words, table, J, CODES)
    elif CODES == "nf4":
        b_made = nf4_plane(b_words, J, dtype)
    elif CODES == "fp4":
        # E2M1 has its exponent where wider ones have the last bits of theirs.
        SHIFT: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        b_both = (b_words >> (4 * J)) & CODES_OF_BOTH
        b_both = ((b_both & REST_OF_BOTH) << SHIFT) | ((b_both & SIGN_OF_BOTH) << 12)
        b_made = halves(b_both, dtype) * (2.0**126 if dtype == tl.bfloat16 else 2.0**14)
    else:
        b_both = (b_words >> (4 * J)) & CODES_OF_BOTH
        b_made = halves(b_both, dtype) * (2.0**127 if dtype == tl.bfloat16 else 2.0**15)
        if CODES == "int4":
            b_made -= 8 * 2.0**-6 if dtype == tl.bfloat16 else 8 * 2.0**-9
    return b_made


@triton.jit
def of_bytes(b_codes, CODES: tl.constexpr, dtype: tl.constexpr):
    """The numbers of codes of eight bits, exactly. The ways between the dtypes are the ones of fast
    instructions."""
    if CODES == "fp8":
        if cuda_capability_geq(8, 9):
            b_made = b_codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            # E4M3 has its exponent where fp16 has the last bits of its own.
            b_rest = (b_codes & 0x7F).to(tl.int16)
            b_bits = (b_rest << 7) | ((b_codes & 0x80).to(tl.int16) << 8)
            b_made = b_bits.to(tl.float16, bitcast=True) * 256.0
            b_made = tl.where(b_rest == 0x7F, float("nan"), b_made)
        if dtype == tl.bfloat16:
            b_made = b_made.to(tl.float32)
    elif dtype == tl.float16:
        # 128 more than the number, as the last bits of 1024.
        b_made = ((b_codes ^ 0x80).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        b_made = b_codes.to(tl.int8, bitcast=True)
    return b_made.to(dtype)


@triton.jit
def numbers(b_codes, table, J: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """The numbers of plane J of words, or of all of a chunk's bytes: see `plane` and `of_bytes`."""
    if CODES == "int8" or CODES == "fp8":
        b_made = of_bytes(b_codes, CODES, dtype)
    else:
        b_made = plane(b_codes, table, J, CODES, dtype)
    return b_made


@triton.jit
def load_codes(
    p_codes, i_chunk, m_n, ROW: tl.constexpr, CHUNK: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """A chunk of words or bytes, [BLOCK_N, CHUNK]. IS_WHOLE: rows end with a step."""
    o_c = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_c = (o_c < ROW) | IS_WHOLE
    return tl.load(p_codes + o_c[None, :], mask=m_n[:, None] & m_c[None, :], other=0)


@triton.jit
def load_inputs(
    p_x, i_chunk, m_m, J: tl.constexpr,
    IN: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The inputs [BLOCK_M, K] of a chunk's plane J, or of all of its bytes."""
    if CODES == "int8" or CODES == "fp8":
        o_in = i_chunk * CHUNK + tl.arange(0, CHUNK)
    else:
        o_pair = i_chunk * (2 * CHUNK) + tl.arange(0, 2 * CHUNK)
        o_in = o_pair // PLANE_INPUTS * BLOCK_INPUTS + o_pair % PLANE_INPUTS + J * PLANE_INPUTS
    m_in = (o_in < IN) | IS_WHOLE
    return tl.load(p_x + o_in[None, :], mask=m_m[:, None] & m_in[None, :], other=0.0)


@triton.jit
def load_group(p, i_group, m_n, OUT_ROWS: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """The scales or offsets of a group, fp32 [BLOCK_N]; behind the last group, where all inputs are
    0, the last one's. p: [groups, OUT_ROWS]."""
    i_row = tl.minimum(i_group, NUM_GROUPS - 1).to(tl.int64)
    return tl.load(p + i_row * OUT_ROWS, mask=m_n, other=0.0).to(tl.float32)


@triton.jit
def add_group(
    b_sum, b_part, b_inputs, p_scales, p_offsets, i_group, m_n,
    OUT_ROWS: tl.constexpr, NUM_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """b_sum [BLOCK_M, BLOCK_N] and a group's part, scaled. b_inputs [BLOCK_M, K]: the group's
    inputs, to be added up."""
    b_scale = load_group(p_scales, i_group, m_n, OUT_ROWS, NUM_GROUPS) * FACTOR
    b_sum += b_part * b_scale[None, :]
    if p_offsets is not None:
        b_offset = load_group(p_offsets, i_group, m_n, OUT_ROWS, NUM_GROUPS)
        b_sum += tl.sum(b_inputs, axis=1)[:, None] * b_offset[None, :]
    return b_sum


@triton.jit
def add_chunk(
    b_sum, b_inputs, p_x, p_codes, p_scales, p_offsets, table, i_chunk, m_m, m_n,
    OUT_ROWS: tl.constexpr, IN: tl.constexpr, ROW: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_sum [BLOCK_M, BLOCK_N] and b_inputs [BLOCK_M, K] with a chunk. If an output has one group,
    GROUP is 0: sums are scaled later, and inputs are added up over all chunks."""
    CODES_EACH: tl.constexpr = 1 if CODES == "int8" or CODES == "fp8" else 8
    NUM_PLANES: tl.constexpr = 1 if CODES_EACH == 1 else PLANES
    IS_WHOLE: tl.constexpr = IN % (CHUNK * UNROLL * CODES_EACH) == 0
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_codes = load_codes(p_codes, i_chunk, m_n, ROW, CHUNK, ROW % (CHUNK * UNROLL) == 0)
    b_part = b_sum
    for j in tl.static_range(NUM_PLANES):
        b_x = load_inputs(p_x, i_chunk, m_m, j, IN, CODES, CHUNK, IS_WHOLE)
        b_w = tl.trans(numbers(b_codes, table, j, CODES, dtype))
        if GROUP != 0 and j * PLANE_INPUTS % GROUP == 0:
            b_part = tl.dot(b_x, b_w, input_precision=PRECISION)
            b_inputs = b_x.to(tl.float32)
        else:
            b_part = tl.dot(b_x, b_w, b_part, input_precision=PRECISION)
            b_inputs += b_x.to(tl.float32)
        # The group ends with this plane, or the chunk does.
        if GROUP != 0 and ((j + 1) * PLANE_INPUTS % GROUP == 0 or j + 1 == NUM_PLANES):
            i_group = (i_chunk * (CHUNK * CODES_EACH) + j * PLANE_INPUTS) // GROUP
            b_sum = add_group(
                b_sum, b_part, b_inputs, p_scales, p_offsets, i_group, m_n, OUT_ROWS, NUM_GROUPS,
                FACTOR,
            )  # fmt: skip
    if GROUP == 0:
        b_sum = b_part
    return b_sum, b_inputs


@triton.jit(do_not_specialize=VARYING)
def few_rows_kernel(
    out, x, codes, scales, offsets, bias, x_scales, table,
    num_rows, num_steps, steps_each, x_stride,
    OUT_ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROW: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
    IS_SPLIT: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See `reference.linear`, for up to BLOCK_M rows. x: [T, IN]; codes: words [OUT, ROW] or bytes;
    scales, offsets: [NUM_GROUPS, OUT_ROWS]; bias: [OUT]; x_scales: factors of rows, fp32 [T];
    table: the values of codes, fp32; out: [T, OUT] or, IS_SPLIT, fp32 [splits, T, OUT] of sums
    without bias and factors of rows.

    A step has UNROLL chunks of CHUNK words or bytes, each of no more than one group in a plane.
    Grid: (blocks of OUT, splits).
    """
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = (o_n < OUT) | (OUT % BLOCK_N == 0)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    p_x = x + o_m.to(tl.int64)[:, None] * x_stride
    p_codes = codes + o_n.to(tl.int64)[:, None] * ROW
    p_scales = scales + o_n
    p_offsets = None if offsets is None else offsets + o_n
    NUM_IN: tl.constexpr = CHUNK if CODES == "int8" or CODES == "fp8" else 2 * CHUNK
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    b_inputs = tl.zeros([BLOCK_M, NUM_IN], dtype=tl.float32)
    first = tl.program_id(1) * steps_each
    for i_step in tl.range(first, tl.minimum(first + steps_each, num_steps), num_stages=STAGES):
        for i_unrolled in tl.static_range(UNROLL):
            b_sum, b_inputs = add_chunk(
                b_sum, b_inputs, p_x, p_codes, p_scales, p_offsets, table,
                i_step * UNROLL + i_unrolled, m_m, m_n,
                OUT_ROWS, IN, ROW, CODES, GROUP, NUM_GROUPS, FACTOR, CHUNK, UNROLL, PRECISION,
            )  # fmt: skip
    if GROUP == 0:
        b_zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        b_sum = add_group(b_zero, b_sum, b_inputs, p_scales, p_offsets, 0, m_n, OUT_ROWS, 1, FACTOR)
    m = m_m[:, None] & m_n[None, :]
    if IS_SPLIT:
        p_out = out + (tl.program_id(1) * num_rows + o_m).to(tl.int64)[:, None] * OUT + o_n[None, :]
        tl.store(p_out, b_sum, mask=m)
    else:
        if x_scales is not None:
            b_sum *= tl.load(x_scales + o_m, mask=m_m, other=0.0)[:, None]
        if bias is not None:
            b_sum += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        p_out = out + o_m.to(tl.int64)[:, None] * OUT + o_n[None, :]
        tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=VARYING)
def sum_splits_kernel(
    out, parts, bias, x_scales, num_rows, num_splits, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums of parts, fp32 [splits, T, OUT], in their order, with bias and factors. Grid: (T,
    blocks of OUT)."""
    i_row = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < OUT
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i_split in range(num_splits):
        p_parts = parts + (i_split * num_rows + i_row).to(tl.int64) * OUT + o_n
        b_sum += tl.load(p_parts, mask=m_n, other=0.0)
    if x_scales is not None:
        b_sum *= tl.load(x_scales + i_row)
    if bias is not None:
        b_sum += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out + i_row.to(tl.int64) * OUT + o_n, b_sum.to(out.dtype.element_ty), mask=m_n)


@triton.jit
def scaled(
    b_w, p_scales, p_offsets, i_group, m_n,
    OUT_ROWS: tl.constexpr, NUM_GROUPS: tl.constexpr, FACTOR: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Numbers of a group [BLOCK_N, K] times its scales, plus its offsets, rounded once."""
    b_scale = load_group(p_scales, i_group, m_n, OUT_ROWS, NUM_GROUPS) * FACTOR
    if p_offsets is None and b_w.dtype == tl.bfloat16 and p_scales.dtype.element_ty == tl.bfloat16:
        # Both are exact: their product is rounded as it would be from fp32.
        b_w = b_w * b_scale.to(tl.bfloat16)[:, None]
    else:
        b_w = b_w.to(tl.float32) * b_scale[:, None]
        if p_offsets is not None:
            b_w += load_group(p_offsets, i_group, m_n, OUT_ROWS, NUM_GROUPS)[:, None]
    return b_w.to(dtype)


@triton.jit
def add_transposed_chunk(
    b_sum, p_x, p_codes, p_scales, p_offsets, table, i_chunk, m_m, m_n,
    OUT_ROWS: tl.constexpr, IN: tl.constexpr, ROW: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_sum [BLOCK_N, BLOCK_M] with a chunk. IS_SCALED: scales are factors of weights, not of
    sums."""
    CODES_EACH: tl.constexpr = 1 if CODES == "int8" or CODES == "fp8" else 8
    IS_WHOLE: tl.constexpr = IN % (CHUNK * UNROLL * CODES_EACH) == 0
    dtype: tl.constexpr = p_x.dtype.element_ty
    # FP8 is fp32 on its way to bf16: scales are factors of that, and it is rounded once.
    made: tl.constexpr = tl.float32 if CODES == "fp8" and IS_SCALED else dtype
    b_codes = load_codes(p_codes, i_chunk, m_n, ROW, CHUNK, ROW % (CHUNK * UNROLL) == 0)
    for j in tl.static_range(1 if CODES_EACH == 1 else PLANES):
        b_x = load_inputs(p_x, i_chunk, m_m, j, IN, CODES, CHUNK, IS_WHOLE)
        b_w = numbers(b_codes, table, j, CODES, made)
        if IS_SCALED:
            i_in = i_chunk * (CHUNK * CODES_EACH) + j * PLANE_INPUTS
            i_group = i_in // GROUP if GROUP != 0 else 0
            b_w = scaled(
                b_w, p_scales, p_offsets, i_group, m_n, OUT_ROWS, NUM_GROUPS, FACTOR, dtype
            )
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit(do_not_specialize=VARYING)
def many_rows_kernel(
    out, x, codes, scales, offsets, bias, x_scales, table, starts,
    num_rows, num_steps, num_tiles, x_stride, expert_rows, bias_stride,
    NUM_EXPERTS: tl.constexpr, OF_PAIRS: tl.constexpr, BLOCK_E: tl.constexpr,
    OUT_ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROW: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See `reference.linear` or, with `starts` int32 [E + 1], `cpu.experts_linear`. Arguments as of
    `few_rows_kernel`; expert e's weight begins with row e * expert_rows, and its bias is row e of
    bias [E, OUT]. A chunk of words is one block. Grid: (tiles * blocks of OUT,); of TILES tiles,
    the ones of a block come first.

    Weights are the left side of the product: see `experts.triton_kernels.experts_linear_kernel`.
    """
    NUM_N: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    i_outer = tl.program_id(0) // (TILES * NUM_N)
    i_inner = tl.program_id(0) % (TILES * NUM_N)
    num_inner = tl.minimum(num_tiles - i_outer * TILES, TILES)
    i_tile = i_outer * TILES + i_inner % num_inner
    if starts is not None:
        expert, begin, count = find_tile(starts, i_tile, NUM_EXPERTS, OF_PAIRS, BLOCK_M, BLOCK_E)
        if count <= 0:
            return
    else:
        expert, begin = 0, i_tile * BLOCK_M
        count = tl.minimum(num_rows - begin, BLOCK_M)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < count
    o_n = i_inner // num_inner * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = (o_n < OUT) | (OUT % BLOCK_N == 0)
    o_row = tl.cast(expert, tl.int64) * expert_rows + o_n
    p_x = x + (begin + o_m).to(tl.int64)[:, None] * x_stride
    p_codes = codes + o_row[:, None] * ROW
    p_scales = scales + o_row
    p_offsets = None if offsets is None else offsets + o_row
    IS_SCALED: tl.constexpr = GROUP != 0 or offsets is not None
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for i_step in tl.range(0, num_steps, num_stages=STAGES):
        for i_unrolled in tl.static_range(UNROLL):
            b_sum = add_transposed_chunk(
                b_sum, p_x, p_codes, p_scales, p_offsets, table, i_step * UNROLL + i_unrolled,
                m_m, m_n, OUT_ROWS, IN, ROW, CODES, GROUP, NUM_GROUPS, FACTOR, CHUNK, UNROLL,
                IS_SCALED, PRECISION,
            )  # fmt: skip
    if not IS_SCALED:
        b_sum *= load_group(p_scales, 0, m_n, OUT_ROWS, 1)[:, None] * FACTOR
    if x_scales is not None:
        b_sum *= tl.load(x_scales + begin + o_m, mask=m_m, other=0.0)[None, :]
    if bias is not None:
        p_bias = bias + tl.cast(expert, tl.int64) * bias_stride + o_n
        b_sum += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_out = out + (begin + o_m).to(tl.int64)[:, None] * OUT + o_n[None, :]
    b_out = tl.trans(b_sum.to(out.dtype.element_ty))
    tl.store(p_out, b_out, mask=m_m[:, None] & m_n[None, :])


@triton.jit
def int8_inputs_kernel(codes, scales, x, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """See `reference.int8_inputs`; the codes are of x's dtype, for products with it. x: [T, SIZE],
    rows so far apart. Grid: (T,)."""
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    b_largest = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, SIZE, BLOCK):
        m = first + o < SIZE
        b_x = tl.load(x + i_row * x_stride + first + o, mask=m, other=0.0).to(tl.float32)
        b_largest = tl.maximum(b_largest, tl.abs(b_x))
    # NaN is ignored here, and remains NaN below.
    scale = tl.maximum(tl.div_rn(tl.max(b_largest, axis=0), LARGEST_INT8), TINY)
    tl.store(scales + i_row, scale)
    for first in range(0, SIZE, BLOCK):
        m = first + o < SIZE
        b_x = tl.load(x + i_row * x_stride + first + o, mask=m, other=0.0).to(tl.float32)
        b_code = tl.div_rn(b_x, scale) + ROUNDS - ROUNDS
        tl.store(codes + i_row * SIZE + first + o, b_code.to(codes.dtype.element_ty), mask=m)
