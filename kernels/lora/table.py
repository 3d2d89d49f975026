"""The table of the adapters' weights in the arena.

The arena is one flat tensor. Each matrix or vector in it starts on a granule of 256 bytes, so that
its position fits in an int32 and every kernel can prove its loads aligned. Row `slot` of the table
holds, for each target, the granules of A and B, the rank of each, a scale, and the granules of
vectors over its outputs (see OutputVectors). A B of rank 0 means that the adapter has no LoRA for
the target. The ranks differ if devices share the first product: each has a part of A's rank, and
the whole of B's. Another row has the base's weights that the adapter replaces (see ReplacedWeight).
The table's memory never moves, so a captured graph sees every later write.

A and B are of the arena's dtype or, of all adapters, float8 (E4M3): then the scale is the product
of the factors of both, and the sum that it multiplies is of the values without them.

For a target that is a mixture of experts, A and B are segments of an image. Each begins with an
index, int32 `[experts, 4]`: the granule of the expert's matrix within the segment, its rank (0: the
adapter lacks the expert), the bits of an fp32 scale, and 0. The scale in B's index multiplies the
row's scale; the scale in A's index is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from kernels.streams import Stream, Streams

from .rows import (
    ABSENT,
    GRANULE_BYTES,
    INDEX_BYTES,
    NO_ADAPTER,
    NO_EXPERT,
    OutputVectors,
    ReplacedWeight,
    TableEntry,
    TableRow,
)
from .views import Float8Weights, Place, PlainWeights, TargetWeights, vectors_at

NUM_FIELDS = 8
"""Numbers of a target in a row: granules of A and B, ranks of A and B, bits of the scale, and the
granules of magnitude, bias and base bias, each plus 1, or 0 if there is none."""
NUM_WEIGHT_FIELDS = 4
"""Numbers of a base weight in a row: the granules of the whole weight, of row ids and of rows, each
plus 1, or 0 if there is none, and the number of rows."""


MAX_PARTS = 8
"""Most adapters of one mix."""


class MixPart(NamedTuple):
    """An adapter of a mix: its slot and its factor."""

    slot: int
    scale: float


def workspace_rank(max_rank: int, shrink: Mapping[str, int], expand: Mapping[str, int]) -> int:
    """Returns the ranks for which the kernels' workspace of shrunk rows has room: whole blocks. If
    they are few, they are a power of 2, which one block of `expand` holds.

    Args:
        max_rank: Highest rank of an adapter.
        shrink: Constants of the kernel.
        expand: Constants of the kernel.
    """
    blocks = (tuned[name] for tuned in (shrink, expand) for name in ("block_r", "tile_block_r"))
    block = max(blocks)
    power = 1 << (max(max_rank, block) - 1).bit_length()
    return power if power <= expand["whole_ranks"] else -(-max_rank // block) * block


@dataclass(frozen=True, eq=False, slots=True)
class LoraTable:
    """Rows of adapters, `[max_loras, num_targets]`, at a fixed address on `device`.

    `rows` is int32 `[max_loras, NUM_FIELDS, num_targets]`, and `weight_rows` int32 `[max_loras,
    NUM_WEIGHT_FIELDS, num_weights]`; one row of each is one copy. `adapters[slot]` has the same for
    the host. `rank_parts` is the number of devices that share A's rank: this one has the whole
    rank, or a part that is rounded up. With 1 the ranks of A and B are equal, and expand reads
    shrink's result. `lora_dtype` is the type of A and B.

    After the adapters come `num_mixes` mixes of MAX_PARTS rows each. A mix is a sum of adapters.
    Its slot is its first row. Its rows are copies of its adapters' rows, in order, with their
    scales multiplied; the rest are empty. Its first row has the base weights that its parts
    replace, each weight once.
    """

    max_loras: int
    num_targets: int
    max_rank: int
    rank_parts: int
    num_mixes: int
    lora_dtype: torch.dtype
    arena: torch.Tensor
    rows: torch.Tensor
    weight_rows: torch.Tensor
    stream: Stream = field(repr=False)
    adapters: list[TableRow] = field(repr=False)
    _mix_sizes: dict[int, int] = field(repr=False)
    _weights: tuple[dict[int, dict[int, TargetWeights]], ...] = field(repr=False)

    @classmethod
    def create(
        cls,
        max_loras: int,
        num_targets: int,
        arena: torch.Tensor,
        device: torch.device | str,
        max_rank: int = 256,
        stream: Stream | None = None,
        rank_parts: int = 1,
        num_weights: int = 0,
        num_mixes: int = 0,
        lora_dtype: torch.dtype | None = None,
    ) -> LoraTable:
        """Creates an empty table.

        Args:
            max_loras: Most adapters.
            num_targets: Targets of the layout.
            arena: `[arena_bytes // itemsize]` of the layout's dtype.
            device: Device of the table's rows.
            max_rank: Highest rank of any entry; kernels size their workspace with it.
            stream: Stream that writes the table. None: the computing stream.
            rank_parts: Devices that share A's rank.
            num_weights: Base weights that adapters may replace.
            num_mixes: Most sums of adapters.
            lora_dtype: The type of A and B: the layout's, or torch.float8_e4m3fn.
        """
        lora_dtype = lora_dtype or arena.dtype
        assert lora_dtype in (arena.dtype, torch.float8_e4m3fn)
        assert arena.dim() == 1, "the arena is one flat tensor"
        assert arena.is_contiguous()
        # Vector loads need it; torch aligns CUDA memory to 512 bytes and CPU memory to 64.
        assert arena.data_ptr() % GRANULE_BYTES == 0 or arena.device.type == "cpu"
        assert arena.numel() * arena.itemsize // GRANULE_BYTES < 2**31, "granules are int32"
        num_rows = max_loras + num_mixes * MAX_PARTS
        rows, weight_rows = (
            torch.zeros(num_rows, *shape, dtype=torch.int32, device=device)
            for shape in ((NUM_FIELDS, num_targets), (NUM_WEIGHT_FIELDS, num_weights))
        )
        return cls(
            max_loras,
            num_targets,
            max_rank,
            rank_parts,
            num_mixes,
            lora_dtype,
            arena,
            rows,
            weight_rows,
            stream or Streams.of(rows.device).compute,
            adapters=[NO_ADAPTER] * num_rows,
            _mix_sizes={},
            _weights=tuple({} for _ in range(num_rows)),
        )

    @property
    def a_granules(self) -> torch.Tensor:
        """int32 `[max_loras, num_targets]`, a view of `rows`; likewise the four below."""
        return self.rows[:, 0]

    @property
    def b_granules(self) -> torch.Tensor:
        return self.rows[:, 1]

    @property
    def a_ranks(self) -> torch.Tensor:
        return self.rows[:, 2]

    @property
    def b_ranks(self) -> torch.Tensor:
        return self.rows[:, 3]

    @property
    def scales(self) -> torch.Tensor:
        return self.rows[:, 4].view(torch.float32)

    @property
    def is_float8(self) -> bool:
        """Whether A and B are float8."""
        return self.lora_dtype != self.arena.dtype

    @property
    def num_weights(self) -> int:
        return self.weight_rows.shape[2]

    def set_row(self, slot: int, adapter: TableRow | Sequence[TableEntry]) -> None:
        """Makes an adapter visible: one write, ordered on the table's stream.

        The bytes that it points to must be in the arena before any later work of that stream.
        """
        if not isinstance(adapter, TableRow):
            adapter = TableRow.of(adapter)
        assert not self.is_mix(slot)
        self._set_rows(slot, [adapter])

    def clear_row(self, slot: int) -> None:
        """Forgets the adapter of `slot`: all its ranks become 0."""
        self._set_rows(slot, [NO_ADAPTER])

    def set_mix(self, slot: int, parts: Sequence[MixPart]) -> None:
        """Makes a sum of adapters visible, in this order: one write. Their rows may not change
        while it is used. Of each target at most one of them has a magnitude or a bias in place of
        the base's, of each weight at most one replaces it, and such have the scale 1."""
        assert self.is_mix(slot)
        assert (slot - self.max_loras) % MAX_PARTS == 0, "not the first row of a mix"
        assert 0 < len(parts) <= MAX_PARTS
        rows, replaced, scaled = [], list[ReplacedWeight](), set[int]()
        for adapter_slot, scale in parts:
            adapter = self.adapters[adapter_slot]
            assert scale == 1.0 or not adapter.replaces, "it scales or replaces: no other scale"
            assert scaled.isdisjoint(adapter.scaled_set), "two parts scale a target"
            scaled |= adapter.scaled_set
            replaced.extend(adapter.replaced)
            scales = adapter.scales * np.float32(scale)
            rows.append(replace(adapter, scales=scales, replaced=()))
        rows[0] = replace(
            rows[0], replaced=tuple(replaced)
        )  # asserts that no weight is there twice
        self._set_rows(slot, rows + [NO_ADAPTER] * (MAX_PARTS - len(rows)))
        self._mix_sizes[slot] = len(parts)

    def is_mix(self, slot: int) -> bool:
        return slot >= self.max_loras

    def part_slots(self, slot: int) -> range:
        """Returns the rows of an adapter's slot, or of a mix's."""
        return range(slot, slot + self._mix_sizes.get(slot, 1))

    def weights(self, slot: int, expert: int = NO_EXPERT) -> dict[int, TargetWeights]:
        """Returns the weights of the adapter in `slot` by target, for kernels that run on tensors.

        For targets that are mixtures, they are the weights of `expert`. Native and GPU kernels read
        `rows` instead, so that loading makes no tensors for them.
        """
        views = self._weights[slot].get(expert)
        if views is None:
            adapter = self.adapters[slot]
            of_experts = adapter.num_experts > 0
            views = self._weights[slot][expert] = {
                int(adapter.targets[index]): found
                for index in np.flatnonzero(of_experts == (expert != NO_EXPERT)).tolist()
                if (found := self._views(adapter, index, expert)) is not None
            }
        return views

    def _check(self, adapter: TableRow) -> None:
        """Asserts that ranks are as promised, and both matrices of each target in the arena; of
        experts, both indices."""
        a_ranks, b_ranks = adapter.a_ranks, adapter.b_ranks
        # Of a mixture it may lack all experts that are held here, and have nothing but a bias.
        lowest = np.where((adapter.num_experts > 0) | (adapter.vectors[:, 2] != ABSENT), 0, 1)
        wrong = (b_ranks < lowest) | (b_ranks > self.max_rank)
        assert not wrong.any(), f"rank {b_ranks[wrong][0]} of target {adapter.targets[wrong][0]}"
        is_part = (a_ranks >= 0) & (a_ranks <= -(-b_ranks // self.rank_parts))
        wrong = (a_ranks != b_ranks) & ~(is_part & (self.rank_parts > 1))
        assert not wrong.any(), (
            f"rank {a_ranks[wrong][0]} of A of target {adapter.targets[wrong][0]}"
        )
        size = self.arena.numel() * self.arena.itemsize
        for granules, ranks, features in (
            (adapter.a_granules, a_ranks, adapter.in_features),
            (adapter.b_granules, b_ranks, adapter.out_features),
        ):
            num_bytes = np.where(
                adapter.num_experts > 0,
                adapter.num_experts * INDEX_BYTES,
                ranks * features * self.lora_dtype.itemsize,
            )
            outside = (granules < 0) | (granules * GRANULE_BYTES + num_bytes > size)
            assert not outside.any(), f"granule {granules[outside][0]} leaves the arena"
        item_bytes = np.array([4, 4, self.arena.itemsize])
        ends = adapter.vectors * GRANULE_BYTES + adapter.out_features[:, None] * item_bytes
        assert (adapter.vectors >= ABSENT).all()
        assert (ends[adapter.vectors != ABSENT] <= size).all(), "a vector leaves the arena"
        for each in adapter.replaced:
            assert 0 <= each.weight < self.num_weights, f"weight {each.weight}"
            assert (each.rows == ABSENT) == (each.num_rows == 0)

    def _set_rows(self, slot: int, adapters: Sequence[TableRow]) -> None:
        """Writes rows that follow one another: one copy of each of the two tables."""
        end = slot + len(adapters)
        assert 0 <= slot < end <= len(self.adapters), f"slot {slot} of {len(self.adapters)}"
        rows = np.zeros((len(adapters), NUM_FIELDS, self.num_targets), dtype=np.int32)
        weights = np.zeros((len(adapters), NUM_WEIGHT_FIELDS, self.num_weights), dtype=np.int32)
        for adapter, row, own in zip(adapters, rows, weights, strict=True):
            self._check(adapter)
            targets = adapter.targets
            row[0, targets] = adapter.a_granules
            row[1, targets] = adapter.b_granules
            row[2, targets] = adapter.a_ranks
            row[3, targets] = adapter.b_ranks
            row[4].view(np.float32)[targets] = adapter.scales
            row[5:, targets] = adapter.vectors.T + 1
            for weight, *granules, num_rows in adapter.replaced:
                own[:, weight] = *(granule + 1 for granule in granules), num_rows
        pairs = []
        for target, values in ((self.rows[slot:end], rows), (self.weight_rows[slot:end], weights)):
            source = torch.from_numpy(values)
            # Torch keeps the pinned block alive until the copy has run.
            pairs.append((target, source.pin_memory() if target.is_cuda else source))
        self.stream.copy(pairs)
        for place, adapter in enumerate(adapters, slot):
            self._weights[place].clear()
            self.adapters[place] = adapter

    def _views(self, adapter: TableRow, index: int, expert: int) -> TargetWeights | None:
        """Returns None where the adapter lacks the expert."""
        a = Place(int(adapter.a_granules[index]), int(adapter.a_ranks[index]))
        b = Place(int(adapter.b_granules[index]), int(adapter.b_ranks[index]))
        if expert != NO_EXPERT:
            assert 0 <= expert < adapter.num_experts[index], f"expert {expert}"
            a, b = a.of_expert(self.arena, expert), b.of_expert(self.arena, expert)
            assert a.scale == 1.0, "the scale is B's"
            if b.rank == 0:
                return None
        num_in, num_out = int(adapter.in_features[index]), int(adapter.out_features[index])
        is_embedding, dtype = bool(adapter.is_embedding[index]), self.lora_dtype
        a_values = a.matrix(self.arena, num_in, dtype, transposed=is_embedding)
        b_values = b.matrix(self.arena, num_out, dtype)
        scale = float(adapter.scales[index]) * b.scale
        granules = OutputVectors(*adapter.vectors[index].tolist())
        vectors = vectors_at(self.arena, granules, num_out)
        if self.is_float8:
            return Float8Weights(a_values, b_values, self.arena.dtype, scale, vectors)
        return PlainWeights(a_values, a_values.t(), b_values, b_values.t(), scale, vectors)
