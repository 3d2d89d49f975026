"""The memory of steps in torch on a CPU, and of towers in torch on a CPU or a device, read off the
list of their operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.adapters.targets import (
    AppliedTargets,
    applied_targets,
    applied_to_pictures,
    layout_of,
)
from inference_svc.backends.arena import table_bytes
from inference_svc.backends.base import MemoryNeeds
from inference_svc.backends.pictures import handed_bytes
from inference_svc.core import EngineConfig
from inference_svc.model.checkpoint.parameters import weights_bytes
from inference_svc.model.description import (
    Attention,
    BothWays,
    ClampedSwiglu,
    Decoder,
    ExpertsProjection,
    Merging,
    Pictures,
    Projection,
)
from inference_svc.model.encoder.clips import Clip, Join
from inference_svc.model.encoder.operations import (
    Activate,
    AddInputs,
    ArrangeHeads,
    AttendBothWays,
    RotateHeads,
)
from inference_svc.model.encoder.towers import (
    AddPictures,
    EmbedPatches,
    MergePatches,
    PlacePictures,
    ReadPatches,
    Standardise,
    attention_of,
)
from inference_svc.model.lifetimes import ValueSizes, token_weights_bytes, transformer_bytes
from inference_svc.model.mixers.gated_delta import Convolve, DeltaRule, GatedNorm
from inference_svc.model.mixers.short_conv import GatedConvolve
from inference_svc.model.operations import (
    AddNorm,
    Angles,
    Attend,
    Combine,
    Embed,
    Gate,
    GateHeads,
    Gather,
    Growth,
    HandOn,
    Logits,
    NormBySums,
    NormOf,
    Op,
    Project,
    ProjectExperts,
    Receive,
    Regroup,
    RotateAndStore,
    Route,
    Rows,
    Scale,
    Spread,
    SumRanks,
    SumSquares,
)
from inference_svc.model.sharding.pictures import has_tower
from inference_svc.pictures.processor import CHANNELS
from kernels.lora.table import MAX_PARTS
from kernels.pictures.native import MAX_BLENDED
from kernels.quantised.weight import BLOCK_ELEMENTS, COPY_BYTES
from kernels.recurrence.reference import CHUNK

PAIR_BYTES = 64
"""A pair's part of a mixture's routing."""
ROUTE_COPIES = 6
"""Copies of a router's logits in fp32 that choosing experts takes."""
WIDENED_BYTES, ROUNDED_BYTES = 9, 13
"""An element of keys and values in FP8 that is read: its code, in fp32, times its scale; and one
that is written: in fp32, its magnitude, over the scale, its code."""
SCORE_COPIES = 3
"""Copies of attention's scores in fp32, where they are bounded or have sinks."""
BOTH_WAYS_COPIES = 5
"""Copies of the outputs of attention without a causal mask: queries, keys and values, outputs, and
their rows in order."""
SCORED_QUERIES = 512
"""Queries whose scores torch's attention without a causal mask holds at once, at most."""
DEVICE_ALIGNMENT = 16
"""Bytes that a head must be a multiple of, or a device holds all scores of its attention."""
CLAMPED_COPIES = 6
"""Copies in fp32 that a clamped activation takes."""
SHARED_COPIES = 4
"""Copies in fp32 of shrunk inputs that ranks share: theirs, joined, and their sum in pieces."""
OUTPUT_COPIES = 5
"""Copies of a target's outputs in fp32 that adapters take which have more than A and B."""
CONVOLVED_COPIES, GATED_COPIES = 5, 6
"""Copies in fp32 that a causal convolution takes of its tokens, and a gated norm."""
QUERY_COPIES, VALUE_COPIES, DECAY_COPIES = 5, 5, 6
"""Copies in fp32 that the delta rule takes of each token's queries, values, and decays."""
SQUARE_COPIES, PRODUCT_COPIES = 6, 9
"""Copies of a chunk's products of tokens with tokens, and of tokens with states."""
STATE_COPIES = 3
"""Copies of states that are computed at once."""
STATE_WIDTHS = 6
"""Copies of all patches of a tile, each as wide as all heads, which stay between steps: queries,
keys and values of two layers."""
READ_WIDTHS = 2
"""Further ones while a layer is computed: keys and values in order."""
ANGLE_BYTES = 24
"""The memory of an element of cos and sin while they are made: positions, angles and waves, of each
half in fp32."""
NUM_PLANS = 2
"""A tile's plan, and the next one's while that is made."""
PIXEL_COPIES = 2
"""Copies in fp32 of a part's pixels: as numbers, and put together by patches."""
SAMPLER_COPIES = 2
"""Copies of the logits in fp32 that choosing tokens takes beside the logits."""


