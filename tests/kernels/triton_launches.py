"""What our operations launch, as worker.py runs them: without a GPU, and nothing is compiled."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from kernels import triton_launchers
from kernels.attention import AttentionPlan, HeadNorms, KVCache
from kernels.attention import triton_ops as attention_ops
from kernels.elementwise import triton_ops as elementwise_ops
from kernels.elementwise.addend import Addend
from kernels.experts import Choice, Scoring
from kernels.experts import triton_ops as experts_ops
from kernels.lora import (
    LoraGroup,
    LoraPlan,
    LoraTable,
    OutputVectors,
    ReplacedWeight,
    TableEntry,
    TableRow,
)
from kernels.lora import triton_ops as lora_ops
from kernels.lora.table import MixPart
from kernels.quantised import Activations, Codes, QuantisedWeight, WeightFormat
from kernels.quantised import triton_ops as quantised_ops
from kernels.recurrence import DeltaHeads, DeviceSegments, Segments
from kernels.recurrence import triton_ops as recurrence_ops
from kernels.replaced import triton_ops as replaced_ops
from tests.support.kernels.worker import NoDevice

MANY = 300
"""Tokens that are launched as a long prompt is."""


def launch_lora(row_lengths: list[int]) -> None:
    arena = torch.zeros(1024, dtype=torch.bfloat16)
    table = LoraTable.create(4, 224, arena, "cpu", max_rank=64)
    plan = LoraPlan.build([0] * len(row_lengths), row_lengths, table, "cpu")
    group = LoraGroup((1, 2), 512, (0, 256), (256, 128))
    x = torch.zeros(plan.num_tokens, 512, dtype=torch.bfloat16)
    out = torch.zeros(plan.num_tokens, group.out_end, dtype=torch.bfloat16)
    lora_ops.add_lora(out, x, arena, table, plan, group)
    lora_ops.compute_addend(out, x, arena, table, plan, group)
    lora_ops.add_lora_embedding(out, plan.token_slots, arena, table, plan, 0)
    lora_ops.gather(plan.token_slots, arena, table, plan, 0)
    launch_others(row_lengths, arena, group, x, out)


def launch_others(
    row_lengths: list[int],
    arena: torch.Tensor,
    group: LoraGroup,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """What adapters have besides A and B, and sums of adapters."""
    table = LoraTable.create(4, 224, arena, "cpu", max_rank=64, num_weights=1, num_mixes=1)
    row = TableEntry(1, 0, 0, 4, 16, 16, vectors=OutputVectors(0, 0, 0))
    table.set_row(0, TableRow.of([row], [ReplacedWeight(0, 0)]))
    table.set_mix(4, [MixPart(0, 1.0)])
    for slot in (0, 4):
        plan = LoraPlan.build([slot] * len(row_lengths), row_lengths, table, "cpu")
        for base_bias in (None, out[0]):
            lora_ops.add_lora(out, x, arena, table, plan, group, base_bias)
        lora_ops.add_lora_embedding(out, plan.token_slots, arena, table, plan, 0)
    ids = torch.zeros(plan.num_tokens, dtype=torch.int64)
    replaced_ops.token_weights(out[0], table, plan, 0)
    replaced_ops.token_weights(out[0].float(), table, plan, 0, 1.0)
    replaced_ops.replace_embeddings(out, ids, table, plan, 0)
    replaced_ops.replace_logits(out, x, table, plan, 0, 100)


def launch_attention(rows: list[tuple[int, int]], page_size: int, norms: str = "") -> None:
    """`rows`: (first position, queries); `norms`: of each head, or of all."""
    cache = KVCache.allocate(
        num_layers=1, num_pages=4, page_size=page_size, num_kv_heads=2, head_dim=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    pages = [[0] * (1 + (first + count) // page_size) for first, count in rows]
    plan = AttentionPlan.build(*zip(*rows, strict=True), pages, page_size)
    num_tokens = len(plan.cells)
    qkv = torch.zeros(num_tokens, 8 * 64, dtype=torch.bfloat16)
    angles = attention_ops.rotary_angles(plan.cells, torch.zeros(32), 1, torch.bfloat16)
    sizes = {"": (0, 0), "each": (64, 64), "all": (4 * 64, 2 * 64)}[norms]
    weights = [torch.ones(size, dtype=torch.bfloat16) if size else None for size in sizes]
    store = partial(attention_ops.rotate_and_store, num_heads=4)
    slots = torch.zeros(num_tokens, dtype=torch.int32)
    for addend in (None, Addend(torch.zeros_like(qkv), slots)):
        if addend is None or norms != "all":
            store(qkv, cache, 0, plan.cells, *angles, HeadNorms(*weights), addend=addend)
        store(qkv, cache, 0, plan.cells, None, None, addend=addend)
        growth = torch.ones(num_tokens, dtype=torch.bfloat16)
        store(qkv, cache, 0, plan.cells, *angles, q_scale=growth, addend=addend)
        # Values that are keys, and keys and values of another layer.
        of_each = HeadNorms(*(torch.ones(64) for _ in range(3)))
        for width, found in ((6, of_each), (4, of_each._replace(k=None, v=None))):
            part = qkv[:, : width * 64].contiguous()
            of_part = addend and addend._replace(values=part.clone())
            store(part, cache, 0, plan.cells, *angles, found, addend=of_part)
    q = qkv[:, : 4 * 64].view(num_tokens, 4, 64)
    of_pairs = torch.zeros(32, num_tokens, dtype=torch.int64).t()
    attention_ops.rotary_angles(of_pairs, torch.zeros(32), 1, torch.bfloat16)
    # Tokens of an image see each other.
    seen = AttentionPlan.build(*zip(*rows, strict=True), pages, page_size, mutual=[(0, 1)])
    for each, sinks in ((plan, None), (plan, torch.zeros(4)), (seen, None)):
        attention_ops.attend(q, cache, 0, each, scale=0.1, sinks=sinks)


def launch_between(num_tokens: int) -> None:
    """What lies between projections, of a first layer, of the others, and of the last norm."""
    hidden, weight = torch.zeros(num_tokens, 256, dtype=torch.bfloat16), torch.ones(256)
    weight, rows = weight.to(torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    slots = torch.zeros(num_tokens, dtype=torch.int32)
    for delta, chosen in ((None, None), (hidden, None), (hidden, rows)):
        for addend in (None, Addend(hidden, slots)):
            elementwise_ops.add_rms_norm(hidden, delta, weight, 1e-5, chosen, addend=addend)
            biased = torch.ones(256), torch.zeros(256)
            elementwise_ops.add_rms_norm(
                hidden, delta, biased[0], 1e-5, chosen, bias=biased[1], addend=addend
            )
        elementwise_ops.add_rms_norm(hidden, delta, weight, 1e-5, chosen, delta_scale=0.5)
    gate_up = torch.zeros(num_tokens, 512, dtype=torch.bfloat16)
    elementwise_ops.swiglu(*gate_up.chunk(2, dim=1))
    elementwise_ops.swiglu(*gate_up.chunk(2, dim=1), Addend(gate_up, slots))
    elementwise_ops.clamped_swiglu(*gate_up.chunk(2, dim=1), 1.7, 7.0)


def launch_recurrence(row_lengths: list[int]) -> None:
    """A gated delta net, and attention's gate, of rows of one segment each."""
    rows = [[(0, 1 + row, count)] for row, count in enumerate(row_lengths)]
    segments = Segments((), (), (), DeviceSegments.build(rows, "cpu"))
    made = torch.zeros(sum(row_lengths), 3 * 64 + 64 + 8, dtype=torch.bfloat16)
    x, z, b, a = made.split((3 * 64, 64, 4, 4), dim=1)
    inputs, states, vector = torch.zeros(1, 3, 3 * 64), torch.zeros(1, 4, 16, 16), torch.zeros(4)
    mixed = recurrence_ops.causal_conv(x, torch.zeros(3 * 64, 4), inputs, segments)
    heads = DeltaHeads(4, 4, 16, 16)
    mixed = recurrence_ops.delta_rule(mixed, b, a, vector, vector, states, segments, heads)
    by_head = mixed.view(len(mixed), 4, 16)
    for weight in (by_head[0, 0], by_head[:, 0].contiguous()):
        recurrence_ops.gated_norm(by_head, z.unflatten(1, (4, 16)), weight, 1e-6)
    recurrence_ops.gate_heads(mixed, mixed)


