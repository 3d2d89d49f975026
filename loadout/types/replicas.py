"""Types of the inference service's replicas: resident adapters, debug bundles, traces."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime

from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind


class AdapterTier(enum.Enum):
    """Memory that holds a resident adapter."""

    DEVICE = "device"
    HOST = "host"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter in the inference service's memory."""

    digest: str
    names: tuple[str, ...]
    """Names known to point to it; if it is superseded, its last name with the version."""
    tier: AdapterTier
    num_bytes: int
    rank: int
    pinned: bool
    running_requests: int
    last_used_time: datetime | None
    load_seconds: float
    """Seconds from the first request for it until it was resident."""
    superseded: bool = False
    """Whether no name points to it any more."""
    not_finite_requests: int = 0
    """Requests that ended because the model's values were not finite. Not 0: its weights are too
    large; register a sound version."""

    @property
    def notes(self) -> str:
        """Returns facts for operators: "pinned", "3 not finite", or "" if there are none."""
        counted = f"{self.not_finite_requests} not finite" if self.not_finite_requests else ""
        return ", ".join(filter(None, ("pinned" if self.pinned else "", counted)))

    @property
    def label(self) -> str:
        """Returns its names, or its digest if it has none, and whether it is old:
        "team/french@3 (old)"."""
        return (", ".join(self.names) or self.digest) + " (old)" * self.superseded


@dataclass(frozen=True, slots=True)
class ResidentSegment:
    """A matrix or vector of an adapter, from byte `offset` of its memory."""

    kind: SegmentKind
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class ResidentTarget:
    """An adapter's part of one module; `layer` is None outside of layers."""

    name: str
    layer: int | None
    kind: TargetKind
    rank: int
    segments: tuple[ResidentSegment, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the size of all segments in bytes."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class ResidentExtent:
    """Contiguous bytes of an adapter, from byte `offset` of its memory."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OperationGroup:
    """Modules that are computed together, and the launches for them per decode step. `targets` are
    the adapter's modules. The step launches the group even if there are none, because it serves any
    mix of adapters."""

    name: str
    targets: tuple[str, ...]
    launches: int


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """The parts of a resident adapter, in the memory that `adapter` names."""

    adapter: ResidentAdapter
    slot: int
    """Its row in that memory."""
    extents: tuple[ResidentExtent, ...]
    """Its place in that memory, in its own order."""
    targets: tuple[ResidentTarget, ...]
    groups: tuple[OperationGroup, ...]
    """Launches per decode step if this is the only adapter."""
    launches: int
    """Sum over the groups: kernels on a GPU, operations on a CPU."""
    kernels: str
    """The kernels that compute them, as in ServerInfo."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One of several replicas, as this client knows it."""

    address: str
    is_healthy: bool
    """Whether it takes calls."""
    num_requests: int
    """Requests that run or wait there."""
    max_sequences: int
    """Requests that may run at once; 0: it has published no load."""


@dataclass(frozen=True, slots=True)
class DebugPart:
    """A file of diagnostics, such as "config.json"; `error` says why it has no content."""

    name: str
    content: bytes
    error: str


@dataclass(frozen=True, slots=True)
class TracePiece:
    """A piece of a gzipped trace in Chrome's JSON. `num_steps` is 0 except in the first."""

    data: bytes
    num_steps: int
