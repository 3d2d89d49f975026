"""The device memory that the CUDA backend takes, computed before anything is allocated.

All of it is an upper bound. Torch's allocations are counted operation by operation; the memory of
the driver for a recorded step, and of libraries, are estimates with their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch

from inference_svc.adapters.layout import HEAD
from inference_svc.adapters.targets import computed_groups, layout_of
from inference_svc.backends.base import MemoryNeeds, choices_bytes, max_pages
from inference_svc.backends.cuda_inputs import CudaInputs
from inference_svc.backends.cuda_lora import CudaLora
from inference_svc.backends.cuda_shapes import StepKind, decode_sizes, most_prompt_tokens
from inference_svc.backends.magnitudes import DEVICE_SLICE_ELEMENTS
from inference_svc.core import EngineConfig
from inference_svc.model.description import (
    LAYER_INPUTS,
    Block,
    Decoder,
    Experts,
    Projection,
)
from inference_svc.model.parameters import parameters, weights_bytes
from kernels import tuning
from kernels.attention.plan import max_segments
from kernels.lora import LoraGroup
from kernels.lora.table import MAX_PARTS, NUM_FIELDS, NUM_WEIGHT_FIELDS, workspace_rank

MIB = 1 << 20
LIBRARIES_BYTES = 384 * MIB
"""In addition to the context: cuBLAS' workspaces (torch gives one to each stream that multiplies,
32 MiB on Hopper: the streams that compute and record), the code that cuBLAS, torch and Triton load
when it first runs, and the rounding of torch's allocator. An estimate."""
NODE_BYTES = 4 << 10
"""Device memory of a kernel in a recorded step. On an H200 with driver 580, eight recordings of an
8B model in a row took 8 MB, less than 3 KiB a kernel."""
PROMPT_RECORDINGS_BYTES = 128 * MIB
"""Memory for the kernels of recorded steps with prompts: 48 of an 8B model."""
PRODUCT_NODES = 2
"""A product and, where cuBLAS splits it, the sum of its parts."""
GROWTH_NODES = 6
"""How much queries grow, operation by operation."""
GROUP_NODES = 2
"""The adapters of a group: shrink and expand."""
OTHER_NODES = 5 + PRODUCT_NODES
"""The operations around all layers: tokens as they were sampled, their embedding, the last norm,
the head, and the logits and the largest of them, to their place."""
PAIR_BYTES = 64
"""A pair's part of a mixture's routing, of the order of pairs, and of their plan."""
SAMPLER_COPIES = 4
"""Copies of the logits in fp32 that choosing tokens takes beside the logits: the probabilities for
callers that want them, and three while rows are drawn."""


