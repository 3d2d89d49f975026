"""Divides DoRA's magnitudes by the norms of the rows that they scale, once, when an adapter is
loaded.

An adapter scales each output of W + BA to its magnitude (Liu et al., 2024): kernels need magnitude
/ ||W + BA||, of each output over the inputs, as PEFT computes it. It takes the place of the
magnitude in the arena. W + BA is made a few rows at a time, between steps.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from contract.images.header import GRANULE_BYTES, Segment
from contract.images.segment_kinds import LORA_KINDS, SegmentKind
from contract.images.targets import TargetKind
from inference_svc.adapters.memory.extents import locate
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.targets import lora_groups
from inference_svc.backends.arena import Arena
from inference_svc.errors import TRY_LATER, AdapterUnusable, OutOfDeviceMemory
from inference_svc.host.device_faults import find_fault
from inference_svc.model.checkpoint.weights import ModelWeights
from kernels.lora.views import vector_at
from servicekit.errors import Internal, ServiceError

logger = logging.getLogger(__name__)

CPU_ELEMENTS, DEVICE_ELEMENTS = 1 << 20, 1 << 27
"""Elements of W + BA that are made between two steps: some milliseconds of a processor, and a
fraction of one of a device."""
CPU_SLICE_ELEMENTS, DEVICE_SLICE_ELEMENTS = 1 << 18, 1 << 24
"""The bytes that are made at once: stay in a processor's cache, and is little of a device's
memory."""


Contents: TypeAlias = dict[SegmentKind, Tensor]
"""An adapter's contents for one target."""