def step_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the workspace of the widest step of `max_batch_tokens` tokens, one longest sequence
    among them; the table's rows of sums of adapters; and the sampler's copies of the logits. It is
    an upper bound: an operation is counted with adapters of every kind."""
    dtype = getattr(torch, config.dtype)
    sizes = ValueSizes.of(decoder, config.max_batch_tokens, config.max_sequences, dtype, PAIR_BYTES)
    layout = layout_of(config, decoder)
    targets = applied_targets(layout, config.lora_targets, config.max_added_tokens)
    own = _OwnBytes(config, sizes, targets)
    logits_bytes = 4 * config.max_sequences * decoder.num_outputs

    largest_bytes = masks_bytes(config, decoder) + transformer_bytes(decoder, sizes, own.of_op)
    sampler_bytes = (1 + SAMPLER_COPIES) * logits_bytes
    return table_bytes(config, decoder, config.max_sequences) + max(largest_bytes, sampler_bytes)


def masks_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of the masks of windows, which an encoder's step keeps to its end: one for
    each window and each length of a row. The squares of lengths that have a sum are the largest
    where one row is as long as it may be, and all others are, too."""
    mixers = (block.mixer for block in decoder.blocks)
    reaches = {each.reach for each in mixers if isinstance(each, BothWays)} - {None}
    return len(reaches) * config.max_model_len * config.max_batch_tokens


def picture_needs(
    config: EngineConfig, decoder: Decoder, *, on_device: bool = False
) -> MemoryNeeds:
    """Returns the memory of a vision tower in torch, if it is here: its weights; the workspace of
    a part of a tile, with the tile's pixels; the tile's plan and state, which stay while other
    steps are computed; and the embeddings of pictures. Pixels of requests lie on the host. Of
    several ranks each has the embeddings of a step, too."""
    found, dtype = decoder.pictures, getattr(torch, config.dtype)
    shared_bytes = handed_bytes(decoder, config.max_batch_tokens, dtype)
    if found is None or not has_tower(decoder):
        return MemoryNeeds(0, shared_bytes)
    tower = found.tower
    count = found.max_inner_tokens(config.max_model_len)
    part = found.tiles.max_part(count)
    sizes = ValueSizes.of(tower, part, part, dtype)
    of_tile = replace(config, max_model_len=count, max_batch_tokens=part, max_prefill_chunk=part)
    targets = applied_to_pictures(layout_of(config, decoder), config.lora_targets)
    own = _OwnBytes(of_tile, sizes, targets, on_device)
    read_bytes = count * READ_WIDTHS * _attention_width(tower) * dtype.itemsize
    part_bytes = transformer_bytes(tower, sizes, own.of_op) + read_bytes
    making_bytes = count * _angles_width(tower) * ANGLE_BYTES
    held_bytes = tile_bytes(tower, dtype, count) + NUM_PLANS * plan_bytes(found, count)
    num_bytes = held_bytes + max(part_bytes, making_bytes) + config.prompt_image_bytes
    return MemoryNeeds(weights_bytes(tower, dtype), num_bytes + shared_bytes)


def tile_bytes(tower: Decoder, dtype: torch.dtype, count: int) -> int:
    """Returns the memory of a `TorchTile` of so many tokens, without its plan."""
    of_layers = STATE_WIDTHS * _attention_width(tower)
    return count * (tower.hidden_size + of_layers + _angles_width(tower)) * dtype.itemsize


def _attention_width(tower: Decoder) -> int:
    return max(each.size for each in attention_of(tower))


def _angles_width(tower: Decoder) -> int:
    """Returns the elements of cos and sin of a token, of all rotations."""
    return 2 * sum(rope.rotary_size(head_dim) for rope, head_dim in tower.ropes)


def plan_bytes(pictures: Pictures, count: int) -> int:
    """Returns the memory of a `TilePlan` of so many tokens: rows and columns of patches, positions,
    which may have both, places of cells, and rows and weights of a table that are blended."""
    of_blend = MAX_BLENDED * (torch.int64.itemsize + torch.float32.itemsize)
    inputs = pictures.tower.encoder
    has_table = inputs is not None and inputs.positions is not None
    return count * (5 * torch.int64.itemsize + has_table * of_blend)


