"""Divides DoRA's magnitudes by the norms of the rows that they scale, once, when an adapter is
loaded.

An adapter scales each output of W + BA to its magnitude (Liu et al., 2024): kernels need magnitude
/ ||W + BA||, of each output over the inputs, as PEFT computes it. It takes the place of the
magnitude in the arena. W + BA is made a few rows at a time, between steps.

Where a model is cut, a rank has a part of the inputs of some targets, and of the vocabulary: a norm
is the root of the squares that all ranks have. They exchange these once for each adapter, when all
of them are made, and once more when all have divided by them. Ranks advance together, and by sizes
that are equal on all of them: so they come to the exchanges at the same time. A rank whose part
fails takes part in them, and says so: then the adapter fails on all. Behind the last one no rank
writes to the adapter's memory, which rank 0 may give to another. Stages have other targets each:
all ranks say how far they are whenever one would go on with another adapter. A vision tower is on
the first rank alone: for its targets the others have no weight, and go along without any work.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from contract.images.header import GRANULE_BYTES, Segment
from contract.images.segment_kinds import LORA_KINDS, SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import HEAD
from inference_svc.adapters.memory.extents import locate
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.targets import applied_to_pictures, lora_groups
from inference_svc.backends.arena import Arena
from inference_svc.errors import TRY_LATER, AdapterUnusable, OutOfDeviceMemory
from inference_svc.host.device_faults import find_fault
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Rank
from inference_svc.model.sharding.exchange import Exchange, StagedExchange
from kernels.lora import LoraGroup
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


class _Rows(NamedTuple):
    """The rows of the base's weight that a rank reads of a target: `num_rows` from row `first` of
    the whole on, of `size` elements each. Another rank may have more, at most `most_rows`."""

    first: int
    num_rows: int
    most_rows: int
    size: int


@dataclass
class _Scaled:
    """A target whose outputs an adapter scales. `scale` is the factor of A's and B's values,
    `squares`, fp32 [out], are sums over the rows and inputs that this rank has; if they are shared,
    the others have the rest. Its magnitude stays as it is unless its weight `is_here`. `a` and `b`
    are there while they are made, in fp32 but for an A by token."""

    index: int
    target: Target
    own: Contents
    scale: float
    rows: _Rows
    is_shared: bool
    is_here: bool
    squares: Tensor = field(default_factory=lambda: torch.empty(0))
    a: Tensor = field(default_factory=lambda: torch.empty(0))
    b: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def is_embedding(self) -> bool:
        return self.target.kind is TargetKind.EMBEDDING

    def clear(self) -> None:
        """Forgets the squares."""
        self.squares = torch.zeros_like(self.own[SegmentKind.MAGNITUDE])

    def begin(self) -> None:
        self.clear()
        a = self.own[SegmentKind.A]
        self.a = a if self.is_embedding else a.float()
        self.b = self.own[SegmentKind.B].float()

    def end(self) -> None:
        self.a = self.b = self.b.new_empty(0)

    def divide(self) -> Tensor:
        """Divides the magnitude in the arena by the roots; returns it."""
        return self.own[SegmentKind.MAGNITUDE].div_(self.squares.sqrt_())


@dataclass
class _Job:
    """An adapter that is being loaded. `pieces` yields the elements of each piece of its work."""

    digest: str
    targets: list[_Scaled]
    error: ServiceError | None = None
    pieces: Iterator[int] = field(default_factory=lambda: iter(()))

    def attempt(self, work: Callable[[], None]) -> None:
        """Does a part of the work, whose error is of this adapter alone: others are loaded, steps
        computed. Raises the faults that no one survives."""
        if self.error is not None:
            return
        try:
            work()
        except Exception as cause:
            found = find_fault(cause)
            if found is not None and found.is_fatal:
                raise
            if found is not None:
                self.error = _out_of_memory(self.digest)
            else:
                logger.exception("magnitudes cannot be divided", extra={"digest": self.digest})
                self.error = _failed(self.digest)


class Magnitudes:
    """The jobs of adapters that are being loaded, one after the other. `rank` is this one, of a
    model that is cut; then `exchange` sums over all, and so it does if the model `has_stages`. The
    weights of a `tower` are scaled, too, if the model reads pictures."""

    def __init__(
        self,
        weights: ModelWeights[Any],
        arena: Arena,
        rank: Rank | None = None,
        exchange: Exchange | None = None,
        *,
        has_stages: bool = False,
        tower: ModelWeights[Any] | None = None,
    ) -> None:
        assert (rank is None and not has_stages) == (exchange is None)
        is_cut = any(target.in_slice is not None for target in arena.layout.targets)
        assert exchange is not None or not is_cut, "it has a part of the squares"
        self._weights = weights
        self._arena = arena
        self._rank, self._exchange, self._has_stages = rank, exchange, has_stages
        is_cpu = arena.device.type == "cpu"
        self._step_elements = CPU_ELEMENTS if is_cpu else DEVICE_ELEMENTS
        self._slice_elements = CPU_SLICE_ELEMENTS if is_cpu else DEVICE_SLICE_ELEMENTS
        self._places = dict(_places(weights, lora_groups(arena.layout)))
        self._has_tower = tower is not None
        if tower is not None:
            self._places |= _places(tower, applied_to_pictures(arena.layout).groups)
        self._jobs: deque[_Job] = deque()

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def start(self, resident: Resident) -> None:
        """Begins with an image that lies in the arena."""
        job = _Job(resident.digest, list(self._scaled(resident)))
        job.pieces = self._pieces(job)
        self._jobs.append(job)

    @torch.inference_mode()
    def advance(self) -> list[Divided]:
        """Does as much as may be done between two steps; returns the finished parts. All ranks call
        it at the same times. Raises what the exchange does."""
        done: list[Divided] = []
        left = self._step_elements
        while self._jobs and left > 0:
            job = self._jobs[0]
            num_made, is_made = self._make(job, left)
            left -= num_made
            if not is_made:
                self._jobs.rotate(-1)  # a large one holds up no others
                return done
            self._jobs.popleft()
            done.append(Divided(job.digest, self._finish(job)))
        return done

    def _make(self, job: _Job, most: int) -> tuple[int, bool]:
        """Makes about this many elements of a job's squares; returns how many, and whether all are
        made, by all stages."""
        num_made, is_made = 0, True
        for num_elements in job.pieces:
            num_made += num_elements
            if num_made >= most:
                is_made = False
                break
        if not self._has_stages:
            return num_made, is_made
        assert isinstance(self._exchange, StagedExchange)
        speaks = self._rank is None or self._rank.index == 0  # for its stage
        facts = torch.tensor([num_made * speaks, not is_made], dtype=torch.float32)
        facts = facts.to(self._arena.device)
        self._exchange.sum_stages(facts)
        num_made, num_unmade = map(int, facts.tolist())
        return num_made, not num_unmade

    def _scaled(self, resident: Resident) -> Iterator[_Scaled]:
        """Yields the targets that an image has magnitudes of."""
        segments = resident.header.segments
        offsets = np.array([segment.offset for segment in segments], dtype=np.int64)
        granules = (locate(resident.extents, offsets) // GRANULE_BYTES).tolist()
        of_target: dict[int, Contents] = {}
        scales: defaultdict[int, float] = defaultdict(lambda: 1.0)
        for segment, granule in zip(segments, granules, strict=True):
            of_target.setdefault(segment.target, {})[segment.kind] = self._view(segment, granule)
            if segment.kind in LORA_KINDS:
                scales[segment.target] *= segment.scale
        for index, own in of_target.items():
            if SegmentKind.MAGNITUDE not in own:
                continue
            target, scale = self._arena.layout.targets[index], scales[index]
            is_here = self._has_tower or not target.is_of_pictures
            yield _Scaled(index, target, own, scale, *self._rows_of(target), is_here)

    def _rows_of(self, target: Target) -> tuple[_Rows, bool]:
        """Returns the rows that this rank reads, and whether other ranks have parts of the same
        outputs' squares."""
        is_embedding = target.kind is TargetKind.EMBEDDING
        count, size = target.num_out, target.num_in
        if is_embedding:
            count, size = size, count
        if self._rank is not None and (is_embedding or target.group == HEAD):
            start, end, _ = self._rank.part(count)
            return _Rows(start, end - start, self._rank.part_size(count), size), True
        return _Rows(0, count, count, size), target.in_slice is not None

    def _pieces(self, job: _Job) -> Iterator[int]:
        """Makes the squares of a job; yields how many elements each piece has on the rank with the
        most rows."""
        for scaled in job.targets:
            rows = scaled.rows
            step = max(1, self._slice_elements // rows.size)
            if scaled.is_here:
                job.attempt(scaled.begin)
            for start in range(0, rows.most_rows, step):
                end = min(start + step, rows.most_rows)
                if start < rows.num_rows and scaled.is_here:
                    job.attempt(partial(self._add, scaled, start, min(end, rows.num_rows)))
                if job.error is not None and self._exchange is None:
                    return
                yield (end - start) * rows.size
            scaled.end()

    def _add(self, scaled: _Scaled, start: int, end: int) -> None:
        """Adds the squares of rows [start, end) of those that are here."""
        first, last = scaled.rows.first + start, scaled.rows.first + end
        whole = self._base_rows(scaled, start, end)
        if scaled.is_embedding:
            whole.addmm_(scaled.a[first:last].float(), scaled.b, alpha=scaled.scale)
            scaled.squares += whole.square_().sum(dim=0)
        else:
            whole.addmm_(scaled.b[:, first:last].t(), scaled.a, alpha=scaled.scale)
            squares = scaled.squares[first:last]
            torch.linalg.vector_norm(whole, dim=1, out=squares).square_()

    def _base_rows(self, scaled: _Scaled, start: int, end: int) -> Tensor:
        """Returns a copy of rows of the weight that are here, in fp32, with those that the adapter
        replaces."""
        own, offset = scaled.own, scaled.rows.first
        if SegmentKind.FULL in own:
            rows = own[SegmentKind.FULL][offset + start : offset + end]
            return rows.to(torch.float32, copy=True)
        if scaled.is_embedding:
            rows = self._weights.embedding[start:end]
        else:
            projection, first = self._places[scaled.index]
            rows = projection.rows(first + start, first + end)
        return _with_rows(rows.to(torch.float32, copy=True), own, offset + start, offset + end)

    def _finish(self, job: _Job) -> ServiceError | None:
        """Divides the magnitudes, whose squares are made; returns why they cannot be."""
        faulty = torch.zeros(len(job.targets), device=self._arena.device)
        job.attempt(lambda: _divide(job, faulty, is_shared=False))
        if self._exchange is not None:
            shared = [each for each in job.targets if each.is_shared]
            faulty = self._sum(job, faulty, shared, self._exchange)
            job.attempt(lambda: _divide(job, faulty, is_shared=True))
            faulty = self._sum(job, faulty, (), self._exchange) if shared else faulty
        if self._has_stages:
            return self._of_all_stages(job, faulty)
        if job.error is not None:
            return job.error
        found = faulty.tolist()  # waits for a device once
        names = [each.target.name for each, n in zip(job.targets, found, strict=True) if n]
        return _refusal(job.digest, names[0]) if names else None

    def _of_all_stages(self, job: _Job, faulty: Tensor) -> ServiceError | None:
        """Returns why an adapter's magnitudes cannot be divided, in any stage: equal on all
        ranks."""
        assert isinstance(self._exchange, StagedExchange)
        targets = self._arena.layout.targets
        facts = faulty.new_zeros(2 + len(targets))
        facts[0] = isinstance(job.error, OutOfDeviceMemory)
        facts[1] = job.error is not None and not facts[0]
        for scaled, is_faulty in zip(job.targets, faulty.tolist(), strict=True):
            facts[2 + scaled.index] = is_faulty
        self._exchange.sum_stages(facts)
        num_full, num_failed, *of_targets = facts.tolist()
        if num_full or num_failed:
            return (_failed if num_failed else _out_of_memory)(job.digest)
        names = [target.name for target, n in zip(targets, of_targets, strict=True) if n]
        return _refusal(job.digest, names[0]) if names else None

    def _sum(
        self, job: _Job, faulty: Tensor, shared: Sequence[_Scaled], exchange: Exchange
    ) -> Tensor:
        """Sums the squares of these targets over ranks, and returns which targets are faulty on
        any. The errors of other ranks become the job's."""
        is_full = isinstance(job.error, OutOfDeviceMemory)
        for each in shared if job.error is not None else ():
            each.clear()  # an error may have come before
        errors = faulty.new_tensor([is_full, job.error is not None and not is_full])
        parts = [each.squares for each in shared]
        summed = torch.cat([*parts, faulty, errors])
        exchange.sum(summed)
        *squares, faulty, errors = summed.split([*map(len, parts), len(faulty), len(errors)])
        for own, whole in zip(parts, squares, strict=True):
            own.copy_(whole)
        num_full, num_failed = errors.tolist()
        if num_full or num_failed:
            job.error = job.error or (_failed if num_failed else _out_of_memory)(job.digest)
        return faulty

    def _view(self, segment: Segment, granule: int) -> Tensor:
        """Returns the arena's bytes of a segment, in its shape."""
        dtype, shape = self._arena.layout.form_of(segment)
        values = vector_at(self._arena.flat, granule, math.prod(shape), dtype)
        assert values is not None
        return values.view(shape)


def _divide(job: _Job, faulty: Tensor, *, is_shared: bool) -> None:
    """Divides the magnitudes here that are shared, or not, and notes in `faulty`, [targets], which
    are not finite then."""
    for place, scaled in enumerate(job.targets):
        if scaled.is_shared is is_shared and scaled.is_here:
            faulty[place] += ~scaled.divide().sum().isfinite()


def _refusal(digest: str, faulty: str) -> ServiceError:
    return AdapterUnusable(
        f"adapter {digest} has DoRA magnitudes that cannot be applied: a row of {faulty} "
        "becomes zero, or is not finite",
        subject="adapter",
    )


def _failed(digest: str) -> ServiceError:
    return Internal(f"loading adapter {digest} failed")


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
    weights: ModelWeights[Any], groups: Mapping[str, LoraGroup]
) -> Iterator[tuple[int, tuple[Projection, int]]]:
    """Yields each linear target with the projection that computes it, and its first row there."""
    for name, group in groups.items():
        projection = weights.projections.get(name)
        if projection is not None:
            for target, first in zip(group.targets, group.out_offsets, strict=True):
                yield target, (projection, first)
