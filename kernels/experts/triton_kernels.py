"""The Triton kernels of mixtures: the choice of experts, the places of pairs, the products of pairs
with their experts, and their sum.

Kernels read the routing on the device. Grids follow only from the numbers of tokens, choices and
experts. Pairs are sorted by counting, without atomics, so that the same step gives the same pairs.

A pair's numbers do not depend on other pairs: `tl.dot` adds a product's terms in the order of `in`,
whichever rows share its tile, and however many there are.

Names: p_ pointer, o_ offsets, m_ mask, b_ block, i_ index. Sizes: T tokens, P pairs, E experts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .reference import LEAST_SUM as LEAST

LEAST_SUM = tl.constexpr(LEAST)
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TAKEN, WORST = tl.constexpr(-(1 << 31)), tl.constexpr(1 - (1 << 31))
"""Ranks below all numbers: absent or already chosen experts, and experts of other groups."""
MANY = BEST = tl.constexpr((1 << 31) - 1)
"""Above all numbers; it is the rank of NaN, so that the token becomes NaN."""

# Their values change from step to step: none is worth a compilation.
VARYING = ("num_pairs", "num_blocks", "num_tiles", "num_k")


@triton.jit
def ranked(b_x):
    """Whole numbers in the order of fp32 ones, of which zeros are equal."""
    bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_x == b_x, bits ^ ((bits >> 31) & 0x7FFFFFFF), BEST)


@triton.jit
def scored(b_logit, top, total, SCORING: tl.constexpr):
    """Scores of logits; `top` is the highest of all, `total` the sum of exponentials below it."""
    b_score = b_logit
    if SCORING == SOFTMAX:
        b_score = tl.exp(b_logit - top) / total
    if SCORING == SIGMOID:
        b_score = 1.0 / (1.0 + tl.exp(-b_logit))
    return b_score


@triton.jit
def rank_groups(
    b_rank, b_score, m_g, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Ranks [BLOCK_G, BLOCK_E], with WORST for experts of other groups. A group counts by the sum
    of its two best scores."""
    o_g = tl.arange(0, BLOCK_G)
    o_e = tl.arange(0, BLOCK_E)
    b_rest = b_rank
    b_sum = tl.zeros([BLOCK_G], dtype=tl.float32)
    for _ in tl.static_range(2):
        b_is = o_e[None, :] == tl.argmax(b_rest, axis=1)[:, None]
        b_sum += tl.sum(tl.where(b_is, b_score, 0.0), axis=1)
        b_rest = tl.where(b_is, TAKEN, b_rest)
    b_group = tl.where(m_g, ranked(b_sum), TAKEN)
    for _ in range(CHOSEN_GROUPS):
        b_group = tl.where(o_g == tl.argmax(b_group, axis=0), TAKEN, b_group)
    b_is_chosen = b_group == TAKEN
    return tl.where(b_is_chosen[:, None] | (b_rank == TAKEN), b_rank, WORST)