class _OwnBytes(NamedTuple):
    """The memory of an operation beside its inputs and outputs, while it runs."""

    config: EngineConfig
    sizes: ValueSizes
    targets: AppliedTargets
    on_device: bool = False

    def of_op(self, op: Op, before: Op | None) -> int:
        """Returns the bytes of an operation."""
        find = OWN_BYTES.get(type(op))
        if find is None:
            raise NotImplementedError(
                f"OWN_BYTES lacks {type(op).__name__}: say how much memory it takes while it runs"
            )
        num_bytes = find(op, self)
        return num_bytes + 2 * token_weights_bytes(op, self.sizes, self.targets.weights)

    @property
    def item_bytes(self) -> int:
        """The bytes of an element in the model's dtype."""
        return self.sizes.dtype.itemsize

    def elements(self, op: Op) -> int:
        """Returns the elements of an operation's output."""
        return self.sizes.rows(op.out) * op.out.width

    def group_bytes(self, name: str, num_rows: int) -> int:
        """Returns the memory of a group's adapters: the shrunk inputs of all parts of a sum, and
        copies of a target's outputs in fp32."""
        group = self.targets.groups.get(name)
        if group is None:
            return 0
        widest, rank = max(group.out_features), self.config.max_lora_rank
        shrunk = 4 * num_rows * MAX_PARTS * len(group.targets) * rank
        if name in self.targets.shared:
            shrunk *= SHARED_COPIES
        if self.config.adapter_dtype != "auto":  # A or B in the model's dtype
            shrunk += self.item_bytes * rank * max(widest, group.in_features)
        return (
            shrunk + OUTPUT_COPIES * 4 * num_rows * widest + 4 * rank * (widest + group.in_features)
        )


def _attention_bytes(attention: Attention, config: EngineConfig, item_bytes: int) -> int:
    """Returns the memory of attention of one longest sequence's chunk: its gathered keys and
    values, and the scores or the mask."""
    num_cells = min(config.max_model_len, (attention.window or config.max_model_len))
    num_queries = min(config.max_prefill_chunk, config.max_batch_tokens)
    num_cells = min(config.max_model_len, num_cells + num_queries)
    if config.kv_dtype == "fp8":
        item_bytes += WIDENED_BYTES
    num_bytes = num_cells * 2 * attention.kv_size * item_bytes + num_queries * num_cells
    if attention.softcap is not None or attention.sinks:
        num_bytes += SCORE_COPIES * 4 * attention.num_heads * num_queries * num_cells
    return num_bytes


def _nothing(op: Op, own: _OwnBytes) -> int:
    """Operations that write their output at once, or in place."""
    return 0


def _of_rotation(op: RotateAndStore, own: _OwnBytes) -> int:
    rounded_bytes = ROUNDED_BYTES if own.config.kv_dtype == "fp8" else 0
    return own.elements(op) * (2 * own.item_bytes + 4 + rounded_bytes)


def _of_attention(op: Attend, own: _OwnBytes) -> int:
    scores_bytes = _attention_bytes(op.attention, own.config, own.item_bytes)
    return scores_bytes + 2 * own.elements(op) * own.item_bytes


def _of_both_ways(op: AttendBothWays, own: _OwnBytes) -> int:
    """Copies of queries, keys and values, and of the outputs; the scores, where torch does not
    compute them in blocks; and the mask as numbers. On a device it does, unless rows of heads do
    not begin on 16 bytes."""
    mixer, longest = op.mixer, own.config.max_model_len
    num_bytes = BOTH_WAYS_COPIES * own.elements(op) * own.item_bytes
    if mixer.reach is not None:
        num_bytes += longest * longest * own.item_bytes
    most_queries = min(longest, SCORED_QUERIES)
    if own.on_device:
        is_aligned = mixer.head_dim * own.item_bytes % DEVICE_ALIGNMENT == 0
        most_queries = 0 if is_aligned else own.sizes.rows(op.out)
    return num_bytes + 4 * mixer.num_heads * longest * most_queries


