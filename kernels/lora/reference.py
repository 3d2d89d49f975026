"""The definition of the LoRA operations: plain torch, fp32, a loop over tokens and targets.

Every fast implementation must agree with these up to the rounding of the model's dtype. They read
only the kernels' inputs: the arena, the table's rows and the plan's tokens.

For a token whose slot is a mix, the parts first replace the base's outputs, if one of them does so.
Then each part adds its products, one after the other, in fp32. The sum is rounded once, at the end.

A and B are of the arena's dtype, or float8 (`table.lora_dtype`), whose values every implementation
converts exactly: their scales are in the table.

`add_lora` is `shrink`, then `expand`; `add_lora_embedding` is `gather`, then `expand`. If devices
share A's rank, each has a part of the shrunk rows, and `expand` reads all parts, one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from .plan import BASE_SLOT, LoraGroup, LoraPlan
from .rows import OutputVectors
from .table import LoraTable
from .views import Place, VectorValues, vectors_at


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
) -> None:
    """
    Semantics, for every token t with slot s >= 0 and every k with rank[s, targets[k]] = r > 0:
      out[t, o_k : o_k + n_k] += scale * (x[t] @ A.T) @ B

    If it has vectors over the outputs of targets[k], of whatever rank, with the base's bias b (or
    0), the adapter's bias b' in its place (or b), its magnitude m (or 1) and its own bias c (or 0):
      out = m * (out - b) + b' + scale * (m * (x[t] @ A.T) @ B + c)

    This is DoRA (Liu et al., 2024) with the magnitude divided by the norms of W + scale * (A B).T.
    In a mix, m and b' of any part apply to the base's outputs, and m also to that part's own
    product. So a sum of adapters is the base's outputs plus the change of each adapter.

    Args:
      out: Shape: `[T, >= group.out_end]`. In place; rounded once, when added.
      x: Shape: `[T, in_features]`. Same dtype as `out`; must not share memory with it.
      arena: Shape: `[arena_bytes // itemsize]`. Same dtype. Holds A `[r, in_features]` and
        B `[r, n_k]` at the table's granules.
      table: Rows of the slots in `plan`, with A and B of equal ranks.
      plan: Tokens t = 0..T-1 by slot; rows without an adapter stay bitwise as they are.
      group: The targets k, their columns o_k and n_k, and in_features.
      base_bias: Shape: `[>= group.out_end]`. The base's bias in `out`, of its dtype.
    """
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    assert not plan.has_experts
    total = out.float()
    for part in _parts(plan, table):
        _replace_base(total, arena, table, part, group, base_bias)
    for part in _parts(plan, table):
        y = shrink(x, arena, table, part, group)
        _add_products(total, y, arena, table, part, group)
    out.copy_(total)


def add_lora_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """
    Semantics, for every token t with slot s >= 0 and expert e, and every k with
    rank[s, targets[k]] > 0, if e has rank r > 0 in the indices of segments A and B:
      out[t, o_k : o_k + n_k] += scale * (x[t] @ A[e].T) @ B[e]

    Args:
      As in `add_lora`, except:
      arena: Holds the segments at the table's granules. Their indices have the granules of A[e]
        `[r, in_features]` and B[e] `[r, n_k]`, from the segment's start. The scale is the row's
        scale times the scale in B's index; the scale in A's index is 1.
      plan: Has an expert per token. A token here is a pair of a token of the step and one of its
        experts; `x` and `out` have a row for each pair.
    """
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    assert plan.has_experts
    total = out.float()
    for part in _parts(plan, table):
        _add_products(total, shrink(x, arena, table, part, group), arena, table, part, group)
    out.copy_(total)


def add_lora_embedding(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    target: int,
) -> None:
    """
    Semantics, for every token t with slot s >= 0 and rank[s, target] = r > 0:
      out[t] += scale * A[token_ids[t]] @ B

    Args:
      out: Shape: `[T, out_features]`. In place; rounded once, when added.
      token_ids: Shape: `[T]`. Integers in [0, vocab).
      arena: Shape: `[arena_bytes // itemsize]`. Holds A `[vocab, r]` and B `[r, out_features]`.
      table: Rows of the slots in `plan`, with A and B of equal ranks.
      plan: Tokens by slot.
      target: The embedding's index in the table.
    """
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    group = LoraGroup((target,), 0, (0,), (out.shape[1],))
    total = out.float()
    for part in _parts(plan, table):
        _replace_base(total, arena, table, part, group, None)
    for part in _parts(plan, table):
        y = gather(token_ids, arena, table, part, target)
        _add_products(total, y, arena, table, part, group)
    out.copy_(total)


def shrink(
    x: torch.Tensor, arena: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> torch.Tensor:
    """Returns y, float32 `[T, K, max_rank]`: y[t, k, :r] = x[t] @ A.T, with A's rank r; else 0.
    x: `[T, in_features]`, arena: `[arena_bytes // itemsize]`, both of one dtype.
    """
    y = torch.zeros(plan.num_tokens, len(group.targets), table.max_rank)
    for t, slot, expert in _tokens(plan):
        for k, target in enumerate(group.targets):
            a = _place_of_a(arena, table, slot, expert, target)
            values = a.matrix(arena, group.in_features, table.lora_dtype)
            y[t, k, : a.rank] = values.float() @ x[t].float()
    return y


def gather(
    token_ids: torch.Tensor, arena: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> torch.Tensor:
    """Returns y, float32 `[T, 1, max_rank]`: y[t, 0, :r] = A[token_ids[t]], with A's rank r; else
    0. token_ids: integers `[T]`, arena: `[arena_bytes // itemsize]`.
    """
    y = torch.zeros(plan.num_tokens, 1, table.max_rank)
    for t, slot, expert in _tokens(plan):
        a = _place_of_a(arena, table, slot, expert, target)
        num_rows = int(token_ids[t]) + 1
        rows = a.matrix(arena, num_rows, table.lora_dtype, transposed=True)
        y[t, 0, : a.rank] = rows[-1].float()
    return y


def expand(
    out: torch.Tensor,
    y: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
) -> None:
    """out[t, o_k : o_k + n_k] += scale * y[t, k, :r] @ B, with B's rank r, and the adapter's
    vectors as in `add_lora`.

    out: `[T, >= group.out_end]`, y: float32 `[T, K, max_rank]`, arena: `[arena_bytes // itemsize]`,
    base_bias: `[>= group.out_end]` of out's dtype.
    """
    total = out.float()
    _replace_base(total, arena, table, plan, group, base_bias)
    _add_products(total, y, arena, table, plan, group)
    out.copy_(total)


def _replace_base(
    out: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None,
) -> None:
    """out = m * (out - b) + b', in fp32."""
    for t, slot, _ in _tokens(plan):
        for target, columns in _columns(group):
            vectors = _vectors(arena, table, slot, target, columns)
            if vectors is not None:
                old = None if base_bias is None else base_bias[columns]
                out[t, columns] = vectors.of_base(out[t, columns], old)


