"""The device memory that the CUDA backend takes, computed before anything is allocated.

All of it is an upper bound. Torch's allocations are read off the list of a step's operations; the
memory of the driver for a recorded step, and of libraries, are estimates with their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch

from inference_svc.adapters.layout import HEAD
from inference_svc.adapters.targets import (
    AppliedTargets,
    applied_targets,
    computed_groups,
    layout_of,
)
from inference_svc.backends.arena import table_bytes
from inference_svc.backends.base import (
    MemoryNeeds,
    choices_bytes,
    max_pages,
    states_bytes,
)
from inference_svc.backends.cuda.inputs import CudaInputs, CudaPictures
from inference_svc.backends.cuda.lora import CudaLora
from inference_svc.backends.cuda.padded_sizes import StepKind, decode_sizes, most_prompt_tokens
from inference_svc.backends.cuda.rank_needs import exchange_bytes, exchange_nodes, library_bytes
from inference_svc.backends.cuda.segments import CudaSegments
from inference_svc.backends.magnitudes import DEVICE_SLICE_ELEMENTS
from inference_svc.backends.torch_needs import picture_needs
from inference_svc.core import EngineConfig
from inference_svc.model.checkpoint.parameters import parameters, weight_formats, weights_bytes
from inference_svc.model.description import Attention, Decoder, ExpertsProjection, Projection
from inference_svc.model.encoder.towers import AddPictures
from inference_svc.model.lifetimes import ValueSizes, token_weights_bytes, transformer_bytes
from inference_svc.model.operations import (
    AddNorm,
    Angles,
    Attend,
    Combine,
    Growth,
    Logits,
    NormOf,
    Op,
    Project,
    ProjectExperts,
    RotateAndStore,
    Route,
)
from inference_svc.model.sharding.pictures import takes_pictures
from inference_svc.model.walk import operations
from kernels import tuning
from kernels.attention.plan import max_segments
from kernels.lora import LoraGroup
from kernels.lora.table import MAX_PARTS, workspace_rank
from kernels.quantised import Activations, inputs_bytes, workspace_bytes

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
"""A product and, where cuBLAS or ours splits it, the sum of its parts."""
NODES: Mapping[type[Op], int] = {Growth: 6, Attend: 2, Route: 2, AddPictures: 2}
"""Kernels of operations that take more than one: growth operation by operation; segments and their
combination; the choice, and the order of pairs; the sum, and the choice of tokens that it is of."""
GROUP_NODES = 2
"""The adapters of a group: shrink and expand."""
SHARED_NODES = 2
"""The sums of a group that ranks share: over chunks of inputs, and over ranks."""
STAGED_TOKENS_NODES = 3
"""Stages look up tokens that adapters add, and hand on logits of them, whether a step has any."""
OTHER_NODES = 3
"""Kernels around the decoder's operations: tokens as they were sampled, and the logits and the
largest of them, to their place."""
GROWTH_BYTES = 32
"""The memory of a token's growth, operation by operation."""
POSITION_BYTES = 8
"""The position that turns a pair of a head, where tokens have several."""
PAIR_BYTES = 64
"""A pair's part of a mixture's routing, of the order of pairs, and of their plan."""
DEQUANTISED_BYTES = 10
"""The memory of an element of a weight in few bits while it is dequantised: its code in one byte
and in four, and its value or its scale."""
ORDER_BYTES = 4
"""A token's place in the order of tokens by adapter, which a mixture keeps for the whole step."""
SAMPLER_COPIES = 4
"""Copies of the logits in fp32 that choosing tokens takes beside the logits: the probabilities for
callers that want them, and three while rows are drawn."""