def _of_turning(op: RotateHeads, own: _OwnBytes) -> int:
    """Queries and keys as they are turned, in the model's dtype and in fp32."""
    elements = own.sizes.rows(op.out) * 2 * op.mixer.size
    return elements * (2 * own.item_bytes + 4)


def _of_patches(op: EmbedPatches, own: _OwnBytes) -> int:
    """The pixels, and the tokens in fp32."""
    of_pixels = _pixels_bytes(op.patches.form.patch_size, own.sizes.rows(op.out), own)
    return of_pixels + 2 * 4 * own.elements(op)


def _of_read(op: ReadPatches, own: _OwnBytes) -> int:
    return _pixels_bytes(op.patches.form.patch_size, own.sizes.rows(op.out), own)


def _pixels_bytes(side: int, num_patches: int, own: _OwnBytes) -> int:
    """Returns the memory of a part's patches: the rows of pixels around it, which of some tiles are
    all; its pixels as bytes, as indexes and as numbers."""
    of_part = (1 + 8 + 4 * PIXEL_COPIES) * num_patches
    return CHANNELS * side**2 * (own.config.max_model_len + of_part)


def _of_standard(op: Standardise, own: _OwnBytes) -> int:
    """Copies in fp32: scaled, less the bias, and times the factor."""
    return 3 * 4 * own.elements(op)


def _of_heads(op: ArrangeHeads, own: _OwnBytes) -> int:
    """Copies of the heads of a kind: as they are, in fp32, normed, and ordered."""
    return own.elements(op) // 3 * (4 + 3 * own.item_bytes)


def _of_merge(op: MergePatches, own: _OwnBytes) -> int:
    """A copy, or the patches and their means in fp32."""
    return own.elements(op) * (2 * 4 if op.merging is Merging.MEAN else own.item_bytes)


def _of_norm(op: AddNorm | NormOf, own: _OwnBytes) -> int:
    return own.elements(op) * (4 + own.item_bytes)


def _of_gate(op: Gate, own: _OwnBytes) -> int:
    is_clamped = isinstance(op.activation, ClampedSwiglu)
    return own.elements(op) * (CLAMPED_COPIES * 4 if is_clamped else own.item_bytes)


def _of_project(op: Project, own: _OwnBytes) -> int:
    num_rows = own.sizes.rows(op.out)
    num_bytes = own.group_bytes(op.group, num_rows)
    if op.out.is_wide:  # inputs and weights are copied to fp32
        num_bytes += 4 * op.inputs[0].width * (num_rows + op.out.width)
    return num_bytes + _dequantising_bytes(op.projection, num_rows, own)


def _of_experts(op: ProjectExperts, own: _OwnBytes) -> int:
    num_rows = own.sizes.rows(op.out)
    adapters_bytes = own.group_bytes(op.group, num_rows)
    dequantised_bytes = _dequantising_bytes(op.projection, num_rows, own)
    return adapters_bytes + 4 * own.elements(op) + dequantised_bytes


def _dequantising_bytes(
    projection: Projection | ExpertsProjection, num_rows: int, own: _OwnBytes
) -> int:
    """Returns the memory for multiplying `num_rows` by weights in few bits: rows of the weight that
    are made plain, of experts all of one; the inputs as the format has them; and, of several parts,
    the outputs of each."""
    formats = [each.format for each in projection.parts if each.format is not None]
    if not formats:
        return 0
    elements = projection.out_features * projection.in_features
    if isinstance(projection, Projection):
        elements = min(elements, BLOCK_ELEMENTS)
    inputs_bytes = 3 * 4 * num_rows * projection.in_features
    outputs_bytes = own.item_bytes * num_rows * projection.out_features
    return COPY_BYTES * elements + inputs_bytes + outputs_bytes


def _of_route(op: Route, own: _OwnBytes) -> int:
    of_logits = ROUTE_COPIES * 4 * own.sizes.rows(op.out) * op.experts.num_experts
    return of_logits + own.sizes.max_pairs * PAIR_BYTES


def _of_combine(op: Combine, own: _OwnBytes) -> int:
    of_pairs = 2 * 4 * own.sizes.max_pairs * op.out.width
    return of_pairs + 2 * own.elements(op) * own.item_bytes


def _of_embedding(op: Embed | Growth, own: _OwnBytes) -> int:
    num_rows = own.sizes.rows(op.out)
    return 32 * num_rows + own.group_bytes(EMBEDDING, num_rows)


