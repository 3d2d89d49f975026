"""The arena: one flat tensor that holds every resident adapter, and the table that finds them.

Residency decides on the changes, in plain data; `Arena.apply` makes the changes just before the
step that may see them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from contract.images.header import GRANULE_BYTES, Segment
from contract.images.segment_kinds import LORA_KINDS, SegmentKind
from contract.images.targets import TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.extents import Extent, locate
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import (
    HostCopy,
    MixWrite,
    ResidencyChange,
    TableClear,
    TableWrite,
)
from inference_svc.adapters.targets import layout_of
from inference_svc.core import EngineConfig
from inference_svc.model.checkpoint.classifier import ClassifierHead
from inference_svc.model.description import Decoder
from kernels.host_memory import allocate_host, allocate_pinned, view_of
from kernels.lora import LoraTable, OutputVectors, ReplacedWeight, TableRow
from kernels.lora.rows import ABSENT, NO_VECTORS
from kernels.lora.table import MAX_PARTS, NUM_FIELDS, NUM_WEIGHT_FIELDS, MixPart
from kernels.streams import Event, Streams

COPY_BYTES = 4 << 20
"""Bytes of one copy. A device copies one after the other, and a step's inputs wait for the running
one: for a whole image of 80 MiB 1.5 ms over PCIe 5, for a piece 80 us."""


class Arena:
    """`num_bytes` of device memory in the layout's dtype, and a table of `max_loras` rows and
    `num_mixes` mixes.

    `slab`, uint8 [host_bytes], is the host tier's memory, from which images are copied into the
    arena: pinned where there is an accelerator. Without a host tier, images may come through the
    `landing`, as much of the host's memory as the arena has, in which they lie as in this.
    `streams` are the device's, on which steps are computed and images copied; None: the streams of
    `Streams.of`.
    """

    def __init__(
        self,
        layout: ModelLayout,
        num_bytes: int,
        max_loras: int,
        max_rank: int,
        device: torch.device,
        host_bytes: int = 0,
        streams: Streams | None = None,
        num_mixes: int = 0,
        *,
        has_landing: bool = False,
    ) -> None:
        self.layout = layout
        self.device = device
        self.streams = streams or Streams.of(device)
        arena_bytes = num_bytes // GRANULE_BYTES * GRANULE_BYTES
        if device.type == "cpu":
            self._bytes = allocate_host(arena_bytes)
        else:
            self._bytes = torch.zeros(arena_bytes, dtype=torch.uint8, device=device)
        self.flat = self._bytes.view(layout.dtype)
        targets = layout.targets
        self._in_features = np.array([t.num_in for t in targets], dtype=np.int64)
        self._out_features = np.array([t.num_out for t in targets], dtype=np.int64)
        self._num_experts = np.array(
            [t.num_experts if t.kind is TargetKind.EXPERTS else 0 for t in targets], dtype=np.int64
        )
        self._is_embedding = np.array(
            [t.kind is TargetKind.EMBEDDING for t in targets], dtype=np.bool_
        )
        self.table = LoraTable.create(
            max_loras,
            len(targets),
            self.flat,
            device,
            max_rank,
            self.streams.compute,
            num_mixes=num_mixes,
            num_weights=len(layout.weights),
            lora_dtype=layout.lora_dtype,
        )
        allocate_slab = allocate_host if device.type == "cpu" else allocate_pinned
        self.slab = allocate_slab(host_bytes) if host_bytes else None
        self.landing = allocate_slab(arena_bytes) if has_landing else None
        self._in_flight: deque[tuple[HostCopy, Event]] = deque()
        self._heads: dict[int, ClassifierHead] = {}

    @property
    def memory(self) -> memoryview:
        """The arena's bytes, only on a CPU."""
        assert self.device.type == "cpu"
        return memoryview(self._bytes.numpy().data)

    @property
    def pull_memory(self) -> memoryview:
        """See `Backend.pull_memory`."""
        host = self.landing if self.slab is None else self.slab
        return self.memory if host is None else memoryview(host.numpy().data)

    def apply(self, changes: Sequence[ResidencyChange]) -> None:
        """Makes `changes` in order.

        The table is written on the stream that computes. Copies from the host run concurrently, on
        a stream of their own, after every step so far: one of them may have read the bytes that lay
        there before. On a CPU a copy is synchronous and delays the step, so residency bounds them.
        """
        for change in changes:
            if isinstance(change, TableClear):
                self.table.clear_row(change.slot)
                self._set_head(change.slot, None)
            elif isinstance(change, HostCopy):
                self._start_copy(change)
            elif isinstance(change, MixWrite):
                self.table.set_mix(change.slot, [MixPart(*part) for part in change.parts])
                heads = [self._heads[slot] for slot, _ in change.parts if slot in self._heads]
                self._set_head(change.slot, heads[0] if heads else None)
            else:
                assert isinstance(change, TableWrite), "it is not the arena's"
                self.table.set_row(change.resident.slot, self._row(change.resident))
                self._set_head(change.resident.slot, self._own_head(change.resident))

    def land(self, extents: Sequence[Extent]) -> None:
        """Copies these from the landing, if there is one, after all steps so far, one of which may
        have read the bytes that lay there before; and waits. Called by threads that pull."""
        if self.landing is None:
            return
        copies = self.streams.copies
        copies.wait_stream(self.streams.compute)
        pieces = (slice(*each) for extent in extents for each in _pieces_of(extent))
        copies.copy((self._bytes[piece], self.landing[piece]) for piece in pieces)
        landed = copies.event()
        landed.record()
        landed.synchronize()

    def pop_completed_copies(self) -> list[str]:
        """Returns the digests whose copies have completed since the last call, without blocking."""
        done = []
        while self._in_flight:
            change, copied = self._in_flight[0]
            if not copied.query():
                break
            done.append(change.resident.digest)
            if change.mapped is not None:
                change.mapped.release()
            self._in_flight.popleft()
        return done

    def _start_copy(self, change: HostCopy) -> None:
        copies = self.streams.copies
        copies.wait_stream(self.streams.compute)
        source, sources = self.slab, change.host.extents
        if change.mapped is not None:
            source = view_of(change.mapped.data)
            sources = (Extent(0, 0, len(source)),)
        assert source is not None
        copies.copy(self._pieces(source, sources, change.resident.extents))
        copied = copies.event()
        copied.record()
        self._in_flight.append((change, copied))

    def _pieces(
        self, host: torch.Tensor, sources: Sequence[Extent], destinations: Sequence[Extent]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pieces of an image, in the arena and in the host's memory."""
        for source in sources:
            for target in destinations:
                start = max(source.image_offset, target.image_offset)
                end = min(
                    source.image_offset + source.num_bytes, target.image_offset + target.num_bytes
                )
                for first in range(start, end, COPY_BYTES):
                    num_bytes = min(COPY_BYTES, end - first)
                    here = source.start + first - source.image_offset
                    there = target.start + first - target.image_offset
                    yield (
                        self._bytes[there : there + num_bytes],
                        host[here : here + num_bytes],
                    )

    def _own_head(self, resident: Resident) -> ClassifierHead | None:
        """Returns an adapter's own classifier, where it lies in the arena."""
        parts, found = self.layout.head_parts, dict[str, torch.Tensor]()
        for segment in resident.header.segments if parts else ():
            if segment.target in parts:
                [start] = locate(resident.extents, np.array([segment.offset], dtype=np.int64))
                values = self._bytes[start : start + segment.length_bytes]
                own = values.view(self.layout.dtype).view(*segment.shape)
                found[parts[segment.target]] = own
        if not found:
            return None
        out, bias = found.get("out"), found.get("bias")
        return ClassifierHead(out, bias, found.get("dense"), found.get("dense_bias"))

    def _set_head(self, slot: int, head: ClassifierHead | None) -> None:
        if head is not None:
            self._heads[slot] = head
        elif self._heads:
            self._heads.pop(slot, None)

    def heads_of(self, slots: Iterable[int]) -> list[ClassifierHead | None]:
        """Returns the classifier's head of the adapter at each slot, or of the part of a sum that
        has one; None if there is none."""
        return [self._heads.get(slot) for slot in slots]

    def _row(self, resident: Resident) -> TableRow:
        """Makes a table row, vectorised as this delays a step. Each segment lies within one
        extent."""
        segments = resident.header.segments
        offsets = np.array([segment.offset for segment in segments], dtype=np.int64)
        granules = locate(resident.extents, offsets) // GRANULE_BYTES
        ranks = np.array([segment.rank for segment in segments], dtype=np.int64)
        kinds = [segment.kind for segment in segments]
        matrices = np.array([kind in LORA_KINDS for kind in kinds], dtype=np.bool_)
        first = np.flatnonzero(matrices)[::2]  # each A is followed by its B
        columns = np.array([segments[index].target for index in first], dtype=np.int64)
        scales = np.array([segment.scale for segment in segments], dtype=np.float32)
        row = TableRow(
            columns,
            granules[first],
            granules[first + 1],
            ranks[first],
            ranks[first + 1],
            self._in_features[columns],
            self._out_features[columns],
            scales[first] * scales[first + 1],
            self._is_embedding[columns],
            self._num_experts[columns],
            np.full((len(columns), len(NO_VECTORS)), ABSENT, dtype=np.int64),
        )
        return row if matrices.all() else self._with_others(row, segments, granules.tolist())

    def _with_others(
        self, row: TableRow, segments: Sequence[Segment], granules: Sequence[int]
    ) -> TableRow:
        """Returns the row with all segments besides A and B."""
        layout = self.layout
        vectors: dict[int, OutputVectors] = {}
        replaced: dict[int, ReplacedWeight] = {}
        places = {target: index for index, target in enumerate(layout.weights)}
        for segment, granule in zip(segments, granules, strict=True):
            target, kind = segment.target, segment.kind
            if self._is_of_another_rank(segment):
                continue
            if kind in (SegmentKind.BIAS, SegmentKind.MAGNITUDE):
                found = vectors.get(target, NO_VECTORS)
                vectors[target] = found._replace(**{kind.value: granule})
            elif target in layout.biases:
                column = layout.biases[target]
                vectors[column] = vectors.get(column, NO_VECTORS)._replace(base_bias=granule)
            elif target in places and kind not in LORA_KINDS:
                own = replaced.get(target, ReplacedWeight(places[target]))
                own = own._replace(**{kind.value: granule})
                if kind is SegmentKind.ROWS:
                    own = own._replace(num_rows=segment.shape[0])
                replaced[target] = own
        sizes = {
            column: (int(self._in_features[column]), int(self._out_features[column]))
            for column in vectors
        }
        return row.with_others(vectors, sizes, tuple(replaced.values()))

    def _is_of_another_rank(self, segment: Segment) -> bool:
        """Returns whether it is a bias of a sum over inputs that are cut: the rank with the first
        of them adds it, unless ranks share the outputs. Others have its bytes, too, so that all
        ranks' images lie alike."""
        column = self.layout.biases.get(segment.target)
        if segment.kind is SegmentKind.BIAS:
            column = segment.target
        if column is None:
            return False
        target = self.layout.targets[column]
        return target.inputs[0] > 0 and target.out_slice is None


def _pieces_of(extent: Extent) -> Iterator[tuple[int, int]]:
    """Yields the starts and ends of its copies."""
    for start in range(extent.start, extent.end, COPY_BYTES):
        yield start, min(start + COPY_BYTES, extent.end)


def table_bytes(config: EngineConfig, decoder: Decoder, num_mixes: int) -> int:
    """Returns the bytes of the arena's table, with rows for the parts of so many sums."""
    layout = layout_of(config, decoder)
    row_size = NUM_FIELDS * len(layout.targets) + NUM_WEIGHT_FIELDS * len(layout.weights)
    return 4 * (config.max_loras + MAX_PARTS * num_mixes) * row_size
