"""The operations that layers of a native program are made of, with adapters' operations beside
them.

An operation comes with the group of adapters that it is part of: "" always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from inference_svc.backends.native_buffers import Workspace
from inference_svc.model.description import Activation, Norm
from kernels.elementwise import NormWeight, geglu_op, rms_norm_op, swiglu_op
from kernels.experts import Pairs
from kernels.linear import PackedLinear, linear_op
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
    each run. Tensors are in the model's dtype unless they say otherwise; M is `max_tokens`, or
    `max_rows` with `logits_only`."""

    def add(
        self, group: str, x: Tensor, out: Tensor, bias: Tensor | None, *, logits_only: bool
    ) -> list[NativeOp]:
        """x: [M, in], out: [M, >= sum of the group's outs], in the model's dtype or fp32; their
        rows are the tokens of the step, or only the ones that get logits. `bias`, fp32 [sum of the
        group's outs], is the base's in `out`."""

    def add_experts(
        self, group: str, x: Tensor, out: Tensor, pairs: Pairs, *, logits_only: bool
    ) -> list[NativeOp]:
        """x: [P, in], out: [P, sum of the group's outs]; their rows are pairs of a token and an
        expert."""

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        """token_ids: int64 [M], out: [M, hidden_size]."""

    def replace_embeddings(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        """token_ids: int64 [M], out: [M, hidden_size]."""

    def replace_logits(self, x: Tensor, out: Tensor) -> list[NativeOp]:
        """x: [max_rows, hidden_size], out: fp32 [max_rows, >= vocab_size]; their rows are the
        tokens that get logits."""

    def token_weights(
        self, module: str, norm: NormWeight, *, logits_only: bool
    ) -> tuple[NativeOp, NormWeight] | None:
        """Returns the operation that fills the weight of a norm for each token, and the norm with
        that; None if no adapter replaces it."""


GATED = {Activation.SILU: swiglu_op, Activation.GELU_TANH: geglu_op}


@dataclass(slots=True)
class Stream:
    """The residual stream of every token of a step, or only of the ones that get logits: `hidden`
    [max_tokens, hidden_size] in the model's dtype, and `count`, int32 [1], its rows. `delta` is
    still to be added to it, times `delta_scale`, and `sum_scale` multiplies their sum; the next
    norm does both."""

    hidden: Tensor
    count: Tensor
    logits_only: bool = False
    delta: Tensor | None = None
    delta_scale: float = 1.0
    sum_scale: float = 1.0

    def leave(self, delta: Tensor, delta_scale: float = 1.0) -> None:
        """Leaves `delta` [max_tokens, hidden_size] to be added by the next norm."""
        assert self.delta is None
        self.delta, self.delta_scale, self.sum_scale = delta, delta_scale, 1.0

    def take(self) -> tuple[Tensor | None, float, float]:
        """Returns the pending delta [max_tokens, hidden_size], its scale and the sum's; None, 1, 1
        if there is none."""
        delta, self.delta = self.delta, None
        scales = (self.delta_scale, self.sum_scale) if delta is not None else (1.0, 1.0)
        return delta, *scales


@dataclass(frozen=True, slots=True)
class LayerOps:
    """Makes the operations of layers over one workspace."""

    workspace: Workspace
    adapters: AdapterOps

    def add_and_norm(
        self,
        norm: Norm | None,
        weight: NormWeight | None,
        stream: Stream,
        layer: int | None = None,
    ) -> Iterator[GroupedOp]:
        """Adds the pending delta to the residual stream, and norms the sum."""
        if weight is None and stream.delta is None:
            return
        delta, delta_scale, sum_scale = stream.take()

        def norm_op(made: NormWeight | None) -> NativeOp:
            return rms_norm_op(
                stream.hidden,
                delta,
                None if made is None else made.weight,
                *(self.workspace.normed, stream.count),
                eps=0.0 if made is None else made.eps,
                delta_scale=delta_scale,
                sum_scale=sum_scale,
                is_centred=made is not None and made.is_centred,
            )

        if norm is None or weight is None:
            yield "", norm_op(None)
        else:
            yield from self.normed(norm.path(layer), weight, norm_op, stream)

    def norm_of_stream(
        self, module: str, weight: NormWeight, stream: Stream
    ) -> Iterator[GroupedOp]:
        """Writes a norm of the residual stream, to which nothing is left to be added, to
        `normed`."""
        assert stream.delta is None

        def norm_op(made: NormWeight) -> NativeOp:
            return rms_norm_op(
                *(stream.hidden, None, made.weight, self.workspace.normed, stream.count),
                eps=made.eps,
                is_centred=made.is_centred,
            )

        yield from self.normed(module, weight, norm_op, stream)

    def post_norm(
        self,
        norm: Norm | None,
        weight: NormWeight | None,
        stream: Stream,
        layer: int,
        out: Tensor | None = None,
    ) -> Iterator[GroupedOp]:
        """Norms `delta`, or `out`, [max_tokens, hidden_size], in place."""
        delta = self.workspace.delta if out is None else out

        def norm_op(made: NormWeight) -> NativeOp:
            return rms_norm_op(
                *(delta, None, made.weight, delta, stream.count),
                eps=made.eps,
                is_centred=made.is_centred,
            )

        if norm is not None and weight is not None:
            yield from self.normed(norm.path(layer), weight, norm_op, stream)

    def normed(
        self,
        module: str,
        weight: NormWeight,
        norm_op: Callable[[NormWeight], NativeOp],
        stream: Stream,
    ) -> Iterator[GroupedOp]:
        """Yields the operation of a norm, and those with weights of tokens that stand in for it."""
        logits_only = stream.logits_only
        own = self.adapters.token_weights(module, weight, logits_only=logits_only)
        if own is None:
            yield "", norm_op(weight)
            return
        yield WITHOUT + module, norm_op(weight)
        yield module, own[0]
        yield module, norm_op(own[1])

    def project(
        self, group: str, x: Tensor, weights: PackedLinear, out: Tensor, stream: Stream
    ) -> Iterator[GroupedOp]:
        """x: [max_tokens, in], out: [max_tokens, out], in the model's dtype; adds the step's
        adapters to the product."""
        yield "", linear_op(x, weights, out, stream.count)
        logits_only = stream.logits_only
        ops = self.adapters.add(group, x, out, weights.bias, logits_only=logits_only)
        yield from of_group(group, ops)


def is_in(group: str, groups: frozenset[str]) -> bool:
    if group.startswith(WITHOUT):
        return group.removeprefix(WITHOUT) not in groups
    return group in groups


def of_group(group: str, ops: Iterable[NativeOp]) -> Iterator[GroupedOp]:
    return ((group, op) for op in ops)
