"""The decoder as one program in C++: its operations, top down, over fixed buffers.

The computation of `Transformer`, in the same order and with the same roundings, but in one call: no
Python between operations, no allocation. Programs differ only in which adapters' operations they
hold.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.backends.base import choices_bytes, empty_choices
from inference_svc.backends.native.adapter_ops import (
    ADDED_TOKENS,
    WITHOUT,
    AdapterOps,
    GroupedOp,
    is_in,
)
from inference_svc.backends.native.attention import NativeAttentions
from inference_svc.backends.native.buffers import StepArrays
from inference_svc.backends.native.encoder import NativeEncoder
from inference_svc.backends.native.exchange import ProgramExchange
from inference_svc.backends.native.ops import NativeOps
from inference_svc.backends.native.projections import PackedProjection
from inference_svc.backends.native.states import NativeStates
from inference_svc.backends.native.workspace import Workspace
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder
from inference_svc.model.encoder.towers import AddPictures, PlacePictures
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.walk import Narrowing, operations
from kernels.experts.native import PairsBuffer
from kernels.native.library import Library, Program

MAX_PROGRAMS = 16
"""Tenants choose the targets of their adapters, so that the number must be limited: of each part of
a step."""


class _Part(enum.Enum):
    """The part of a step that a program computes: all, of which the last layer goes on with the
    rows that sample behind its attention; all layers of all tokens; or, of some of these, the
    logits, or the last norm alone."""

    STEP = enum.auto()
    LAYERS = enum.auto()
    HEAD = enum.auto()
    NORM = enum.auto()


_NARROWING = {
    _Part.STEP: Narrowing.IN_LAST_LAYER,
    _Part.LAYERS: Narrowing.BEFORE_HEAD,
    _Part.HEAD: Narrowing.BEFORE_HEAD,
    _Part.NORM: Narrowing.BEFORE_HEAD,
}


class _ProgramKey(NamedTuple):
    """Which adapters' operations a program has, and its outputs. `piece` is which of the pieces
    between a part's openings it is; None: all of them."""

    groups: frozenset[str]
    part: _Part = _Part.STEP
    piece: int | None = None


class _Opening(NamedTuple):
    """Where embeddings of pictures come in: before the operation at this place, into the hidden
    states [max_tokens, hidden_size]. The ones of a `tap` are added, the others take the place of
    tokens' own."""

    place: int
    hidden: Tensor
    tap: int | None

    def let_in(self, pictures: Sequence[PlacedRows]) -> None:
        size = self.hidden.shape[1]
        for placed in pictures:
            own = self.hidden[placed.start : placed.start + len(placed.rows)]
            if self.tap is None:
                own.copy_(placed.rows[:, :size])
            else:
                own += placed.of_tap(self.tap, size)