def launch_experts(row_lengths: list[int]) -> None:
    """A mixture, with adapters."""
    table = LoraTable.create(4, 1, torch.zeros(1024, dtype=torch.bfloat16), "cpu", max_rank=16)
    plan = LoraPlan.build([0] * len(row_lengths), row_lengths, table, "cpu")
    order, num_tokens = lora_ops.order_tokens(plan), plan.num_tokens
    logits, vector = torch.zeros(num_tokens, 16), torch.zeros(16)
    for vectors in ((None, None), (vector, None), (None, vector), (vector, vector)):
        routing = experts_ops.route(logits, Choice(4, Scoring.SIGMOID), *vectors)
    # Nothing has run: where these lie nobody has written.
    for tokens in (None, order.tokens):
        pairs = experts_ops.sort_pairs(routing.experts, 16, tokens)
    own = experts_ops.own_pairs(pairs, (4, 12))
    for each in (pairs, own):
        lora_ops.plan_pairs(plan, order, routing.experts, each)
    weight, bias = (torch.zeros(16, *shape, dtype=torch.bfloat16) for shape in ((64, 64), (64,)))
    x = torch.zeros(len(pairs.tokens), 64, dtype=torch.bfloat16)
    for own_bias in (None, bias):
        made = experts_ops.experts_linear(x, weight, pairs, own_bias)
        experts_ops.experts_linear(x[:num_tokens], weight, pairs, own_bias, pairs.tokens)
    for shared, gate in ((None, None), (x[:num_tokens], None), (x[:num_tokens], vector[:1])):
        for each in (pairs, own):
            experts_ops.combine(made, each, routing.weights, shared, gate)


