"""The messages between rank 0 and another rank outside of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contract.images.header import ImageHeader, Segment
from inference_svc.adapters.memory.extents import Extent
from inference_svc.backends.exchange import Meeting
from inference_svc.core import EngineConfig
from inference_svc.engine.control.status_types import RankStatus
from inference_svc.engine.ranks.liveness import Progress
from inference_svc.model.description import Rank
from servicekit.errors import ServiceError

STEP, DIVIDE, IDLE, FREE, FREE_ALL, RESTORE = b"s", b"d", b"i", b"f", b"a", b"r"
TRACE, ABANDON = b"t", b"x"
"""The first byte of what comes through a rank's step socket: a step follows; or changes, after
which the rank goes on dividing magnitudes, or uses idle time; or the rank is to free its pages, or
its weights as well, or to allocate them again, and answers; or it is to trace its next steps, or to
stop that; see `ranks.traces`."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank. `make_store` is a `StoreFactory`; `backend` is the name of rank
    0's; steps come through the socket `steps_fd`."""

    config: EngineConfig
    rank: Rank
    make_store: Callable[[Callable[[Any], None]], Any]
    backend: str
    meeting: Meeting
    steps_fd: int


@dataclass(frozen=True, slots=True)
class Described:
    """The rank is about to load its part of the model, together with all others."""


@dataclass(frozen=True, slots=True)
class Built:
    """The rank has loaded its part, and has so many pages."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The rank cannot load its part."""

    error: Exception


@dataclass(frozen=True, slots=True)
class OpenPull:
    """Begin to pull this rank's part of an adapter, and say how large it is. `number` is the
    pull's."""

    number: int
    digest: str
    layout_id: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The header of this rank's part of an adapter, which waits for a Pull."""

    number: int
    header: ImageHeader


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull this rank's part of an adapter to these extents. It must have these segments: then the
    parts of all ranks of a stage lie alike. `number` is the pull's, which may be open."""

    number: int
    digest: str
    layout_id: str
    segments: tuple[Segment, ...]
    extents: tuple[Extent, ...]
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class CancelPull:
    """End a pull."""

    number: int


@dataclass(frozen=True, slots=True)
class PullEnded:
    """The rank writes no more for a pull, which is complete, or failed, or was cancelled."""

    number: int
    is_done: bool
    error: ServiceError | None = None


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """A finding about the store's replicas, in either direction; see `process_main.ChildStore`."""

    content: Any


@dataclass(frozen=True, slots=True)
class Traced:
    """The gzipped trace of so many steps of the rank, or why there is none."""

    call_id: int
    content: bytes = b""
    num_steps: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The rank could not compute a step, or take a message, and ends."""

    why: str


@dataclass(frozen=True, slots=True)
class LostContact:
    """The rank ends because another rank did not exchange with it."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks whether a rank still answers, which it does while it loads or computes, too. Its pulls
    keep a pace from then on if they need one; see `PullPace.is_needed`."""

    needs_pace: bool = False


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a Ping. `status` is None until the rank has loaded its part."""

    progress: Progress
    status: RankStatus | None


@dataclass(frozen=True, slots=True)
class TellStacks:
    """Asks where the threads of a rank are."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Answers TellStacks."""

    text: str