class NativeTransformer:
    """`step` holds the inputs and `workspace` the activations of any step."""

    def __init__(
        self,
        description: Decoder,
        weights: ModelWeights[PackedProjection],
        kv_caches: KVCaches,
        step: StepArrays,
        workspace: Workspace,
        adapters: AdapterOps,
        library: Library,
        states: RecurrentStates | None = None,
        exchange: ProgramExchange | None = None,
    ) -> None:
        self._description = description
        self._step = step
        self._workspace = workspace
        self._library = library
        self._choices = empty_choices(description, len(step.positions), torch.device("cpu"))
        self.states = None if states is None else NativeStates(states, step)
        self.encoder = NativeEncoder(description, weights.tables, step, weights.embedding.dtype)
        self._ops = NativeOps(
            weights,
            step,
            workspace.logits,
            workspace.int8_inputs,
            adapters,
            self.encoder,
            NativeAttentions(description, kv_caches, step),
            self.states,
            _routings(description, self._choices),
            exchange,
        )
        self._openings: dict[_Part, list[_Opening]] = {}
        self._normed: Tensor | None = None
        # An encoder has no head that a step could end with.
        self._first_part = _Part.STEP if description.encoder is None else _Part.LAYERS
        # Others when they are first needed.
        self._made = {self._first_part: self._ops_of(self._first_part)}
        self.every_group = adapters.every_group
        groups = (frozenset[str](), self.every_group)
        always_there = [_ProgramKey(each, self._first_part) for each in groups]
        self._programs = {key: self._build(key) for key in always_there}

    def forward(
        self,
        groups: frozenset[str] = frozenset(),
        *,
        returns_experts: bool = False,
        is_scored: bool = False,
        pictures: Sequence[PlacedRows] = (),
    ) -> Tensor:
        """Runs the step that `step` describes, with adapters in `groups` only. Returns fp32 logits
        [num_logits, vocab_size], or more by the tokens that adapters may add, overwritten by the
        next run; [0, ...] where other ranks have them. With `returns_experts`, `choices` are of all
        tokens afterwards; else the last layer's are of the rows' last tokens. If it `is_scored`,
        `logits` may follow. An encoder has final hidden states in the place of logits. `pictures`
        take the place of tokens' own embeddings."""
        if self._description.encoder is not None:
            self._run(groups, _Part.LAYERS)
            return self.hidden(groups).float()
        if is_scored or (returns_experts and self._routes_fewer):
            self._run(groups, _Part.LAYERS, pictures)
            return self.logits(groups)
        return self._run_head(groups, _Part.STEP, pictures)

    def _run(
        self, groups: frozenset[str], part: _Part, pictures: Sequence[PlacedRows] = ()
    ) -> None:
        if not pictures:
            self.program(groups, part).run()
            return
        self._part_ops(part)
        openings = self._openings[part]
        for piece, opening in enumerate(openings):
            self.program(groups, part, piece).run()
            opening.let_in(pictures)
        self.program(groups, part, len(openings)).run()

    def logits(self, groups: frozenset[str]) -> Tensor:
        """Returns fp32 logits [num_logits, vocab_size], as `forward`, of the tokens that
        `step.logit_rows` says now, after all layers have computed all tokens of the step."""
        return self._run_head(groups, _Part.HEAD)

    def hidden(self, groups: frozenset[str]) -> Tensor:
        """Returns the final hidden states, [num_logits, hidden_size] in the model's dtype, of the
        tokens that `step.logit_rows` says now, overwritten by the next run; see `logits`."""
        self.program(groups, _Part.NORM).run()
        assert self._normed is not None, "the program is made"
        return self._normed[: int(self._step.num_logits)]

    def _run_head(
        self, groups: frozenset[str], part: _Part, pictures: Sequence[PlacedRows] = ()
    ) -> Tensor:
        logits = self._workspace.logits[: int(self._step.num_logits)]
        groups, vocab_size = self._computed(groups, part), self._description.vocab_size
        # Of several stages the one that gets logits does not know whether adapters add tokens.
        if ADDED_TOKENS in groups or self._description.stage is not None:
            logits[:, vocab_size:] = float("-inf")
        else:
            logits = logits[:, :vocab_size]
        self._run(groups, part, pictures)
        return logits

    @property
    def choices(self) -> Tensor | None:
        """The experts that each token of the last step has chosen, int32 [layers that have experts,
        T, num_chosen]; those of layers that are here."""
        choices = self._choices
        return None if choices is None else choices[:, : self._step.size.tokens]

    @property
    def _routes_fewer(self) -> bool:
        """Whether a program that ends with the rows' last tokens routes fewer than all of the
        step's in a layer."""
        size = self._step.size
        return self._description.blocks[-1].experts is not None and size.logits < size.tokens

    def program(
        self,
        groups: frozenset[str],
        part: _Part = _Part.STEP,
        piece: int | None = None,
    ) -> Program:
        """Returns the program of `groups`, or the program of all groups if there are too many
        programs: then groups that no adapter changes cost the step a check of their ranks."""
        key = _ProgramKey(self._computed(groups, part, piece), part, piece)
        if key not in self._programs:
            self._programs[key] = self._build(key)
        return self._programs[key]

    def _computed(
        self,
        groups: frozenset[str],
        part: _Part = _Part.STEP,
        piece: int | None = None,
    ) -> frozenset[str]:
        # Where no row has an adapter there is no plan that operations of adapters could follow.
        if not groups or _ProgramKey(groups, part, piece) in self._programs:
            return groups
        is_full = sum(key[1:] == (part, piece) for key in self._programs) >= MAX_PROGRAMS
        return self.every_group if is_full else groups

    def num_ops(self, groups: frozenset[str]) -> Counter[str]:
        """Counts the operations, by group, that the program with adapters in `groups` has more than
        the base's."""
        computed, ops = self._computed(groups, self._first_part), self._part_ops(self._first_part)
        counts = Counter(group for group, _ in ops if group in computed)
        counts.subtract(
            name
            for group, _ in ops
            if group.startswith(WITHOUT) and (name := group.removeprefix(WITHOUT)) in computed
        )
        return counts

    def _build(self, key: _ProgramKey) -> Program:
        ops = self._part_ops(key.part)
        if key.piece is not None:
            borders = [0, *(each.place for each in self._openings[key.part]), len(ops)]
            ops = ops[borders[key.piece] : borders[key.piece + 1]]
        return self._library.program([op for group, op in ops if is_in(group, key.groups)])

    def _part_ops(self, part: _Part) -> tuple[GroupedOp, ...]:
        if part not in self._made:
            self._made[part] = self._ops_of(part)
        return self._made[part]

    def _ops_of(self, part: _Part) -> tuple[GroupedOp, ...]:
        """Returns each operation of a part with the group of adapters that it is part of ("":
        always runs)."""
        found = operations(self._description, _NARROWING[part])
        tensors = list(self._workspace.tensors(found, is_apart=part is not _Part.STEP))
        num_layers_ops = len(found.layers)
        made: list[GroupedOp] = []
        openings = self._openings[part] = []
        of_head = tensors[num_layers_ops:]
        if part in (_Part.STEP, _Part.LAYERS):
            made += [("", op) for op in self._ops.attentions.items_ops()]
            for op, at in zip(found.layers, tensors, strict=False):
                if isinstance(op, PlacePictures | AddPictures):
                    tap = op.tap if isinstance(op, AddPictures) else None
                    openings.append(_Opening(len(made), at[op.out], tap))
                    continue
                made += self._ops.make([op], [at])
        if part in (_Part.STEP, _Part.HEAD):
            made += self._ops.make(found.head, of_head)
        if part is _Part.NORM:
            of_norm = of_head[: len(found.norm)]
            made += self._ops.make(found.norm, of_norm)
            self._normed = of_norm[-1][found.norm[-1].out]
        return tuple(made)

    @property
    def num_bytes(self) -> int:
        """The memory that steps are computed in."""
        routings = routings_bytes(self._description, len(self._step.positions))
        attention_bytes = self._ops.attentions.num_bytes + self.encoder.num_bytes
        return self._workspace.num_bytes + routings + attention_bytes


def _routings(decoder: Decoder, choices: Tensor | None) -> Mapping[int, PairsBuffer]:
    """Returns the routing of each layer that has experts. Layers share all of it but which experts
    were chosen."""
    shape = decoder.expert_layers
    if shape is None or choices is None:
        return {}
    shared = PairsBuffer.allocate(choices.shape[1], _num_own(decoder), shape.num_chosen)
    return {
        layer: shared.with_experts(own) for layer, own in zip(shape.layers, choices, strict=True)
    }


def routings_bytes(decoder: Decoder, max_tokens: int) -> int:
    """Returns the memory of the routing of steps of up to so many tokens."""
    shape = decoder.expert_layers
    if shape is None:
        return 0
    shared_bytes = PairsBuffer.bytes_of(max_tokens, _num_own(decoder), shape.num_chosen)
    return choices_bytes(decoder, max_tokens) + shared_bytes


def _num_own(decoder: Decoder) -> int:
    """Returns how many experts of each mixture are here."""
    return decoder.mixtures[0].gate_up.num_experts
