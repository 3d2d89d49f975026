"""Operations of adapters in a program, by group: a program holds the groups that its step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from inference_svc.model.description import Norm
from inference_svc.model.operations import Rows
from kernels.elementwise import NormWeight
from kernels.experts import Pairs
from kernels.native.library import NativeOp

GroupedOp: TypeAlias = tuple[str, NativeOp]

ADDED_TOKENS, HEAD_NORMS = "added_tokens", "head_norms"
"""Groups: of steps whose adapters may have tokens behind the vocabulary, and, behind the path of a
layer's attention, of the norms of its queries, keys and values."""
WITHOUT = "without "
"""Before the name of a group: of operations that others of that group stand in for."""


class AdapterOps(Protocol):
    """Operations that apply the step's adapters, after the base has computed; groups as in
    `model.lora.Lora`, and the modules of replaced weights. They read a plan that is refilled before
    each run. Tensors are in the model's dtype unless they say otherwise; M is the most `rows` of
    this kind."""

    @property
    def every_group(self) -> frozenset[str]:
        """All groups that adapters may change, and ADDED_TOKENS. Equal on all ranks, which choose
        their programs alike, although some have fewer operations."""

    def add(
        self, group: str, x: Tensor, out: Tensor, bias: Tensor | None, rows: Rows
    ) -> Iterator[GroupedOp]:
        """x: [M, in], out: [M, >= sum of the group's outs], in the model's dtype or fp32. `bias`,
        fp32 [sum of the group's outs], is the base's in `out`."""

    def add_experts(
        self, group: str, x: Tensor, out: Tensor, pairs: Pairs, rows: Rows
    ) -> list[NativeOp]:
        """x: [P, in], out: [P, sum of the group's outs], both in the model's dtype; their rows are
        pairs of a token, one of `rows`, and an expert."""

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        """token_ids: int64 [M], out: [M, hidden_size]."""

    def replace_embeddings(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        """token_ids: int64 [M], out: [M, hidden_size]."""

    def replace_logits(self, x: Tensor, out: Tensor) -> list[NativeOp]:
        """x: [max_rows, hidden_size], out: fp32 [max_rows, >= vocab_size]; their rows are the
        tokens that get logits."""

    def token_weights(
        self, module: str, norm: NormWeight, rows: Rows
    ) -> tuple[list[NativeOp], NormWeight] | None:
        """Returns the operations that fill the weight of a norm for each row, and its bias, and
        the norm with these; None if no adapter replaces it."""


def is_in(group: str, groups: frozenset[str]) -> bool:
    """Returns whether an operation runs where adapters change these groups."""
    if group.startswith(WITHOUT):
        return group.removeprefix(WITHOUT) not in groups
    return not group or group in groups


def head_norms(module: str) -> str:
    """Returns the group of a norm of queries, keys or values, which the other two share."""
    return f"{module.rpartition('.')[0]}.{HEAD_NORMS}"


def heads_normed(
    adapters: AdapterOps,
    norms: Sequence[tuple[Norm | None, NormWeight | None]],
    layer: int | None,
    norm_op: Callable[..., NativeOp],
) -> Iterator[GroupedOp]:
    """Yields the operation of the norms of queries, keys and values, which `norm_op` makes of their
    three weights, and those with weights of tokens that stand in for it."""
    weights = [None if weight is None else weight.weight for _, weight in norms]
    own, group = list(weights), ""
    for index, (norm, weight) in enumerate(norms):
        if norm is None or weight is None or not norm.module:
            continue
        path = norm.path(layer)
        found = adapters.token_weights(path, weight, Rows.TOKENS)
        if found is not None:
            group, own[index] = head_norms(path), found[1].weight
            yield from ((group, op) for op in found[0])
    if group:
        yield group, norm_op(*own)
    yield WITHOUT + group if group else "", norm_op(*weights)
