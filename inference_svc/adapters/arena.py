"""The arena: one flat tensor that holds every resident adapter, and the table that finds them.

Residency decides, in plain data, what changes; `Arena.apply` carries it out just before the step
that may see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_svc.adapters.changes import HostCopy, ResidencyChange, TableClear
from inference_svc.adapters.extents import GRANULE_BYTES, Extent
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.slots import Resident
from kernels.host_memory import allocate_host
from kernels.lora import LoraTable, TableEntry


class Arena:
    """`num_bytes` of device memory in the layout's dtype, and a table of `max_loras` rows.

    `slab` is the host tier's memory, needed for HostCopy only.
    """

    def __init__(
        self,
        layout: ModelLayout,
        num_bytes: int,
        max_loras: int,
        max_rank: int,
        device: torch.device,
        slab: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        whole_bytes = num_bytes // GRANULE_BYTES * GRANULE_BYTES
        if device.type == "cpu":
            self._bytes = allocate_host(whole_bytes)
        else:
            self._bytes = torch.zeros(whole_bytes, dtype=torch.uint8, device=device)
        self.flat = self._bytes.view(layout.dtype)
        num_targets = len(layout.targets)
        self.table = LoraTable.create(max_loras, num_targets, self.flat, device, max_rank)
        self._slab = slab
        self._copied: torch.cuda.Event | None = None

    @property
    def memory(self) -> memoryview:
        """The arena's bytes, writable from pull threads; only on a CPU."""
        assert self.device.type == "cpu"
        return memoryview(self._bytes.numpy().data)

    def apply(self, changes: Sequence[ResidencyChange]) -> None:
        """Carries out `changes` in order, on the stream that computes."""
        for change in changes:
            if isinstance(change, TableClear):
                self.table.clear_row(change.slot)
                continue
            if isinstance(change, HostCopy):
                self._copy(change.host.extents, change.resident.extents)
            self.table.set_row(change.resident.slot, self._entries(change.resident))
        if self.device.type == "cuda" and any(isinstance(c, HostCopy) for c in changes):
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def copies_are_done(self) -> bool:
        """Whether the host memory that `apply` copied from may be reused. Never blocks."""
        return self._copied is None or self._copied.query()

    def _copy(self, sources: Sequence[Extent], destinations: Sequence[Extent]) -> None:
        assert self._slab is not None
        for source in sources:
            for target in destinations:
                start = max(source.image_offset, target.image_offset)
                end = min(
                    source.image_offset + source.num_bytes, target.image_offset + target.num_bytes
                )
                if start < end:
                    here = source.start + start - source.image_offset
                    there = target.start + start - target.image_offset
                    self._bytes[there : there + end - start].copy_(
                        self._slab[here : here + end - start], non_blocking=True
                    )

    def _entries(self, resident: Resident) -> list[TableEntry]:
        """One entry per target the image has: its A then its B, both within one extent."""
        granules: dict[int, dict[str, int]] = {}
        ranks: dict[int, int] = {}
        for segment in resident.header.segments:
            at = _locate(resident.extents, segment.offset)
            granules.setdefault(segment.target, {})[segment.kind] = at // GRANULE_BYTES
            ranks[segment.target] = segment.rank
        return [
            TableEntry(
                target=target,
                a_granule=found["a"],
                b_granule=found["b"],
                rank=ranks[target],
                in_features=self.layout.targets[target].in_features,
                out_features=self.layout.targets[target].out_features,
                is_embedding=self.layout.targets[target].kind == "embedding",
            )
            for target, found in granules.items()
        ]


def _locate(extents: Sequence[Extent], offset: int) -> int:
    for extent in extents:
        if extent.image_offset <= offset < extent.image_offset + extent.num_bytes:
            return extent.start + offset - extent.image_offset
    raise AssertionError(f"image offset {offset} lies in no extent")
