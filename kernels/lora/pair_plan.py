"""Plans of pairs: which tokens each expert has is known on the device alone, so that it plans them.

The host has sorted a step's tokens by slot. Every mixture sorts its pairs by expert in that order
(`kernels.experts.sort_pairs`), so that pairs of one expert and slot are neighbours, and
`plan_pairs` makes items of them. Here are the definitions, in torch; `triton_ops` has the same for
a device, where nothing waits for it and shapes follow from numbers that the host knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.experts.reference import Pairs

from .plan import (
    BASE_SLOT,
    ITEM_ROWS,
    ITEM_TILE,
    ROWS_TOKENS,
    TILE_TOKENS,
    LoraPlan,
    plan_segments,
)


class TokenOrder(NamedTuple):
    """The tokens of a step in the order of their slots. Pairs of tokens that are rows of their own
    share items with each other alone, and pairs of longer rows share tiles."""

    tokens: Tensor
    """int32 [T]: `LoraPlan.order`."""
    keys: Tensor
    """int32 [T]: twice the token's slot, and 1 more if its row is longer."""
    num_slots: int
    """Slots that longer rows use, at most."""

    @classmethod
    def of(cls, plan: LoraPlan, keys: Tensor, num_slots: int | None) -> TokenOrder:
        """Returns the order of a plan.

        Args:
            plan: The step's plan.
            keys: int32 [T]; see `keys`.
            num_slots: As in `order_tokens`.
        """
        assert plan.order is not None, "the plan of a step"
        num_items = len(plan.items)
        num_slots = num_items if num_slots is None else min(num_slots, num_items)
        return cls(plan.order, keys, num_slots if plan.has_tiles else 0)


def max_items(plan: LoraPlan, order: TokenOrder, num_chosen: int, num_experts: int) -> int:
    """Returns the most items that a step's pairs make.

    Args:
        plan: The step's plan.
        order: Its tokens by slot.
        num_chosen: Experts per token.
        num_experts: Number of experts.
    """
    num_pairs, num_row_pairs = num_chosen * plan.num_tokens, num_chosen * plan.num_rows
    if order.num_slots == 0:
        return num_row_pairs
    num_tiles = -(-num_pairs // TILE_TOKENS) + num_experts * order.num_slots
    return min(num_pairs, num_tiles + num_row_pairs)


def order_tokens(plan: LoraPlan, num_slots: int | None = None) -> TokenOrder:
    """Returns the tokens of a step's plan by slot.

    Args:
        plan: The step's plan.
        num_slots: Most slots that its longer rows use. Each adds an item per expert. None: unknown.
    """
    assert plan.order is not None, "the plan of a step"
    keys = 2 * plan.token_slots
    for start, count, _, kind, *_ in plan.items.tolist():
        keys[plan.order[start : start + count].long()] += kind == ITEM_TILE
    return TokenOrder.of(plan, keys, num_slots)


def plan_pairs(plan: LoraPlan, order: TokenOrder, experts: Tensor, pairs: Pairs) -> LoraPlan:
    """Plans a step's pairs of tokens and experts.

    Pairs with one slot, expert and kind are cut at multiples of ROWS_TOKENS or TILE_TOKENS, and
    items follow each other.

    Args:
        plan: The step's plan.
        order: Its tokens by slot.
        experts: int32 [T, num_chosen].
        pairs: The pairs, sorted in `order`; all, or some experts' own.

    Returns:
        The plan of the pairs.
    """
    num_pairs = len(pairs.tokens)
    keys = order.keys[pairs.tokens]
    num_experts = len(pairs.starts) - 1
    numbers = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    of_pairs = numbers.repeat_interleave(pairs.starts.diff())
    slots = keys >> 1
    begins = _begins(keys, of_pairs)
    starts = begins.nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([num_pairs])])[: len(starts)]
    kinds = torch.where(keys % 2 == 0, ITEM_ROWS, ITEM_TILE)
    columns = (starts, ends - starts, slots[starts], kinds[starts], of_pairs[starts])
    rows = torch.stack(columns, dim=1).int()
    rows = rows[rows[:, 2] != BASE_SLOT]
    items = rows.new_zeros(max_items(plan, order, experts.shape[1], num_experts), 5)
    items[: len(rows)] = rows
    segments = plan_segments(slots.tolist(), [1] * num_pairs, of_pairs.tolist())
    return replace(
        plan,
        num_tokens=num_pairs,
        segments=tuple(segments),
        token_slots=slots,
        items=items,
        order=None,
        token_experts=of_pairs,
    )


def _begins(keys: Tensor, experts: Tensor) -> Tensor:
    """Returns of each pair whether an item may begin with it, bool [P]."""
    places = torch.arange(len(keys), device=keys.device)
    begins = places % torch.where(keys % 2 == 0, ROWS_TOKENS, TILE_TOKENS) == 0
    begins[1:] |= (keys[1:] != keys[:-1]) | (experts[1:] != experts[:-1])
    return begins