@triton.jit
def route_kernel(
    experts, weights, logits, bias, expert_scales, scale,
    SCORING: tl.constexpr, IS_NORMALISED: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, PER_GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """See `reference.route`. logits: [T, GROUPS * PER_GROUP]; experts, weights: [T, NUM_CHOSEN].
    GROUPS is 1 where all are considered. Grid: (T,)."""
    i_token = tl.program_id(0).to(tl.int64)
    p_logits = logits + i_token * (GROUPS * PER_GROUP)
    o_g = tl.arange(0, BLOCK_G)
    o_e = tl.arange(0, BLOCK_E)
    # [BLOCK_G, BLOCK_E]
    m = (o_g < GROUPS)[:, None] & (o_e < PER_GROUP)[None, :]
    o = o_g[:, None] * PER_GROUP + o_e[None, :]
    b_logit = tl.load(p_logits + o, mask=m, other=float("-inf"))
    top = 0.0
    total = 1.0
    if SCORING == SOFTMAX:
        top = tl.max(tl.max(b_logit, axis=1), axis=0)
        total = tl.sum(tl.sum(tl.exp(b_logit - top), axis=1), axis=0)
    b_score = b_logit  # scores ascend with logits
    if bias is not None:
        b_score = scored(b_logit, top, total, SCORING)
        b_score += tl.load(bias + o, mask=m, other=0.0)
    elif GROUPS > 1:
        b_score = scored(b_logit, top, total, SCORING)
    b_rank = tl.where(m, ranked(b_score), TAKEN)
    if GROUPS > 1:
        b_rank = rank_groups(b_rank, b_score, o_g < GROUPS, GROUPS, CHOSEN_GROUPS, BLOCK_G, BLOCK_E)
    # [BLOCK_G * BLOCK_E]
    b_rank = tl.reshape(b_rank, [BLOCK_G * BLOCK_E])
    o_rank = tl.arange(0, BLOCK_G * BLOCK_E)
    o_c = tl.arange(0, BLOCK_C)
    b_place = tl.zeros([BLOCK_C], dtype=tl.int32)
    for i_c in range(NUM_CHOSEN):
        place = tl.argmax(b_rank, axis=0)  # of equal ones the first
        b_place = tl.where(o_c == i_c, place, b_place)
        b_rank = tl.where(o_rank == place, TAKEN, b_rank)
    # [BLOCK_C]
    m_c = o_c < NUM_CHOSEN
    b_expert = b_place // BLOCK_E * PER_GROUP + b_place % BLOCK_E
    b_chosen = tl.load(p_logits + b_expert, mask=m_c, other=float("-inf"))
    if SCORING == SOFTMAX_OF_CHOSEN:
        b_weight = tl.exp(b_chosen - tl.max(b_chosen, axis=0))
        b_weight = b_weight / tl.sum(b_weight, axis=0)
    else:
        b_weight = scored(b_chosen, top, total, SCORING)
    if IS_NORMALISED:
        b_weight = b_weight / (tl.sum(b_weight, axis=0) + LEAST_SUM)
    b_weight *= scale
    if expert_scales is not None:
        b_weight *= tl.load(expert_scales + b_expert, mask=m_c, other=0.0)
    tl.store(experts + i_token * NUM_CHOSEN + o_c, b_expert, mask=m_c)
    tl.store(weights + i_token * NUM_CHOSEN + o_c, b_weight, mask=m_c)


@triton.jit
def load_pairs(experts, order, o_pair, num_pairs, NUM_CHOSEN: tl.constexpr):
    """Of pairs, the tokens' one after the other in `order`, their experts, tokens, and where they
    stand in [T, NUM_CHOSEN]. Behind the last the expert is MANY."""
    m = o_pair < num_pairs
    b_token = o_pair // NUM_CHOSEN
    if order is not None:
        b_token = tl.load(order + b_token, mask=m, other=0).to(tl.int32)
    b_cell = b_token * NUM_CHOSEN + o_pair % NUM_CHOSEN
    return tl.load(experts + b_cell, mask=m, other=MANY), b_token, b_cell


@triton.jit(do_not_specialize=VARYING)
def rank_pairs_kernel(
    tokens, starts, rows, experts, order, num_pairs,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """See `reference.sort_pairs`: compares each pair with all others. experts, rows:
    [T, NUM_CHOSEN]. Grid: (blocks of P + E + 1,)."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < num_pairs
    b_expert, b_token, b_cell = load_pairs(experts, order, o, num_pairs, NUM_CHOSEN)
    # Behind pairs there are experts, before whose pairs are those of all experts before.
    b_expert = tl.where(m, b_expert, o - num_pairs)
    b_end = tl.where(m, o, 0)
    b_place = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        o_other = first + tl.arange(0, CHUNK)
        b_other, _, _ = load_pairs(experts, order, o_other, num_pairs, NUM_CHOSEN)
        # [BLOCK, CHUNK]
        b_is_before = b_other[None, :] < b_expert[:, None]
        b_is_same = b_other[None, :] == b_expert[:, None]
        b_is_before |= b_is_same & (o_other[None, :] < b_end[:, None])
        b_place += tl.sum(b_is_before.to(tl.int32), axis=1)
    tl.store(tokens + b_place, b_token.to(tl.int64), mask=m)
    tl.store(rows + b_cell, b_place, mask=m)
    o_expert = o - num_pairs
    tl.store(starts + o_expert, b_place, mask=(o_expert >= 0) & (o_expert <= NUM_EXPERTS))


@triton.jit(do_not_specialize=VARYING)
def count_pairs_kernel(
    counts, experts, order, num_pairs,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts[b, e]: how many of the block's pairs are of expert e. Grid: (blocks, blocks of E)."""
    o_expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    b_count = tl.zeros([BLOCK_E], dtype=tl.int32)
    for i in range(BLOCK // CHUNK):
        o = tl.program_id(0) * BLOCK + i * CHUNK + tl.arange(0, CHUNK)
        b_expert, _, _ = load_pairs(experts, order, o, num_pairs, NUM_CHOSEN)
        # [CHUNK, BLOCK_E]
        b_is = b_expert[:, None] == o_expert[None, :]
        b_count += tl.sum(b_is.to(tl.int32), axis=0)
    p_counts = counts + tl.program_id(0) * NUM_EXPERTS + o_expert
    tl.store(p_counts, b_count, mask=o_expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=VARYING)
def scan_counts_kernel(
    starts, counts, num_blocks,
    NUM_EXPERTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Puts in the place of each count how many pairs of the expert are in the blocks before. Grid:
    (1,)."""
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < NUM_EXPERTS
    b_total = tl.zeros([BLOCK_E], dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        o_b = first + tl.arange(0, BLOCK_B)
        m = (o_b < num_blocks)[:, None] & m_e[None, :]
        # [BLOCK_B, BLOCK_E]
        p_block = counts + o_b[:, None] * NUM_EXPERTS + o_e[None, :]
        b_count = tl.load(p_block, mask=m, other=0)
        b_before = b_total[None, :] + tl.cumsum(b_count, axis=0) - b_count
        tl.store(p_block, b_before, mask=m)
        b_total += tl.sum(b_count, axis=0)
    tl.store(starts + o_e + 1, tl.cumsum(b_total, axis=0), mask=m_e)
    tl.store(starts, 0)


@triton.jit(do_not_specialize=VARYING)
def place_pairs_kernel(
    tokens, rows, experts, order, starts, counts, num_pairs,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """place = pairs of earlier experts + same expert in earlier blocks + earlier in this block.
    Grid: (blocks,)."""
    i_block = tl.program_id(0)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    m = o < num_pairs
    b_expert, b_token, b_cell = load_pairs(experts, order, o, num_pairs, NUM_CHOSEN)
    b_place = tl.load(starts + b_expert, mask=m, other=0)
    b_place += tl.load(counts + i_block * NUM_EXPERTS + b_expert, mask=m, other=0)
    for i in range(BLOCK // CHUNK):
        o_other = i_block * BLOCK + i * CHUNK + tl.arange(0, CHUNK)
        b_other, _, _ = load_pairs(experts, order, o_other, num_pairs, NUM_CHOSEN)
        # [BLOCK, CHUNK]
        b_is_before = b_other[None, :] == b_expert[:, None]
        b_is_before &= o_other[None, :] < o[:, None]
        b_place += tl.sum(b_is_before.to(tl.int32), axis=1)
    tl.store(tokens + b_place, b_token.to(tl.int64), mask=m)
    tl.store(rows + b_cell, b_place, mask=m)


@triton.jit(do_not_specialize=VARYING)
def own_pairs_kernel(
    tokens, starts, rows, all_tokens, all_starts, all_rows, num_pairs,
    FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """See `reference.own_pairs`, of experts [FIRST, END). Grid: (blocks,)."""
    begin = tl.load(all_starts + FIRST)
    count = tl.load(all_starts + END) - begin
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < num_pairs
    b_token = tl.load(all_tokens + tl.minimum(begin + o, num_pairs - 1), mask=m, other=0)
    tl.store(tokens + o, b_token, mask=m)
    b_row = tl.load(all_rows + o, mask=m, other=0) - begin
    b_row = tl.where((b_row >= 0) & (b_row < count), b_row, num_pairs)
    tl.store(rows + o, b_row, mask=m)
    if tl.program_id(0) == 0:
        o_e = tl.arange(0, BLOCK_E)
        m_e = o_e <= END - FIRST
        b_start = tl.load(all_starts + FIRST + o_e, mask=m_e, other=0)
        tl.store(starts + o_e, b_start - begin, mask=m_e)


@triton.jit
def find_tile(
    starts, i_tile,
    NUM_EXPERTS: tl.constexpr, OF_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Expert, first pair and number of pairs of a tile, which may have none: behind the last expert
    the number may be negative. No tile has pairs of two experts. The tiles of an expert's pairs
    follow from the start of these pairs.

    OF_PAIRS: if a pair's number within its expert is a multiple of BLOCK_M, a tile begins with the
    pair and has its index. Otherwise expert e's tiles begin with number starts[e] // BLOCK_M + e,
    after the tiles of earlier experts, each of which may end with a tile that is not full.
    """
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < NUM_EXPERTS
    b_end = tl.load(starts + 1 + o_e, mask=m_e, other=MANY)
    if OF_PAIRS:
        expert = tl.sum((b_end <= i_tile).to(tl.int32), axis=0)
        expert = tl.minimum(expert, NUM_EXPERTS - 1)
        first = tl.load(starts + expert)
        begin = i_tile
        is_there = (i_tile - first) % BLOCK_M == 0
    else:
        b_first_tile = tl.where(m_e, b_end // BLOCK_M + o_e + 1, MANY)
        expert = tl.sum((b_first_tile <= i_tile).to(tl.int32), axis=0)
        expert = tl.minimum(expert, NUM_EXPERTS - 1)
        first = tl.load(starts + expert)
        begin = first + (i_tile - (first // BLOCK_M + expert)) * BLOCK_M
        is_there = True
    end = tl.load(starts + expert + 1)
    count = tl.where(is_there, tl.minimum(end - begin, BLOCK_M), 0)
    return expert, begin, count


@triton.jit(do_not_specialize=VARYING)
def experts_linear_kernel(
    out, x, weight, bias, starts, rows, num_tiles, num_k, x_stride, expert_stride, weight_stride,
    bias_stride,
    NUM_EXPERTS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, OF_PAIRS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See `reference.experts_linear`. out: [P, OUT]. `num_k` is the number of BLOCK_K in IN. It is
    no constant, because the compiler would then unroll the loop. Grid: (tiles * blocks of OUT,); in
    each GROUP of tiles, the tiles of one block come first, because they may share an expert's
    weights.

    The weights are the left side of the product, whose 64 rows at a time an instruction of the
    tensor cores takes however few pairs there are on its right: few pairs and many are added up by
    the same instruction.
    """
    NUM_N: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    i_group = tl.program_id(0) // (GROUP * NUM_N)
    i_inner = tl.program_id(0) % (GROUP * NUM_N)
    group_size = tl.minimum(num_tiles - i_group * GROUP, GROUP)
    expert, begin, count = find_tile(
        starts, i_group * GROUP + i_inner % group_size, NUM_EXPERTS, OF_PAIRS, BLOCK_M, BLOCK_E
    )
    if count <= 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < count
    o_n = i_inner // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = (o_n < OUT) | (OUT % BLOCK_N == 0)
    b_row = (begin + o_m).to(tl.int64)
    if rows is not None:
        b_row = tl.load(rows + b_row, mask=m_m, other=0)
    p_x = x + b_row * x_stride
    p_weight = weight + expert.to(tl.int64) * expert_stride + o_n.to(tl.int64) * weight_stride
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for i_k in range(num_k):
        o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = (o_k < IN) | (IN % BLOCK_K == 0)
        # [BLOCK_N, BLOCK_K], [BLOCK_M, BLOCK_K]
        m_weight = m_n[:, None] & m_k[None, :]
        b_weight = tl.load(p_weight[:, None] + o_k[None, :], mask=m_weight, other=0.0)
        b_x = tl.load(p_x[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_sum = tl.dot(b_weight, tl.trans(b_x), b_sum, input_precision=PRECISION)
    if bias is not None:
        p_bias = bias + expert.to(tl.int64) * bias_stride + o_n
        b_sum += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_out = out + (begin + o_m).to(tl.int64)[:, None] * OUT + o_n[None, :]
    b_out = tl.trans(b_sum.to(out.dtype.element_ty))
    tl.store(p_out, b_out, mask=m_m[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=VARYING)
def combine_experts_kernel(
    out, x, rows, weights, shared, shared_logits, num_pairs, LACKS_PAIRS: tl.constexpr,
    SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `reference.combine`. x: [P, SIZE]; out, shared: [T, SIZE]. With LACKS_PAIRS, rows may be
    behind the last: these are of other experts. Grid: (T, blocks)."""
    i_token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i_c in tl.static_range(NUM_CHOSEN):
        row = tl.load(rows + i_token * NUM_CHOSEN + i_c).to(tl.int64)
        m_row = m & (row < num_pairs) if LACKS_PAIRS else m
        b_x = tl.load(x + row * SIZE + o, mask=m_row, other=0.0).to(tl.float32)
        b_sum += tl.load(weights + i_token * NUM_CHOSEN + i_c) * b_x
    if shared is not None:
        b_shared = tl.load(shared + i_token * SIZE + o, mask=m, other=0.0).to(tl.float32)
        if shared_logits is not None:
            b_shared *= 1.0 / (1.0 + tl.exp(-tl.load(shared_logits + i_token)))
        b_sum += b_shared
    tl.store(out + i_token * SIZE + o, b_sum.to(out.dtype.element_ty), mask=m)