def _add_products(
    out: torch.Tensor,
    y: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """out += scale * (m * y @ B + c), in fp32."""
    for t, slot, expert in _tokens(plan):
        for k, (target, columns) in enumerate(_columns(group)):
            b = _place_of_b(arena, table, slot, expert, target)
            values = b.matrix(arena, group.out_features[k], table.lora_dtype)
            products = y[t, k, : b.rank] @ values.float()
            vectors = _vectors(arena, table, slot, target, columns)
            added = b.scale * products if vectors is None else vectors.of_added(products, b.scale)
            out[t, columns] += added


def _columns(group: LoraGroup) -> Iterator[tuple[int, slice]]:
    for target, o, n in zip(group.targets, group.out_offsets, group.out_features, strict=True):
        yield target, slice(o, o + n)


def _vectors(
    arena: torch.Tensor, table: LoraTable, slot: int, target: int, columns: slice
) -> VectorValues | None:
    granules = (table.rows[slot, 5:, target] - 1).tolist()
    return vectors_at(arena, OutputVectors(*granules), columns.stop - columns.start)


def _parts(plan: LoraPlan, table: LoraTable) -> Iterator[LoraPlan]:
    """Yields a plan of the first parts of all tokens, then of the second parts of mixes, and so
    on."""
    rows = [
        [] if slot == BASE_SLOT else table.part_slots(slot) for slot in plan.token_slots.tolist()
    ]
    for place in range(max(map(len, rows), default=0)):
        slots = [each[place] if place < len(each) else BASE_SLOT for each in rows]
        yield replace(plan, token_slots=torch.tensor(slots, dtype=torch.int32))


def _tokens(plan: LoraPlan) -> Iterator[tuple[int, int, int | None]]:
    """Yields index, slot and expert (or None) of each token that uses an adapter."""
    experts = (
        [None] * plan.num_tokens if plan.token_experts is None else plan.token_experts.tolist()
    )
    for t, (slot, expert) in enumerate(zip(plan.token_slots.tolist(), experts, strict=True)):
        if slot != BASE_SLOT:
            yield t, slot, expert


def _place_of_a(
    arena: torch.Tensor, table: LoraTable, slot: int, expert: int | None, target: int
) -> Place:
    a = Place(int(table.a_granules[slot, target]), int(table.a_ranks[slot, target]))
    a = a if expert is None else a.of_expert(arena, expert)
    assert a.scale == 1.0, "the scale is B's"
    return a


def _place_of_b(
    arena: torch.Tensor, table: LoraTable, slot: int, expert: int | None, target: int
) -> Place:
    b = Place(int(table.b_granules[slot, target]), int(table.b_ranks[slot, target]))
    b = b if expert is None else b.of_expert(arena, expert)
    return b._replace(scale=b.scale * float(table.scales[slot, target]))