class Projection(Protocol):
    """The access to a base projection's weight."""

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows [start, end) of the weight [out, in], in its dtype."""


class Divided(NamedTuple):
    """An adapter whose magnitudes are divided, or why they cannot be."""

    digest: str
    error: ServiceError | None = None


class Magnitudes:
    """The jobs of adapters that are being loaded, one after the other."""

    def __init__(self, weights: ModelWeights[Any], arena: Arena) -> None:
        self._weights = weights
        self._arena = arena
        is_cpu = arena.device.type == "cpu"
        self._step_elements = CPU_ELEMENTS if is_cpu else DEVICE_ELEMENTS
        self._slice_elements = CPU_SLICE_ELEMENTS if is_cpu else DEVICE_SLICE_ELEMENTS
        self._places = dict(_places(weights, arena))
        self._jobs: deque[tuple[str, Iterator[int], list[str]]] = deque()

    def start(self, resident: Resident) -> None:
        """Begins with an image that lies in the arena."""
        faulty: list[str] = []
        self._jobs.append((resident.digest, self._divide(resident, faulty), faulty))

    @torch.inference_mode()
    def advance(self) -> list[Divided]:
        """Does as much as may be done between two steps; returns the finished parts."""
        done: list[Divided] = []
        left = self._step_elements
        while self._jobs and left > 0:
            digest, job, faulty = self._jobs[0]
            try:
                for num_elements in job:
                    left -= num_elements
                    if left <= 0:
                        self._jobs.rotate(-1)  # a large one holds up no others
                        return done
                error: ServiceError | None = _refusal(digest, faulty) if faulty else None
            except Exception as cause:  # of this adapter alone: others are loaded, steps computed
                found = find_fault(cause)
                if found is not None and found.is_fatal:
                    raise
                if found is not None:
                    error = _out_of_memory(digest)
                else:
                    logger.exception("magnitudes cannot be divided", extra={"digest": digest})
                    error = Internal(f"loading adapter {digest} failed")
            self._jobs.popleft()
            done.append(Divided(digest, error))
        return done

    def _divide(self, resident: Resident, faulty: list[str]) -> Iterator[int]:
        """Yields how many elements it has made; ends with the targets that are `faulty`."""
        segments = resident.header.segments
        offsets = np.array([segment.offset for segment in segments], dtype=np.int64)
        granules = (locate(resident.extents, offsets) // GRANULE_BYTES).tolist()
        of_target: dict[int, Contents] = {}
        scales: defaultdict[int, float] = defaultdict(lambda: 1.0)
        for segment, granule in zip(segments, granules, strict=True):
            of_target.setdefault(segment.target, {})[segment.kind] = self._view(segment, granule)
            if segment.kind in LORA_KINDS:
                scales[segment.target] *= segment.scale
        ratios: list[tuple[str, Tensor]] = []
        for target, own in of_target.items():
            if SegmentKind.MAGNITUDE not in own:
                continue
            if self._arena.layout.targets[target].kind is TargetKind.EMBEDDING:
                norms = yield from self._embedding_norms(own, scales[target])
            else:
                norms = yield from self._norms(target, own, scales[target])
            ratios.append(
                (self._arena.layout.targets[target].name, own[SegmentKind.MAGNITUDE].div_(norms))
            )
        sums = torch.stack([ratio.sum() for _, ratio in ratios]).tolist()  # waits for a device once
        faulty += [
            name for (name, _), each in zip(ratios, sums, strict=True) if not math.isfinite(each)
        ]

    def _norms(self, target: int, own: Contents, scale: float) -> Generator[int, None, Tensor]:
        """Computes the norms of all outputs, [out]. `scale` is the factor of A's and B's values."""
        projection, first = self._places[target]
        a, b = own[SegmentKind.A].float(), own[SegmentKind.B].float()
        norms = own[SegmentKind.MAGNITUDE].new_empty(b.shape[1])
        num_rows = max(1, self._slice_elements // a.shape[1])
        for start in range(0, len(norms), num_rows):
            end = min(start + num_rows, len(norms))
            whole = self._base_rows(projection, first, own, start, end)
            whole.addmm_(b[:, start:end].t(), a, alpha=scale)
            torch.linalg.vector_norm(whole, dim=1, out=norms[start:end])
            yield whole.numel()
        return norms

    def _base_rows(
        self,
        projection: Projection,
        first: int,
        own: Contents,
        start: int,
        end: int,
    ) -> Tensor:
        """Returns a copy of rows of the weight in fp32, with the rows that the adapter replaces."""
        if SegmentKind.FULL in own:
            return own[SegmentKind.FULL][start:end].to(torch.float32, copy=True)
        rows = projection.rows(first + start, first + end).to(torch.float32, copy=True)
        return _with_rows(rows, own, start, end)

    def _embedding_norms(self, own: Contents, scale: float) -> Generator[int, None, Tensor]:
        """Computes the norms of all features over the vocabulary, [features]."""
        embedding = own.get(SegmentKind.FULL, self._weights.embedding)
        a, b = own[SegmentKind.A], own[SegmentKind.B].float()
        squares = b.new_zeros(b.shape[1])
        num_rows = max(1, self._slice_elements // b.shape[1])
        for start in range(0, len(embedding), num_rows):
            end = min(start + num_rows, len(embedding))
            rows = embedding[start:end].to(torch.float32, copy=True)
            whole = _with_rows(rows, own, start, end)
            whole.addmm_(a[start:end].float(), b, alpha=scale)
            squares += whole.square_().sum(dim=0)
            yield whole.numel()
        return squares.sqrt_()

    def _view(self, segment: Segment, granule: int) -> Tensor:
        """Returns the arena's bytes of a segment, in its shape."""
        dtype, shape = self._arena.layout.form_of(segment)
        values = vector_at(self._arena.flat, granule, math.prod(shape), dtype)
        assert values is not None
        return values.view(shape)


def _refusal(digest: str, faulty: Sequence[str]) -> ServiceError:
    return AdapterUnusable(
        f"adapter {digest} has DoRA magnitudes that cannot be applied: a row of {faulty[0]} "
        "becomes zero, or is not finite",
        subject="adapter",
    )


def _out_of_memory(digest: str) -> ServiceError:
    message = f"adapter {digest} has DoRA magnitudes, which need more memory than is left"
    return OutOfDeviceMemory(f"{message}; {TRY_LATER}", subject="adapter", retry_after_s=1.0)


def _with_rows(rows: Tensor, own: Contents, start: int, end: int) -> Tensor:
    """Puts the adapter's own rows among those [start, end) of the base's."""
    if SegmentKind.ROWS in own:
        ids = own[SegmentKind.ROW_IDS].long()
        inside = ((ids >= start) & (ids < end)).nonzero().flatten()
        rows[ids[inside] - start] = own[SegmentKind.ROWS][inside].float()
    return rows


def _places(
    weights: ModelWeights[Any], arena: Arena
) -> Iterator[tuple[int, tuple[Projection, int]]]:
    """Yields each linear target with the projection that computes it, and its first row there."""
    for name, group in lora_groups(arena.layout).items():
        projection = weights.projections.get(name)
        if projection is not None:
            for target, first in zip(group.targets, group.out_offsets, strict=True):
                yield target, (projection, first)
