"""Plans of pairs: which tokens each expert has is known on the device alone, so that it plans them.

A step's tokens are put in the order of their slots once, `order_tokens`. Every mixture then sorts
its pairs by expert in that order (`kernels.experts.sort_pairs`), which leaves those of one expert
and slot neighbours, and `plan_pairs` makes items of them. Here are the definitions, in torch;
`triton_ops` has the same for a device, where nothing waits for it and shapes follow from numbers
that the host knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.experts.reference import Pairs

from .plan import BASE_SLOT, ITEM_TILE, ITEM_TOKEN, TILE_TOKENS, LoraPlan, plan_segments


class TokenOrder(NamedTuple):
    """The tokens of a step in the order of their slots. If a token is a row of one token, its pairs
    are items of their own, so that their numbers do not depend on the batch. Pairs of longer rows
    share tiles."""

    tokens: Tensor
    """int64 [T], by key, and of one key as they come."""
    keys: Tensor
    """int32 [T]: twice the token's slot, and 1 more if its row is longer."""
    num_rows: int
    """Tokens that are rows of their own, at most."""
    num_slots: int
    """Slots that longer rows use, at most."""

    @classmethod
    def of(cls, plan: LoraPlan, tokens: Tensor, keys: Tensor, num_slots: int | None) -> TokenOrder:
        """Returns the order of a plan.

        Args:
            plan: The step's plan.
            tokens: int64 [T], by key.
            keys: int32 [T]; see `keys`.
            num_slots: As in `order_tokens`.
        """
        num_items = len(plan.items)
        num_slots = num_items if num_slots is None else min(num_slots, num_items)
        return cls(tokens, keys, num_items, num_slots if plan.has_tiles else 0)

    def max_items(self, num_pairs: int, num_chosen: int, num_experts: int) -> int:
        """Returns the most items of a step's pairs. Without longer rows there is a place for each
        pair.

        Args:
            num_pairs: Number of pairs.
            num_chosen: Experts per token.
            num_experts: Number of experts.
        """
        if self.num_slots == 0:
            return num_pairs
        num_tiles = -(-num_pairs // TILE_TOKENS) + num_experts * self.num_slots
        return min(num_pairs, num_tiles + num_chosen * self.num_rows)


def order_tokens(plan: LoraPlan, num_slots: int | None = None) -> TokenOrder:
    """Sorts the tokens of a step's plan by slot.

    Args:
        plan: The step's plan.
        num_slots: Most slots that its longer rows use. Each adds an item per expert. None: unknown.
    """
    keys = 2 * plan.token_slots
    for start, count, _, kind, *_ in plan.items.tolist():
        keys[start : start + count] += kind == ITEM_TILE
    return TokenOrder.of(plan, keys.argsort(stable=True), keys, num_slots)


def plan_pairs(plan: LoraPlan, order: TokenOrder, experts: Tensor, pairs: Pairs) -> LoraPlan:
    """Plans a step's pairs of tokens and experts.

    Without longer rows item p is pair p, or nothing if the pair is the base model's. Otherwise
    pairs of longer rows with one slot and expert are cut at multiples of TILE_TOKENS, and items
    follow each other.

    Args:
        plan: The step's plan.
        order: Its tokens by slot.
        experts: int32 [T, num_chosen].
        pairs: The pairs, sorted in `order`.

    Returns:
        The plan of the pairs.
    """
    num_pairs = len(pairs.tokens)
    keys = order.keys[pairs.tokens]
    of_pairs = torch.zeros_like(experts).flatten()
    of_pairs[pairs.rows.flatten().long()] = experts.flatten()
    slots = keys >> 1
    begins = _begins(keys, of_pairs)
    starts = begins.nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([num_pairs])])[: len(starts)]
    kinds = torch.where(keys % 2 == 0, ITEM_TOKEN, ITEM_TILE)
    columns = (starts, ends - starts, slots[starts], kinds[starts], of_pairs[starts])
    rows = torch.stack(columns, dim=1).int()
    has_adapter = rows[:, 2] != BASE_SLOT
    rows = rows[has_adapter] if plan.has_tiles else rows * has_adapter[:, None]
    num_experts = len(pairs.starts) - 1
    items = rows.new_zeros(order.max_items(num_pairs, experts.shape[1], num_experts), 5)
    items[: len(rows)] = rows
    segments = plan_segments(slots.tolist(), [1] * num_pairs, of_pairs.tolist())
    return replace(
        plan,
        num_tokens=num_pairs,
        segments=tuple(segments),
        token_slots=slots,
        items=items,
        token_experts=of_pairs,
    )


def _begins(keys: Tensor, experts: Tensor) -> Tensor:
    """Returns of each pair whether an item may begin with it, bool [P]."""
    begins = torch.arange(len(keys), device=keys.device) % TILE_TOKENS == 0
    begins |= keys % 2 == 0
    begins[1:] |= (keys[1:] != keys[:-1]) | (experts[1:] != experts[:-1])
    return begins