def memory_needs(config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
    sampler_bytes = SAMPLER_COPIES * 4 * config.max_sequences * decoder.vocab_size
    layers_bytes = step_bytes(config, decoder, config.max_batch_tokens)
    between_bytes = _dividing_bytes(config, decoder)
    largest_bytes = max(sampler_bytes, layers_bytes, between_bytes)
    workspace_bytes = largest_bytes + _fixed_bytes(config, decoder)
    return MemoryNeeds(
        weights_bytes(decoder, getattr(torch, config.dtype)),
        workspace_bytes,
        graphs_bytes=_graphs_bytes(config, decoder) if config.record_steps else 0,
        libraries_bytes=LIBRARIES_BYTES,
    )


def _dividing_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory for dividing DoRA's magnitudes between two steps: rows of W + BA, and A
    and B of a target, in fp32."""
    targets = layout_of(config, decoder).targets
    features = max((each.in_features + each.out_features for each in targets), default=0)
    return 4 * (DEVICE_SLICE_ELEMENTS + config.max_lora_rank * features)


def step_bytes(
    config: EngineConfig, decoder: Decoder, num_tokens: int, *, is_beside: bool = False
) -> int:
    """Returns the most memory that `Transformer.forward` allocates at one time for so many tokens
    of all sequences, its logits included. `is_beside`: adapters have nothing but A and B, and run
    beside the products."""
    g, item_bytes = decoder, getattr(torch, config.dtype).itemsize
    row_bytes = num_tokens * item_bytes
    shrunk = _ShrunkBytes.of(config, decoder, num_parts=1 if is_beside else MAX_PARTS)

    def addend_bytes(role: str) -> int:
        return row_bytes * shrunk.num_outputs(role) if is_beside else 0

    # A half's output, and its norm; while adapters add to it, their shrunk inputs are there.
    out_bytes = row_bytes * g.hidden_size * (1 + any(block.post_norms for block in g.blocks))
    attention_bytes = row_bytes * (2 * g.max_q_size + 2 * g.max_kv_size)
    of_heads, of_stream = (num_tokens * size for size in _token_weights_bytes(config, g))
    shrunk_bytes = shrunk.by("qkv", num_tokens) + addend_bytes("qkv")
    at_attention = max(_partial_results_bytes(config, g), of_heads, shrunk_bytes)
    at_head = shrunk.by(HEAD, config.max_sequences) + of_stream
    phases: tuple[int, ...] = (
        attention_bytes + at_attention,
        out_bytes + of_stream + max(addend_bytes("o"), addend_bytes("down")),
        attention_bytes + out_bytes + shrunk.by("o", num_tokens) + addend_bytes("o"),
        row_bytes * 2 * g.max_intermediate_size + shrunk.by("gate_up", num_tokens),
        row_bytes * 3 * g.max_intermediate_size + addend_bytes("gate_up"),
        row_bytes * 3 * g.max_intermediate_size
        + out_bytes
        + shrunk.by("down", num_tokens)
        + addend_bytes("down"),
        _num_logits(config, g) * item_bytes + at_head,
    )
    phases += tuple(
        _experts_bytes(config, g, num_tokens, shrunk) + of_stream for _ in g.mixtures[:1]
    )
    # Throughout, the residual stream, its norm, the angles, and the per-layer inputs; these are
    # made before, of as much again twice.
    kept = 2 * g.hidden_size + sum(2 * rope.rotary_size(head_dim) for rope, head_dim in g.ropes)
    if g.layer_inputs is not None:
        kept += g.layer_inputs.total_size
        made_bytes = 2 * row_bytes * g.layer_inputs.total_size
        phases += (made_bytes + max(shrunk.by(LAYER_INPUTS, num_tokens), of_stream),)
    return row_bytes * kept + max(phases)


def _experts_bytes(
    config: EngineConfig, decoder: Decoder, num_tokens: int, shrunk: _ShrunkBytes
) -> int:
    """Returns the most memory of the largest mixture: the experts' inputs and outputs for each
    pair, and throughout the shared half, the routing, and the plan of pairs."""
    item_bytes, hidden = getattr(torch, config.dtype).itemsize, decoder.hidden_size
    stream_bytes = num_tokens * hidden * item_bytes
    found = []
    for each in decoder.mixtures:
        num_pairs = num_tokens * each.num_chosen
        of_hidden, of_size = (num_pairs * size * item_bytes for size in (hidden, each.size))
        phases = (
            of_hidden + 2 * of_size + shrunk.by("experts.gate_up", num_pairs),
            3 * of_size,
            of_size + of_hidden + shrunk.by("experts.down", num_pairs),
            of_hidden + stream_bytes,
        )
        has_own_norm = each.norm is not None
        kept = stream_bytes * ((each.shared is not None) + has_own_norm)
        kept += num_tokens * (4 * each.num_experts + 4) + PAIR_BYTES * num_pairs
        found.append(kept + max(phases))
    return max(found)


def _token_weights_bytes(config: EngineConfig, decoder: Decoder) -> tuple[int, int]:
    """Returns the memory, at one time and for one token, of norms' weights that are the token's
    own: of queries, keys and values, and another."""
    dtype = getattr(torch, config.dtype)
    heads: Counter[int | None] = Counter()
    largest = 0
    for each in parameters(decoder):
        if each.norm is not None and each.key.endswith(("q_norm", "k_norm", "v_norm")):
            heads[each.layer] += each.num_bytes(dtype)
        elif each.norm is not None:
            largest = max(largest, each.num_bytes(dtype))
    return max(heads.values(), default=0), largest


def _num_logits(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the elements of logits; where adapters add tokens they are copied to wider ones."""
    num_added = config.max_added_tokens
    elements = decoder.vocab_size + (decoder.vocab_size + num_added if num_added else 0)
    return config.max_sequences * elements


def _partial_results_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of decode attention for the segments of all contexts, in fp32: sums, and
    their weights."""
    positions = min(tuned["positions"] for tuned in tuning.all_constants("segments"))
    longest = max_pages(config) * config.page_size
    num_segments = max_segments(config.max_sequences + 1, longest, positions)
    return 4 * num_segments * max(a.num_heads * (a.head_dim + 1) for a in decoder.attentions)


class _ShrunkBytes(NamedTuple):
    """The product of a group's inputs with A of an adapter, or of each part of a sum: fp32. Few
    tokens have a sum for each chunk of their features. Rows of the embedding are looked up."""

    groups: Mapping[str, LoraGroup]
    rank: int
    """Up to the end of a block of ranks."""
    num_parts: int

    @classmethod
    def of(cls, config: EngineConfig, decoder: Decoder, num_parts: int) -> _ShrunkBytes:
        tables = product(tuning.all_constants("shrink"), tuning.all_constants("expand"))
        rank = max(workspace_rank(config.max_lora_rank, *tuned) for tuned in tables)
        return cls(computed_groups(config, decoder), rank, num_parts)

    def num_outputs(self, role: str) -> int:
        """Returns the outputs of the widest of the groups of all layers that are called so."""
        return max(
            (group.out_end for name, group in self.groups.items() if _role_of(name) == role),
            default=0,
        )

    def by(self, role: str, num_tokens: int) -> int:
        """Returns the bytes of the widest of the groups of all layers that are called so."""
        found = (group for name, group in self.groups.items() if _role_of(name) == role)
        # Layers mostly have the same.
        shapes = {(group.in_features, len(group.targets)) for group in found}
        return max((self._of(*shape, num_tokens) for shape in shapes), default=0)

    def _of(self, in_features: int, num_targets: int, num_tokens: int) -> int:
        num_split = max(
            min(num_tokens, tuned["split_tokens"]) * -(-in_features // tuned["chunk"])
            for tuned in tuning.all_constants("shrink")
        )
        return 4 * self.num_parts * max(num_tokens, num_split) * num_targets * self.rank


def _role_of(group: str) -> str:
    """Returns a group's name in every layer, such as "qkv" or "experts.down"."""
    return group.split(".", 2)[2] if group.startswith("layers.") else group


def _fixed_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory held between steps: the buffers of logits and chosen experts, inputs, and
    the tables of pages and of adapters."""
    # Padding of a step with prompts is one row more.
    max_tokens, max_rows = config.max_batch_tokens, config.max_sequences + 1
    logits_bytes = max_rows * (4 * (decoder.vocab_size + config.max_added_tokens) + 8)
    inputs_bytes = sum(
        CudaInputs.num_bytes(count, max_rows) + CudaLora.num_bytes(count, max_rows)
        for count in (max_tokens, max_rows)
    )
    layout = layout_of(config, decoder)
    pages_bytes = 4 * ((max_rows + 1) * max_pages(config) + 1)
    row_size = NUM_FIELDS * len(layout.targets) + NUM_WEIGHT_FIELDS * len(layout.weights)
    table_bytes = 4 * (config.max_loras + MAX_PARTS * max_rows) * row_size
    results_bytes = logits_bytes + choices_bytes(decoder, max_tokens)
    return results_bytes + inputs_bytes + pages_bytes + table_bytes


def recorded_nodes(
    decoder: Decoder, kind: StepKind, num_groups: int, *, adds_tokens: bool = False
) -> int:
    """Returns how many kernels a recorded decode step of this kind has at most, with adapters in so
    many groups of projections; a test counts them."""
    head = decoder.head
    num_nodes = OTHER_NODES + len(decoder.ropes) + GROWTH_NODES * len(decoder.query_growths)
    num_nodes += (decoder.embedding_scale != 1.0) + (head.scale != 1.0)
    if head.softcap is not None:
        num_nodes += 3
    if decoder.layer_inputs is not None:
        # Two tables' parts, each scaled, their sum, scaled, and a norm.
        num_nodes += PRODUCT_NODES + 6
    if kind is not StepKind.BASE:
        num_nodes += GROUP_NODES * num_groups
        if decoder.mixtures:  # the order of tokens, and a plan of each layer's pairs
            num_nodes += 1 + 2 * len(decoder.mixtures)
    if kind is StepKind.ANY:
        num_nodes += _replacement_nodes(decoder, adds_tokens=adds_tokens)
    return num_nodes + sum(map(_layer_nodes, decoder.blocks))


def max_prompt_recordings(decoder: Decoder, num_groups: int, *, adds_tokens: bool) -> int:
    """Returns how many recorded steps with prompts have room. Each has one more kernel a layer than
    decode steps."""
    num_nodes = recorded_nodes(decoder, StepKind.ANY, num_groups, adds_tokens=adds_tokens)
    return PROMPT_RECORDINGS_BYTES // ((num_nodes + decoder.num_layers) * NODE_BYTES)


def _replacement_nodes(decoder: Decoder, *, adds_tokens: bool) -> int:
    """Returns how many kernels stand in for the base's weights: one for each norm, and the
    embedding's and the head's. With tokens that adapters add logits are copied to wider ones, such
    tokens are looked up as the last one of the vocabulary, and a cap leaves out absent tokens."""
    norms = [each.norm for each in parameters(decoder) if each.norm is not None]
    num_nodes = sum(not norm.tensor for norm in norms) + 2
    if adds_tokens:
        num_nodes += 2 + 1 + (decoder.layer_inputs is not None)
        num_nodes += 2 * (decoder.head.softcap is not None)
    return num_nodes


def _layer_nodes(block: Block) -> int:
    attention, has_input = block.attention, block.layer_input is not None
    dense = [each for each in block.projections if isinstance(each, Projection)]
    num_nodes = PRODUCT_NODES * len(dense)
    num_nodes += 3  # attention: keys and values to their cells, segments, and their combination
    num_nodes += (block.dense is not None) + has_input  # activations
    if block.experts is not None:
        num_nodes += _experts_nodes(block.experts)
    of_heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    num_nodes += sum(norm.size != attention.head_dim for norm in of_heads)
    num_nodes += len(block.post_norms)
    # A norm adds to the residual stream along; where there is none, torch's operations do.
    sum_nodes = 1 + (block.residual_scale != 1.0)
    num_nodes += 1 if block.attention_norm is not None else sum_nodes + bool(block.scalar)
    num_nodes += 1 if block.feed_forward_norm is not None else sum_nodes
    return num_nodes + sum_nodes * has_input


def _experts_nodes(experts: Experts) -> int:
    """Returns how many kernels a mixture has besides its dense products: for the choice, the order
    of pairs, their inputs, two products, the activation, and the sum."""
    norms = (experts.norm, experts.router.norm)
    num_nodes = 7 + sum(norm is not None for norm in norms)
    num_nodes += experts.router.projection.has_bias
    return num_nodes + (experts.post_norm is not None)  # then the shared half is added apart


def _graphs_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of recorded steps: their kernels, and the memory of one of the largest,
    which all of them compute in. Of each number of decode rows there is one of each kind, and of
    steps with prompts as many as have room."""
    num_groups = len(computed_groups(config, decoder))
    adds_tokens = config.max_added_tokens > 0
    of_kinds = [
        recorded_nodes(decoder, kind, num_groups, adds_tokens=adds_tokens) for kind in StepKind
    ]
    decodes_bytes = len(decode_sizes(config.max_sequences)) * sum(of_kinds) * NODE_BYTES
    most_tokens = max(config.max_sequences, most_prompt_tokens(config.max_batch_tokens))
    most_beside = max(tuned["most_rows"] for tuned in tuning.all_constants("beside"))
    return (
        PROMPT_RECORDINGS_BYTES
        + decodes_bytes
        + max(
            step_bytes(config, decoder, most_tokens),
            step_bytes(config, decoder, min(most_tokens, most_beside), is_beside=True),
        )
    )