def memory_needs(config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
    sampler_bytes = SAMPLER_COPIES * 4 * config.max_sequences * decoder.vocab_size
    layers_bytes = step_bytes(config, decoder, config.max_batch_tokens)
    between_bytes = _dividing_bytes(config, decoder)
    largest_bytes = max(sampler_bytes, layers_bytes, between_bytes)
    workspace_bytes = largest_bytes + _fixed_bytes(config, decoder)
    needs = MemoryNeeds(
        weights_bytes(decoder, getattr(torch, config.dtype)),
        workspace_bytes,
        graphs_bytes=_graphs_bytes(config, decoder) if config.record_steps else 0,
        libraries_bytes=LIBRARIES_BYTES + library_bytes(decoder),
        recurrent_bytes=states_bytes(config, decoder),
    )
    return needs.plus(picture_needs(config, decoder, on_device=True))


def _dividing_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory for dividing DoRA's magnitudes between two steps: rows of W + BA, and A
    and B of a target, in fp32."""
    targets = layout_of(config, decoder).targets
    features = max((each.in_features + each.out_features for each in targets), default=0)
    row_bytes = DEQUANTISED_BYTES if weight_formats(decoder) else 4
    return row_bytes * DEVICE_SLICE_ELEMENTS + 4 * config.max_lora_rank * features


def step_bytes(
    config: EngineConfig, decoder: Decoder, num_tokens: int, *, is_beside: bool = False
) -> int:
    """Returns the most memory that `Transformer.forward` allocates at one time for so many tokens
    of all sequences, its logits included. `is_beside`: adapters have nothing but A and B, and run
    beside the products."""
    dtype = getattr(torch, config.dtype)
    sizes = ValueSizes.of(decoder, num_tokens, config.max_sequences, dtype, PAIR_BYTES)
    own = _OwnBytes.of(config, decoder, sizes, is_beside=is_beside)
    order_bytes = ORDER_BYTES * num_tokens if decoder.mixtures else 0
    return transformer_bytes(decoder, sizes, own.of_op) + order_bytes


class _OwnBytes(NamedTuple):
    """The memory of an operation beside its inputs and outputs, while it runs."""

    config: EngineConfig
    sizes: ValueSizes
    shrunk: _ShrunkBytes
    replaced: Collection[str]
    """The weights of the base that adapters may replace."""
    is_beside: bool

    @classmethod
    def of(
        cls, config: EngineConfig, decoder: Decoder, sizes: ValueSizes, *, is_beside: bool
    ) -> _OwnBytes:
        shrunk = _ShrunkBytes.of(config, decoder, num_parts=1 if is_beside else MAX_PARTS)
        targets = applied_targets(layout_of(config, decoder), config.lora_targets)
        return cls(config, sizes, shrunk, targets.weights.keys(), is_beside)

    def of_op(self, op: Op, before: Op | None) -> int:
        """Returns the bytes of an operation, which runs after `before`."""
        num_bytes = 0 if before is None else self._addend_bytes(before)
        if isinstance(op, Project):
            shrunk_bytes = self.shrunk.by(op.group, self.sizes.rows(op.out))
            num_bytes += self._product_bytes(op, shrunk_bytes) + self._addend_bytes(op)
        elif isinstance(op, ProjectExperts):
            shrunk_bytes = self.shrunk.by(op.group, self.sizes.max_pairs)
            num_bytes += max(shrunk_bytes, self._few_bits_bytes(op))
        elif isinstance(op, Attend):
            num_bytes += _partial_results_bytes(self.config, op.attention)
        elif isinstance(op, Logits):
            num_bytes += self._logits_bytes(op)
        elif isinstance(op, AddPictures):
            num_bytes += self.sizes.num_bytes(op.out)  # the sum of all tokens
        elif isinstance(op, Angles) and op.rope.axes is not None:
            num_pairs = op.rope.rotary_size(op.head_dim) // 2
            num_bytes += POSITION_BYTES * num_pairs * self.sizes.max_tokens
        elif isinstance(op, Growth):
            num_bytes += GROWTH_BYTES * self.sizes.max_tokens
        else:
            num_bytes += exchange_bytes(op, self.sizes, self.config.max_added_tokens)
        if isinstance(op, NormOf | Combine) and op.out in op.inputs:
            num_bytes += self.sizes.num_bytes(op.out)  # a new one
        if not self.is_beside:
            num_bytes += token_weights_bytes(op, self.sizes, self.replaced)
        return num_bytes

    def _addend_bytes(self, op: Op) -> int:
        """Returns the bytes of an addend, which stays until the next operation has read it."""
        if not self.is_beside or not isinstance(op, Project) or not op.reader_adds:
            return 0
        group = self.shrunk.groups.get(op.group)
        row_bytes = self.sizes.rows(op.out) * self.sizes.dtype.itemsize
        return 0 if group is None else row_bytes * group.out_end

    def _product_bytes(self, op: Project | Logits, shrunk_bytes: int) -> int:
        """Returns the bytes of a product and of its adapters' shrunk inputs, which come after it or
        are beside it."""
        product_bytes = self._few_bits_bytes(op)
        is_beside = self.is_beside and isinstance(op, Project) and _may_be_beside(op)
        return product_bytes + shrunk_bytes if is_beside else max(product_bytes, shrunk_bytes)

    def _few_bits_bytes(self, op: Project | ProjectExperts | Logits) -> int:
        """Returns the bytes of products with weights in few bits: their kernels' own and, after
        them, the outputs of parts, which are laid side by side in the place of these."""
        projection, num_rows = op.projection, self.sizes.rows(op.out)
        parts, item_bytes = projection.parts, self.sizes.dtype.itemsize
        outputs_bytes = 0
        if len(parts) > 1:
            out_item_bytes = 4 if op.out.is_wide else item_bytes
            outputs_bytes = out_item_bytes * num_rows * projection.out_features
        inner, is_of_experts = projection.in_features, isinstance(op, ProjectExperts)
        own_bytes = (
            inputs_bytes(form, num_rows, inner, item_bytes)
            if is_of_experts
            else workspace_bytes(form, num_rows, part_rows, inner, item_bytes)
            for part_rows, form in parts
            if form is not None
        )
        return max(outputs_bytes, *own_bytes, 0)

    def _logits_bytes(self, op: Logits) -> int:
        """Where adapters add tokens, logits are copied to wider ones, and bounds make copies."""
        shrunk_bytes = self.shrunk.by(HEAD, self.config.max_sequences)
        exchanged_bytes, num_added = exchange_bytes(op, self.sizes, 0), 0
        num_bytes = max(self._product_bytes(op, shrunk_bytes), exchanged_bytes)
        if self.config.max_added_tokens and not self.is_beside:
            num_added = op.out.width + self.config.max_added_tokens
        num_copies = (op.head.scale != 1.0) + 2 * (op.head.softcap is not None)
        elements = num_added + num_copies * max(num_added, op.out.width)
        return num_bytes + self.config.max_sequences * elements * self.sizes.dtype.itemsize


def _may_be_beside(op: Project) -> bool:
    """Returns whether adapters of a product may run beside it; see `Lora`."""
    return op.reader_adds or op.projection.in_cut is not None


def _partial_results_bytes(config: EngineConfig, attention: Attention) -> int:
    """Returns the memory of decode attention for the segments of all contexts, in fp32: sums, and
    their weights."""
    positions = min(tuned["positions"] for tuned in tuning.all_constants("segments"))
    longest = max_pages(config) * config.page_size
    num_segments = max_segments(config.max_sequences + 1, longest, positions)
    return 4 * num_segments * attention.num_heads * (attention.head_dim + 1)


class _ShrunkBytes(NamedTuple):
    """The product of a group's inputs with A of an adapter, or of each part of a sum: fp32. Few
    tokens have a sum for each chunk of their features. Rows of the embedding are looked up."""

    groups: Mapping[str, LoraGroup]
    shared: Collection[str]
    """Groups whose sums are summed once more, over ranks."""
    rank: int
    """Up to the end of a block of ranks."""
    num_parts: int

    @classmethod
    def of(cls, config: EngineConfig, decoder: Decoder, num_parts: int) -> _ShrunkBytes:
        tables = product(tuning.all_constants("shrink"), tuning.all_constants("expand"))
        rank = max(workspace_rank(config.max_lora_rank, *tuned) for tuned in tables)
        shared = layout_of(config, decoder).shared_groups
        return cls(computed_groups(config, decoder), shared, rank, num_parts)

    def by(self, name: str, num_tokens: int) -> int:
        """Returns the bytes of a group; 0 if no adapter changes it."""
        group = self.groups.get(name)
        if group is None:
            return 0
        num_bytes = self._of(group.in_features, len(group.targets), num_tokens)
        chunk = min(tuned["chunk"] for tuned in tuning.all_constants("shrink"))
        if name in self.shared and group.in_features > chunk:
            num_bytes += 4 * self.num_parts * num_tokens * len(group.targets) * self.rank
        return num_bytes

    def _of(self, in_features: int, num_targets: int, num_tokens: int) -> int:
        num_split = max(
            min(num_tokens, tuned["split_tokens"]) * -(-in_features // tuned["chunk"])
            for tuned in tuning.all_constants("shrink")
        )
        return 4 * self.num_parts * max(num_tokens, num_split) * num_targets * self.rank


def _fixed_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory held between steps: the buffers of logits and chosen experts, inputs, and
    the tables of pages and of adapters."""
    # Padding of a step with prompts is one row more.
    max_tokens, max_rows = config.max_batch_tokens, config.max_sequences + 1
    logits_bytes = max_rows * (4 * (decoder.vocab_size + config.max_added_tokens) + 8)
    pictures = decoder.pictures
    of_inputs = partial(CudaInputs.num_bytes, pictures=pictures)
    parts: list[Callable[[int, int], int]] = [of_inputs, CudaLora.num_bytes]
    if decoder.recurrences:
        parts.append(CudaSegments.num_bytes)
    counts = (max_tokens, max_rows)
    inputs_bytes = sum(part(count, max_rows) for count in counts for part in parts)
    pages_bytes = 4 * ((max_rows + 1) * max_pages(config) + 1)
    results_bytes = logits_bytes + choices_bytes(decoder, max_tokens)
    if pictures is not None and takes_pictures(decoder):
        dtype = getattr(torch, config.dtype)
        inputs_bytes += CudaPictures.mask_bytes(max_tokens)
        inputs_bytes += CudaPictures.rows_bytes(max_tokens, pictures, dtype)
    return results_bytes + inputs_bytes + pages_bytes + table_bytes(config, decoder, max_rows)


def recorded_nodes(
    decoder: Decoder,
    kind: StepKind,
    num_groups: int,
    *,
    num_shared: int = 0,
    adds_tokens: bool = False,
) -> int:
    """Returns how many kernels a recorded decode step of this kind has at most, with adapters in so
    many groups of projections, of which ranks share some; a test counts them."""
    num_nodes = OTHER_NODES + _operations_nodes(decoder)
    if decoder.stage is not None and adds_tokens:
        num_nodes += STAGED_TOKENS_NODES
    if kind is not StepKind.BASE:
        num_nodes += GROUP_NODES * num_groups + SHARED_NODES * num_shared
        mixtures = [layer for layer in decoder.layers if decoder.blocks[layer].experts is not None]
        if mixtures:  # the order of tokens, and a plan of each layer's pairs
            num_nodes += 1 + 2 * len(mixtures)
    if kind is StepKind.ANY:
        num_nodes += _replacement_nodes(decoder, adds_tokens=adds_tokens)
    return num_nodes


@lru_cache(maxsize=64)
def _operations_nodes(decoder: Decoder) -> int:
    """Returns how many kernels a decode step's operations launch, without adapters."""
    found = operations(decoder)
    ops = (*found.layers, *found.head)
    return sum(map(_num_nodes, ops)) + sum(map(exchange_nodes, ops))


def _num_nodes(op: Op) -> int:
    """Returns how many kernels an operation launches, without adapters."""
    if isinstance(op, Angles) and op.rope.axes is not None:
        return 2  # the first finds the position that turns each pair
    if isinstance(op, Project):
        num_nodes = _product_nodes(op.projection)
        return num_nodes + (op.out.is_wide and op.projection.has_bias) * len(op.projection.parts)
    if isinstance(op, ProjectExperts):
        return 1 + _rounds_inputs(op.projection)
    if isinstance(op, AddNorm):
        # A norm adds to the residual stream along; where there is none, torch's operations do.
        return 1 if op.norm is not None else 1 + (op.delta_scale != 1.0) + (op.sum_scale != 1.0)
    if isinstance(op, RotateAndStore):
        attention = op.attention
        norms = (attention.q_norm, attention.k_norm)
        return 1 + sum(each is not None and each.size != attention.head_dim for each in norms)
    if isinstance(op, Logits):
        head = op.head
        num_nodes = _product_nodes(op.projection)
        return num_nodes + (head.scale != 1.0) + 3 * (head.softcap is not None)
    return NODES.get(type(op), 1)


def _product_nodes(projection: Projection) -> int:
    """Returns how many kernels a projection's product takes: of several parts each has its own, and
    one lays their outputs side by side."""
    num_parts = len(projection.parts)
    return PRODUCT_NODES * num_parts + (num_parts > 1) + _rounds_inputs(projection)


def _rounds_inputs(projection: Projection | ExpertsProjection) -> int:
    """Returns how many parts of a projection have one more kernel, which rounds their inputs."""
    formats = (each.format for each in projection.parts)
    return sum(form is not None and form.activations is not Activations.EXACT for form in formats)


def max_prompt_recordings(decoder: Decoder, targets: AppliedTargets) -> int:
    """Returns how many recorded steps with prompts have room, in every stage. Each has one more
    kernel a layer than decode steps."""
    num_shared = len(targets.shared.keys() & targets.groups.keys())
    if decoder.stage is None:
        return _max_prompt_recordings(decoder, len(targets.groups), num_shared, targets)
    # No stage knows which groups adapters change in another: all, the embedding and the head.
    numbers = []
    for stage in decoder.every_stage:
        ops = operations(stage).layers
        most = 2 + len({op.group for op in ops if isinstance(op, Project | ProjectExperts)})
        of_ranks = 0 if decoder.rank is None else most
        numbers.append(_max_prompt_recordings(stage, most, of_ranks, targets))
    return min(numbers)


def _max_prompt_recordings(
    decoder: Decoder, num_groups: int, num_shared: int, targets: AppliedTargets
) -> int:
    num_nodes = recorded_nodes(
        decoder,
        StepKind.ANY,
        num_groups,
        num_shared=num_shared,
        adds_tokens=targets.max_added_tokens > 0,
    )
    return PROMPT_RECORDINGS_BYTES // ((num_nodes + len(decoder.layers)) * NODE_BYTES)


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


def _graphs_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of recorded steps: their kernels, and the memory of one of the largest,
    which all of them compute in. Of each number of decode rows there is one of each kind, and of
    steps with prompts as many as have room."""
    groups, adds_tokens = computed_groups(config, decoder), config.max_added_tokens > 0
    num_shared = len(layout_of(config, decoder).shared_groups.keys() & groups.keys())
    of_kinds = [
        recorded_nodes(decoder, kind, len(groups), num_shared=num_shared, adds_tokens=adds_tokens)
        for kind in StepKind
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
