"""The weights of a base model that adapters may change."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from contract.images.dtypes import DataType

TEXT, SAMPLED = "text", "sampled"
"""Spaces: all tokens of a prompt, and those whose logits are computed. Pictures pass other spaces,
of towers and connectors, which have the names of these modules."""


class TargetKind(enum.Enum):
    """Kind of a module that adapters change: EXPERTS is one projection of all experts of a mixture,
    VECTOR a norm's weight or a bias of the base. UNKNOWN: the server is newer than this client."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    EXPERTS = "experts"
    VECTOR = "vector"
    UNKNOWN = "unknown"


class Held(enum.Enum):
    """Who computes a target: this server, another rank of it, or nobody."""

    HERE = "here"
    ELSEWHERE = "elsewhere"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class OtherName:
    """How else adapters may call a target. A module that computes several targets is another name
    of each: `outputs` are this target's, or, of blocks of these sizes that follow one another, the
    part `block_part` of each; neither: all. `transposed`: the model has it as [in, out], and all
    parameters of experts in the same module, where shapes cannot tell."""

    name: str
    outputs: tuple[int, int] | None = None
    block_sizes: tuple[int, ...] = ()
    block_part: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that an adapter may change. Slices are half-open; None means all of them.

    `rank_part` (index, count) is the part of A's rank that this layout holds: ceil(rank / count),
    the last may be smaller. `base_hashes` are the sha256 of each HASHED_ROWS rows of the base's own
    weight, in `base_dtype`; none: not known. A head that is `tied_to` an embedding has its weight.
    Format 1 knows the fields before `other_names`.
    """

    name: str
    layer: int | None
    group: str
    kind: TargetKind
    in_features: int
    out_features: int
    experts: int = 1
    in_slice: tuple[int, int] | None = None
    out_slice: tuple[int, int] | None = None
    other_names: tuple[OtherName, ...] = ()
    space: str = ""
    expert_slice: tuple[int, int] | None = None
    rank_part: tuple[int, int] | None = None
    held: Held = Held.HERE
    base_hashes: tuple[bytes, ...] = ()
    base_dtype: DataType | None = None
    tied_to: str = ""

    @property
    def module(self) -> str:
        """The last component of its name, such as "q_proj"."""
        return self.name.rpartition(".")[2]

    @property
    def is_of_pictures(self) -> bool:
        """Whether pictures pass it, here or on another rank, and not the tokens of a prompt."""
        return self.held is not Held.UNUSED and self.space not in ("", TEXT, SAMPLED)

    @property
    def short_name(self) -> str:
        """Its name without the layer, such as "q_proj", "input_layernorm" or "q_proj.bias"."""
        module = self.name.removesuffix(".bias")
        return module.rpartition(".")[2] + self.name[len(module) :]

    @property
    def inputs(self) -> tuple[int, int]:
        """The input features that this layout holds."""
        return self.in_slice or (0, self.in_features)

    @property
    def outputs(self) -> tuple[int, int]:
        """The output features that this layout holds."""
        return self.out_slice or (0, self.out_features)

    @property
    def num_in(self) -> int:
        return self.inputs[1] - self.inputs[0]

    @property
    def num_out(self) -> int:
        return self.outputs[1] - self.outputs[0]

    @property
    def held_experts(self) -> tuple[int, int]:
        """The experts that this layout holds."""
        return self.expert_slice or (0, self.experts)

    @property
    def num_experts(self) -> int:
        first, end = self.held_experts
        return end - first

    @property
    def num_rows(self) -> int:
        """The rows of the base's weight; a vector is one."""
        if self.kind is TargetKind.VECTOR:
            return 1
        return self.in_features if self.kind is TargetKind.EMBEDDING else self.out_features

    def ranks(self, rank: int) -> tuple[int, int]:
        """Returns the range of an adapter's rank that this layout holds of A."""
        if self.rank_part is None:
            return 0, rank
        index, count = self.rank_part
        size = -(-rank // count)
        return min(rank, index * size), min(rank, (index + 1) * size)

    @property
    def needs_format_2(self) -> bool:
        """Whether format 1 could not say this."""
        is_new_kind = self.kind in (TargetKind.EXPERTS, TargetKind.VECTOR)
        says_more = any((self.other_names, self.space, self.rank_part, self.base_hashes))
        is_elsewhere = self.held is not Held.HERE or not self.out_features
        return any((is_new_kind, says_more, self.base_dtype, self.tied_to, is_elsewhere))


HASHED_ROWS = 256
"""How many rows of a base weight one hash is of."""
