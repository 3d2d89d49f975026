"""The definition of the LoRA operations: plain torch, fp32, a loop over tokens and targets.

Every fast implementation must agree with these up to the rounding of the model's dtype. They read
only what the kernels read: the arena, the table's rows and the plan's tokens.

A token whose slot is a mix gets what stands in for the base's outputs, which one of its parts may
have, and then what its parts add, one after the other, in fp32, and is rounded once, when the last
is added.

`add_lora` is `shrink`, then `expand`; `add_lora_embedding` is `gather`, then `expand`. Where
devices share A's rank, each has a part of the shrunk rows: those of all parts, one after the other,
are what `expand` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from .plan import BASE_SLOT, LoraGroup, LoraPlan
from .table import LoraTable, OutputVectors, Place, VectorValues, vectors_at


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

    and where it has vectors over the outputs of targets[k], whatever its rank, with b the base's
    bias of these (or 0), b' the adapter's in its place (or b), m its magnitude (or 1) and c its
    bias (or 0):
      out = m * (out - b) + b' + scale * (m * (x[t] @ A.T) @ B + c)

    which is DoRA (Liu et al., 2024) with the magnitude divided by the norms of W + scale * (A B).T.
    In a mix m and b' of any part apply to what the base has made, m besides to that part's own
    product. So a sum of adapters is the base's outputs and what each changes of them.

    Args:
      out: Shape: `[T, >= group.out_end]`. In place; rounded once, when added.
      x: Shape: `[T, in_features]`. Same dtype as `out`; must not share memory with it.
      arena: Shape: `[arena_bytes // itemsize]`. Same dtype. Holds A `[r, in_features]` and
        B `[r, n_k]` at the table's granules.
      table: Rows of the slots in `plan`, with A and B of equal ranks.
      plan: Tokens t = 0..T-1 by slot; rows without an adapter stay bitwise as they are.
      group: The targets k, their columns o_k and n_k, and in_features.
      base_bias: Shape: `[>= group.out_end]`. What `out` has of the base's bias, in its dtype.
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
    rank[s, targets[k]] > 0, if the indices of its segments A and B say rank r > 0 of e:
      out[t, o_k : o_k + n_k] += scale * (x[t] @ A[e].T) @ B[e]

    Args:
      As of `add_lora`, but:
      arena: Holds the segments at the table's granules; A[e] `[r, in_features]` and B[e] `[r, n_k]`
        as many granules after the start of these as their indices say. The scale is the row's
        times that of B's index; that of A's is 1.
      plan: Has an expert of each token, which is a pair of a token of the step and one of its
        experts: `x` and `out` have a row for each.
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
    """Returns y, fp32 `[T, K, max_rank]`: y[t, k, :r] = x[t] @ A.T, of A's rank r; else 0."""
    y = torch.zeros(plan.num_tokens, len(group.targets), table.max_rank)
    for t, slot, expert in _tokens(plan):
        for k, target in enumerate(group.targets):
            a = _place_of_a(arena, table, slot, expert, target)
            y[t, k, : a.rank] = a.matrix(arena, group.in_features).float() @ x[t].float()
    return y


def gather(
    token_ids: torch.Tensor, arena: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> torch.Tensor:
    """Returns y, fp32 `[T, 1, max_rank]`: y[t, 0, :r] = A[token_ids[t]], of A's rank r; else 0."""
    y = torch.zeros(plan.num_tokens, 1, table.max_rank)
    for t, slot, expert in _tokens(plan):
        a = _place_of_a(arena, table, slot, expert, target)
        num_rows = int(token_ids[t]) + 1
        y[t, 0, : a.rank] = a.matrix(arena, num_rows, transposed=True)[-1].float()
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
    """out[t, o_k : o_k + n_k] += scale * y[t, k, :r] @ B, of B's rank r; and what the adapter has
    of vectors, as `add_lora` says."""
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
            products = y[t, k, : b.rank] @ b.matrix(arena, group.out_features[k]).float()
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
    """Yields plans of the first parts of all tokens, of the second parts of mixes, and so on."""
    rows = [
        [] if slot == BASE_SLOT else table.part_slots(slot) for slot in plan.token_slots.tolist()
    ]
    for place in range(max(map(len, rows), default=0)):
        slots = [each[place] if place < len(each) else BASE_SLOT for each in rows]
        yield replace(plan, token_slots=torch.tensor(slots, dtype=torch.int32))


def _tokens(plan: LoraPlan) -> Iterator[tuple[int, int, int | None]]:
    """Yields those that use an adapter: index, slot and expert, if they have any."""
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
