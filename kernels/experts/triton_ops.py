"""Launches of the Triton kernels. Grids and shapes follow from how many tokens, choices and experts
there are: nothing is read by the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from kernels import tuning
from kernels.elementwise.triton_ops import power_of_2
from kernels.experts import triton_kernels as kernels
from kernels.experts.reference import MAX_EXPERTS, Choice, Pairs, Routing, Scoring

_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SOFTMAX_OF_CHOSEN)


def route(
    logits: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Routing:
    """Launches `reference.route` once: logits float32 [T, experts], bias and expert_scales float32
    [experts], out int32 [T, num_chosen]."""
    num_tokens, num_experts = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert choice.num_chosen <= num_experts <= MAX_EXPERTS
    for vector in (bias, expert_scales):
        assert vector is None or (vector.dtype == torch.float32 and vector.is_contiguous())
    has_groups = choice.num_chosen_groups < choice.num_groups
    num_groups = choice.num_groups if has_groups else 1
    per_group = num_experts // num_groups
    assert per_group * num_groups == num_experts
    assert per_group > 1 or not has_groups, "a group is as good as its two best"
    shape = (num_tokens, choice.num_chosen)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device) if out is None else out
    assert experts.shape == shape
    assert experts.dtype == torch.int32
    assert experts.is_contiguous()
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    block_g, block_e = power_of_2(num_groups), power_of_2(per_group)
    kernels.route_kernel[(num_tokens,)](
        experts,
        weights,
        logits,
        bias,
        expert_scales,
        float(choice.scale),
        SCORING=_SCORINGS.index(choice.scoring),
        IS_NORMALISED=choice.normalised,
        NUM_CHOSEN=choice.num_chosen,
        GROUPS=num_groups,
        CHOSEN_GROUPS=choice.num_chosen_groups,
        PER_GROUP=per_group,
        BLOCK_G=block_g,
        BLOCK_E=block_e,
        BLOCK_C=power_of_2(choice.num_chosen),
        num_warps=max(1, block_g * block_e // tuning.constants("route")["elements_per_warp"]),
    )
    return Routing(experts, weights)


def sort_pairs(experts: Tensor, num_experts: int, order: Tensor | None = None) -> Pairs:
    """Launches `reference.sort_pairs`: experts int32 [T, num_chosen], order integers [T]. One
    launch compares each pair with each; for many pairs, three launches count them."""
    assert experts.is_contiguous()
    assert order is None or (order.is_contiguous() and len(order) == len(experts))
    num_pairs, device = experts.numel(), experts.device
    tokens = torch.empty(num_pairs, dtype=torch.int64, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    pairs = Pairs(tokens, starts, torch.empty_like(experts))
    tuned = tuning.constants("sort_pairs")
    if num_pairs <= tuned["many_pairs"]:
        _rank_pairs(pairs, experts, order)
    else:
        _count_pairs(pairs, experts, order)
    return pairs


def own_pairs(pairs: Pairs, experts: tuple[int, int]) -> Pairs:
    """Launches `reference.own_pairs` once: with places for all pairs, of which those behind the
    experts' own have any token, and are never computed."""
    first, end = experts
    num_pairs, device = len(pairs.tokens), pairs.tokens.device
    starts = torch.empty(end - first + 1, dtype=torch.int32, device=device)
    own = Pairs(torch.empty_like(pairs.tokens), starts, torch.empty_like(pairs.rows), first)
    block = tuning.constants("plan_pairs")["block"]
    kernels.own_pairs_kernel[(max(1, -(-num_pairs // block)),)](
        own.tokens,
        own.starts,
        own.rows,
        pairs.tokens,
        pairs.starts,
        pairs.rows,
        num_pairs,
        FIRST=first,
        END=end,
        BLOCK=block,
        BLOCK_E=power_of_2(end - first + 1),
        num_warps=tuning.constants("plan_pairs")["num_warps"],
    )
    return own


def _rank_pairs(pairs: Pairs, experts: Tensor, order: Tensor | None) -> None:
    tuned, num_pairs = tuning.constants("sort_pairs"), experts.numel()
    num_places = num_pairs + len(pairs.starts)
    kernels.rank_pairs_kernel[(-(-num_places // tuned["block"]),)](
        pairs.tokens,
        pairs.starts,
        pairs.rows,
        experts,
        order,
        num_pairs,
        NUM_EXPERTS=len(pairs.starts) - 1,
        NUM_CHOSEN=experts.shape[1],
        BLOCK=tuned["block"],
        CHUNK=tuned["chunk"],
        num_warps=tuned["num_warps"],
    )


def _count_pairs(pairs: Pairs, experts: Tensor, order: Tensor | None) -> None:
    tokens, starts, rows, _ = pairs
    tuned, num_experts = tuning.constants("sort_pairs"), len(starts) - 1
    num_pairs, block = experts.numel(), tuned["count_block"]
    num_blocks, chunk = -(-num_pairs // block), min(block, tuned["count_chunk"])
    shape = (num_blocks, num_experts)
    counts = torch.empty(shape, dtype=torch.int32, device=experts.device)
    sizes = {"NUM_EXPERTS": num_experts, "NUM_CHOSEN": experts.shape[1]}
    warps = {"num_warps": tuned["num_warps"]}
    kernels.count_pairs_kernel[(num_blocks, -(-num_experts // tuned["count_block_e"]))](
        counts,
        experts,
        order,
        num_pairs,
        BLOCK=block,
        BLOCK_E=tuned["count_block_e"],
        CHUNK=chunk,
        **sizes,
        **warps,
    )
    block_e = power_of_2(num_experts)
    kernels.scan_counts_kernel[(1,)](
        starts,
        counts,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_B=max(1, tuned["scan_block"] // block_e),
        BLOCK_E=block_e,
        num_warps=tuned["scan_warps"],
    )
    kernels.place_pairs_kernel[(num_blocks,)](
        tokens,
        rows,
        experts,
        order,
        starts,
        counts,
        num_pairs,
        BLOCK=block,
        CHUNK=chunk,
        **sizes,
        **warps,
    )


def experts_linear(
    x: Tensor,
    weight: Tensor,
    pairs: Pairs,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Launches `reference.experts_linear` once: x [P, in] (with rows int64 [P], any number of
    rows), weight [experts, out, in] and bias [experts, out] give [P, out].

    Rows of x and of weights have unit stride; experts and their rows may be apart. The launch has
    as many tiles as any routing of so many pairs.
    """
    num_pairs = len(x if rows is None else rows)
    num_experts, num_out, num_in = weight.shape
    assert x.shape[1] == num_in
    assert x.dtype == weight.dtype
    assert len(pairs.starts) == num_experts + 1
    assert len(pairs.tokens) == num_pairs, "tiles are of all pairs"
    assert rows is None or rows.is_contiguous()
    for tensor in (x, weight, bias):
        assert tensor is None or tensor.stride(-1) == 1, "rows are contiguous"
    assert weight.stride(0) < 1 << 31, "strides are int32"
    out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return out
    tuned = tile_constants(num_pairs, num_experts, x.itemsize)
    most = most_tiles(num_pairs, num_experts, tuned)
    num_tiles = min(num_pairs, most)
    kernels.experts_linear_kernel[(num_tiles * -(-num_out // tuned["block_n"]),)](
        out,
        x,
        weight,
        bias,
        pairs.starts,
        rows,
        num_tiles,
        -(-num_in // tuned["block_k"]),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        0 if bias is None else bias.stride(0),
        NUM_EXPERTS=num_experts,
        IN=num_in,
        OUT=num_out,
        OF_PAIRS=num_pairs <= most,
        GROUP=tuned["group"],
        BLOCK_M=tuned["block_m"],
        BLOCK_N=tuned["block_n"],
        BLOCK_K=tuned["block_k"],
        BLOCK_E=power_of_2(num_experts),
        # fp32 models are promised fp32 products; for 16-bit ones the choice has no effect.
        PRECISION="ieee",
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
    )
    return out


def tile_constants(num_pairs: int, num_experts: int, itemsize: int) -> Mapping[str, int]:
    """Returns the constants of tiles as long as experts have pairs, on average: they change in how
    many pieces terms are added up, and not in which order."""
    short = tuning.constants("experts_short", itemsize=itemsize)
    if num_pairs <= short["max_pairs"] * num_experts:
        return short
    middle = tuning.constants("experts_middle", itemsize=itemsize)
    if num_pairs <= middle["max_pairs"] * num_experts:
        return middle
    return tuning.constants("experts_long", itemsize=itemsize)


def sizes_to_warm_up(
    max_tokens: int, num_experts: int, num_chosen: int, itemsize: int
) -> list[int]:
    """Returns numbers of tokens, up to `max_tokens`, that launch whatever any number launches."""
    many_pairs = tuning.constants("sort_pairs")["many_pairs"]

    def launches(num_tokens: int) -> Hashable:
        num_pairs = num_tokens * num_chosen
        tuned = tile_constants(num_pairs, num_experts, itemsize)
        return tiles_launch(num_pairs, num_experts, tuned), num_pairs <= many_pairs

    return first_of_each(max_tokens, launches)


def most_tiles(num_pairs: int, num_experts: int, tuned: Mapping[str, int]) -> int:
    """Returns the most tiles of pairs in any order: the last tile of each expert need not be
    full."""
    return num_pairs // tuned["block_m"] + num_experts


def tiles_launch(num_pairs: int, num_experts: int, tuned: Mapping[str, int]) -> Hashable:
    """Returns the facts that tell apart the compiled kernels of tiles."""
    return frozenset(tuned.items()), num_pairs <= most_tiles(num_pairs, num_experts, tuned)


def first_of_each(max_tokens: int, launches: Callable[[int], Hashable]) -> list[int]:
    """Returns the first number of tokens, up to `max_tokens`, of each value of `launches`."""
    sizes: dict[Hashable, int] = {}
    for num_tokens in range(1, max_tokens + 1):
        sizes.setdefault(launches(num_tokens), num_tokens)
    return sorted(sizes.values())


def combine(
    x: Tensor,
    pairs: Pairs,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
) -> Tensor:
    """Launches `reference.combine` once: x [P, size], weights float32 [T, num_chosen], shared [T,
    size] and shared_logits float32 [T, 1] give [T, size]. Tensors are contiguous."""
    for tensor in (x, weights, shared, shared_logits):
        assert tensor is None or tensor.is_contiguous()
    assert weights.dtype == torch.float32
    assert shared is None or shared.dtype == x.dtype
    assert shared_logits is None or (shared is not None and shared_logits.dtype == torch.float32)
    (num_tokens, num_chosen), size = weights.shape, x.shape[1]
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    tuned = tuning.constants("combine_experts", size=size)
    block = min(tuned["block"], power_of_2(size))
    kernels.combine_experts_kernel[(num_tokens, -(-size // block))](
        out,
        x,
        pairs.rows,
        weights,
        shared,
        shared_logits,
        len(x),
        LACKS_PAIRS=pairs.first_expert is not None,
        SIZE=size,
        NUM_CHOSEN=num_chosen,
        BLOCK=block,
        num_warps=max(1, block // tuned["elements_per_warp"]),
    )
    return out