def _of_logits(op: Logits, own: _OwnBytes) -> int:
    num_rows = own.sizes.rows(op.out)
    padded = num_rows * (op.out.width + own.config.max_added_tokens)
    return own.group_bytes(HEAD, num_rows) + (4 + 4 * own.item_bytes) * padded


def _of_sum(op: SumRanks, own: _OwnBytes) -> int:
    """Gloo's copy of the terms of other ranks."""
    return 2 * own.elements(op) * own.sizes.dtype_of(op.out).itemsize


def _of_stages(op: HandOn | Receive, own: _OwnBytes) -> int:
    """A copy of the rows, of logits with the columns of tokens that adapters may add."""
    added = own.config.max_added_tokens if op.out.rows is Rows.LOGITS else 0
    return own.sizes.rows(op.out) * (op.out.width + added) * own.item_bytes


def _of_normed(op: SumSquares | NormBySums, own: _OwnBytes) -> int:
    """Columns in fp32, and as the norm and its product leave them."""
    widest = max(each.norm.size for each in op.normed)
    return own.sizes.rows(op.inputs[0]) * widest * 3 * 4


def _of_copy(op: Op, own: _OwnBytes) -> int:
    """Operations that make a copy as large as their output."""
    return own.elements(op) * own.item_bytes


def _of_convolution(op: Convolve | GatedConvolve, own: _OwnBytes) -> int:
    """The tokens, with the ones before them, in fp32 and in the model's dtype, and the states that
    rows read and write. Gates take the place of the activation."""
    of_tokens = own.elements(op) * (CONVOLVED_COPIES * 4 + 2 * own.item_bytes)
    of_state = 4 * math.prod(op.mixer.state_shapes[0])
    return of_tokens + STATE_COPIES * own.config.max_sequences * of_state


def _of_delta_rule(op: DeltaRule, own: _OwnBytes) -> int:
    """Queries and keys of all value heads, values and outputs, in fp32; a chunk's products; and the
    states of rows that have one token."""
    mixer, num_tokens = op.mixer, own.sizes.rows(op.out)
    heads, key, value = mixer.num_value_heads, mixer.key_head_dim, mixer.value_head_dim
    of_token = heads * (QUERY_COPIES * key + VALUE_COPIES * value + DECAY_COPIES)
    chunk = min(CHUNK, num_tokens)
    of_chunk = heads * chunk * (SQUARE_COPIES * chunk + PRODUCT_COPIES * max(key, value))
    of_states = STATE_COPIES * own.config.max_sequences * heads * key * value
    return 4 * (num_tokens * of_token + of_chunk + of_states)


def _of_gated_norm(op: GatedNorm, own: _OwnBytes) -> int:
    return own.elements(op) * (GATED_COPIES * 4 + 2 * own.item_bytes)


OWN_BYTES: dict[type[Op], Callable[[Any, _OwnBytes], int]] = {
    Activate: _nothing,
    AddInputs: _of_copy,
    AddNorm: _of_norm,
    Angles: _nothing,  # see `transformer_bytes`
    ArrangeHeads: _of_heads,
    Attend: _of_attention,
    AttendBothWays: _of_both_ways,
    Clip: _of_copy,
    Combine: _of_combine,
    Convolve: _of_convolution,
    DeltaRule: _of_delta_rule,
    Embed: _of_embedding,
    EmbedPatches: _of_patches,
    Gate: _of_gate,
    GateHeads: _of_copy,
    Gather: _nothing,
    GatedConvolve: _of_convolution,
    GatedNorm: _of_gated_norm,
    Growth: _of_embedding,
    HandOn: _of_stages,
    Join: _nothing,
    Logits: _of_logits,
    MergePatches: _of_merge,
    NormBySums: _of_normed,
    NormOf: _of_norm,
    AddPictures: _nothing,
    PlacePictures: _nothing,
    Project: _of_project,
    ProjectExperts: _of_experts,
    ReadPatches: _of_read,
    Receive: _of_stages,
    Regroup: _nothing,
    RotateAndStore: _of_rotation,
    RotateHeads: _of_turning,
    Route: _of_route,
    Scale: _nothing,
    Spread: _nothing,
    Standardise: _of_standard,
    SumRanks: _of_sum,
    SumSquares: _of_normed,
}
"""The memory that each kind of operation takes while it runs, beside its inputs and outputs. A new
kind without an entry is refused at start."""
