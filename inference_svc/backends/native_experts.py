"""The operations of mixtures of experts in a native program."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inference_svc.backends.base import choices_bytes, empty_choices
from inference_svc.backends.native_ops import GATED, GroupedOp, LayerOps, Stream, of_group
from inference_svc.model.description import ClampedSwiglu, Decoder, Experts
from inference_svc.model.weights import ExpertsWeights, RouterWeights
from kernels.elementwise import clamped_swiglu_op, gather_op, rms_norm_op
from kernels.experts.native import (
    PairsBuffer,
    combine_op,
    experts_linear_op,
    route_op,
    sort_pairs_op,
)
from kernels.linear import PackedLinear


class NativeExperts:
    """Makes the operations of the layers that have experts. `choices` are the experts that the last
    step's tokens have chosen, int32 [layers that have experts, max_tokens, num_chosen]; `routings`
    has the routing of each layer."""

    def __init__(self, decoder: Decoder, max_tokens: int, ops: LayerOps) -> None:
        self.choices = empty_choices(decoder, max_tokens, torch.device("cpu"))
        self.routings = _allocate_routings(decoder, self.choices)
        self._ops = ops

    def layer_ops(
        self,
        index: int,
        experts: Experts,
        weights: ExpertsWeights[PackedLinear],
        x: Tensor,
        stream: Stream,
    ) -> Iterator[GroupedOp]:
        """Writes the experts' outputs to `delta`, together with the shared half's, which is
        there."""
        work, name, count = self._ops.workspace, f"layers.{index}", stream.count
        shared = None if experts.shared is None else work.delta
        gate = None
        if experts.shared_gate is not None and weights.shared_gate is not None:
            gate = work.shared_logits
            group = f"{name}.{experts.shared_gate.name}"
            yield from self._ops.project(group, x, weights.shared_gate, gate, stream)
        routing = self.routings[index]
        yield from self._routing_ops(name, experts, weights.router, x, routing, stream)
        if experts.norm is not None and weights.norm is not None:
            x = work.normed
            yield from self._ops.norm_of_stream(experts.norm.path(index), weights.norm, stream)
        yield from self._pairs_ops(name, experts, weights, x, routing, stream)
        made = work.rows_of(work.of_pairs, x.shape[1], experts.num_chosen)
        norms = (experts.shared_post_norm, experts.post_norm)
        if experts.post_norm is None:
            yield "", combine_op(made, routing, work.delta, count, shared, gate)
            return
        yield "", combine_op(made, routing, work.normed, count)
        for each, weight, out in zip(
            *(norms, (weights.shared_post_norm, weights.post_norm), (work.delta, work.normed)),
            strict=True,
        ):
            yield from self._ops.post_norm(each, weight, stream, index, out)
        yield "", rms_norm_op(work.delta, work.normed, None, work.delta, count, eps=0.0)

    def _routing_ops(
        self,
        name: str,
        experts: Experts,
        weights: RouterWeights[PackedLinear],
        x: Tensor,
        routing: PairsBuffer,
        stream: Stream,
    ) -> Iterator[GroupedOp]:
        """Chooses experts, and sorts the pairs of tokens and experts."""
        work, router = self._ops.workspace, experts.router
        if weights.norm is not None:
            x = work.normed
            yield from self._ops.norm_of_stream("", weights.norm, stream)
        logits = work.rows_of(work.router_logits, experts.num_experts)
        group = f"{name}.{router.projection.name}"
        yield from self._ops.project(group, x, weights.projection, logits, stream)
        vectors = weights.bias, weights.expert_scales
        yield "", route_op(logits, router.choice, routing, stream.count, *vectors)
        yield "", sort_pairs_op(routing, stream.count)

    def _pairs_ops(
        self,
        name: str,
        experts: Experts,
        weights: ExpertsWeights[PackedLinear],
        x: Tensor,
        routing: PairsBuffer,
        stream: Stream,
    ) -> Iterator[GroupedOp]:
        """The experts' outputs of each pair, in place of their inputs."""
        work, size, each = self._ops.workspace, experts.size, experts.num_chosen
        rows = work.rows_of(work.of_pairs, x.shape[1], each)
        gate_up = work.rows_of(work.gate_up, 2 * size, each)
        gated = work.rows_of(work.gated, size, each)

        def project(
            group: str, of: Tensor, linear: PackedLinear, out: Tensor
        ) -> Iterator[GroupedOp]:
            yield "", experts_linear_op(of, linear, out, routing)
            logits_only = stream.logits_only
            ops = self._ops.adapters.add_experts(
                group, of, out, routing.pairs, logits_only=logits_only
            )
            yield from of_group(group, ops)

        yield "", gather_op(x, rows, routing.pairs.tokens, routing.num_pairs)
        yield from project(f"{name}.{experts.gate_up.name}", rows, weights.gate_up, gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        activation = experts.activation
        if isinstance(activation, ClampedSwiglu):
            bounds = {"alpha": activation.alpha, "limit": activation.limit}
            yield "", clamped_swiglu_op(gate, up, gated, routing.num_pairs, **bounds)
        else:
            yield "", GATED[activation](gate, up, gated, routing.num_pairs)
        yield from project(f"{name}.{experts.down.name}", gated, weights.down, rows)


def _allocate_routings(decoder: Decoder, choices: Tensor | None) -> dict[int, PairsBuffer]:
    """Returns the routing of each layer that has experts. Layers share all of it but which
    experts were chosen."""
    shape = decoder.expert_layers
    if shape is None or choices is None:
        return {}
    shared = PairsBuffer.allocate(choices.shape[1], shape.num_experts, shape.num_chosen)
    return {
        layer: shared.with_experts(own) for layer, own in zip(shape.layers, choices, strict=True)
    }


def routings_bytes(decoder: Decoder, max_tokens: int) -> int:
    """Returns the memory of the routing of steps of up to so many tokens."""
    shape = decoder.expert_layers
    if shape is None:
        return 0
    shared_bytes = PairsBuffer.bytes_of(max_tokens, shape.num_experts, shape.num_chosen)
    return choices_bytes(decoder, max_tokens) + shared_bytes