def launch_quantised(row_lengths: list[int]) -> None:
    """Products with weights in few bits: with offsets, and with inputs that are rounded."""
    num_rows = sum(row_lengths)
    chosen = torch.zeros(num_rows, 1, dtype=torch.int32)
    pairs = experts_ops.sort_pairs(chosen, 2)
    for codes, has_offsets, activations in product(
        (Codes.INT8, Codes.UINT4), (False, True), Activations
    ):
        if activations is Activations.INT8 and codes is not Codes.INT8:
            continue
        form = WeightFormat(codes, 0, has_offsets, "bfloat16", activations)
        weight = QuantisedWeight.empty(form, 128, 1024, torch.device("cpu"))
        x, bias = torch.zeros(num_rows, 1024), torch.zeros(2, 64)
        for own in (x, x.to(torch.bfloat16)):
            for of_all in (None, bias.flatten()):
                quantised_ops.linear(own, weight, of_all)
            for of_experts in (None, bias):
                quantised_ops.experts_linear(own, weight, pairs, of_experts, 64, 64)


def launched_signatures() -> list[tuple[str, dict[str, str]]]:
    """(kernel, types of its arguments) of each launch, in which Triton asks what to compile."""
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    found: list[tuple[str, dict[str, str]]] = []

    def note(**facts: Any) -> bool:
        found.append((facts["fn"].name, facts["compile"]["signature"]))
        return True  # nothing is to be compiled

    knobs.runtime.jit_cache_hook = note
    try:
        for row_lengths in ([1], [1] * 8, [100, 1], [MANY], [20 * MANY]):
            launch_experts(row_lengths)
        for row_lengths in ([1], [1] * 8, [100, 1], [MANY]):
            launch_lora(row_lengths)
            launch_between(sum(row_lengths))
            launch_recurrence(row_lengths)
            launch_quantised(row_lengths)
        for rows in ([(5, 1)], [(5, 1)] * 8, [(0, 40), (9, 1)], [(0, MANY)]):
            for page_size in (16, 1024):
                for norms in ("", "each", "all"):
                    launch_attention(rows, page_size, norms)
    finally:
        knobs.runtime.jit_cache_hook = None
    return found


def missing_modules() -> list[tuple[str, dict[str, str]]]:
    """The launches whose C module Triton would have to compile."""
    return [
        (kernel, signature)
        for kernel, signature in launched_signatures()
        for source, name in triton_launchers.launcher(signature).items()
        if not triton_launchers.is_cached(source, name)
    ]


def num_launches_by_kernel() -> dict[str, int]:
    names = [kernel for kernel, _ in launched_signatures()]
    return {name: names.count(name) for name in names}


def every_kernel() -> set[str]:
    return {kernel.__name__ for kernel in triton_launchers.kernels()}


def has_driver_module() -> bool:
    [(source, name)] = [each for each in triton_launchers.modules().items() if "cuda" in each[1]]
    return triton_launchers.is_cached(source, name)


OPERATIONS = {
    f.__name__: f
    for f in (missing_modules, num_launches_by_kernel, every_kernel, has_driver_module)
}
