"""The operations of encoders: inputs with positions and types, attention in both directions, and
feed-forward halves without a gate."""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.model.description import (
    Activation,
    BothWays,
    Dense,
    EncoderInputs,
    Norm,
)
from inference_svc.model.encoder.clips import list_product
from inference_svc.model.operations import Listing, NormOf, Op, Table, Value, WeightSpec

POSITIONS_KEY, TOKEN_TYPES_KEY = "positions", "token_types"
"""The keys of the tables of positions and of token types."""


@dataclass(frozen=True, slots=True, eq=False)
class AddInputs(Op):
    """Adds to the tokens' embeddings, in place: each token's row of the table of token types, and
    then each position's row, counted from `first_row` on; or, if they `are_blended`, several rows
    as the step blends them."""

    types: Table | None
    positions: Table | None
    first_row: int
    are_blended: bool = False

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return self.types, self.positions


@dataclass(frozen=True, slots=True, eq=False)
class RotateHeads(Op):
    """Turns the heads of queries and keys, in place. `inputs` are qkv and the angles."""

    mixer: BothWays


@dataclass(frozen=True, slots=True, eq=False)
class AttendBothWays(Op):
    """Attends from each query to the keys and values of its row."""

    mixer: BothWays


@dataclass(frozen=True, slots=True, eq=False)
class ArrangeHeads(Op):
    """Norms the heads of qkv, and orders the quarters of queries and keys, in place."""

    mixer: BothWays

    @property
    def norms(self) -> tuple[Norm, Norm, Norm]:
        """The norms of queries, keys and values, which have one epsilon."""
        assert self.mixer.head_norms is not None, "the operation is listed for them"
        return self.mixer.head_norms

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return self.norms


@dataclass(frozen=True, slots=True, eq=False)
class Activate(Op):
    """Applies an activation."""

    activation: Activation


def list_inputs(walk: Listing, hidden: Value, inputs: EncoderInputs) -> None:
    """Lists the operations between the tokens' embeddings and the first layer."""
    types = positions = None
    first_row, are_blended, size = 0, False, hidden.width
    if inputs.num_token_types:
        types = Table(TOKEN_TYPES_KEY, inputs.token_types, inputs.num_token_types, size)
    if inputs.positions is not None:
        first_row, are_blended = inputs.positions.first, inputs.positions.are_blended
        module, num_rows = inputs.positions[:2]
        parts = 2 if inputs.positions.of_axes else 0
        positions = Table(POSITIONS_KEY, module, num_rows, size, parts=parts)
    if types is not None or positions is not None:
        walk.ops.append(
            AddInputs((hidden,), hidden, None, types, positions, first_row, are_blended)
        )
    if inputs.norm is not None:
        walk.ops.append(NormOf((hidden,), hidden, None, inputs.norm))


def list_attention(walk: Listing, layer: int, mixer: BothWays, x: Value) -> Value:
    """Lists the operations up to the last projection; see `walk.MIXERS`."""
    qkv = walk.value("qkv", mixer.qkv.out_features)
    list_product(walk, x, qkv, layer, mixer.qkv)
    if mixer.head_norms is not None:
        walk.ops.append(ArrangeHeads((qkv,), qkv, layer, mixer))
    if mixer.rope is not None:
        angles = walk.angles[mixer.rope, mixer.head_dim]
        walk.ops.append(RotateHeads((qkv, angles), qkv, layer, mixer))
    mixed = walk.value("mixed", mixer.size)
    walk.ops.append(AttendBothWays((qkv,), mixed, layer, mixer))
    return mixed


def list_activation(walk: Listing, layer: int, dense: Dense, x: Value) -> Value:
    """Lists the first two operations of a half without a gate."""
    made = walk.value("gate_up", dense.gate_up.out_features)
    list_product(walk, x, made, layer, dense.gate_up)
    active = walk.value("gated", dense.size)
    walk.ops.append(Activate((made,), active, layer, dense.activation))
    return active
