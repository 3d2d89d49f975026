"""The messages of a rank of another node until it computes: with rank 0, and with its own node's
process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference_svc.backends.exchange import Meeting
from inference_svc.core import EngineConfig
from inference_svc.model.description import Rank

MAX_COMING_BYTES = 64 << 10
"""The size of a Coming, which is read before the rank has been accepted."""


@dataclass(frozen=True, slots=True)
class Coming:
    """The rank's first message to rank 0: what its node computes with, and its process."""

    facts: dict[str, str]
    process_id: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Rank 0 accepts the rank; its backend has this name."""

    backend: str
    meeting: Meeting


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0 does not accept the rank."""

    why: str


@dataclass(frozen=True, slots=True)
class Orders:
    """The first message to a rank's process from its node's; see `ranks.messages.Start`."""

    config: EngineConfig
    rank: Rank
    make_store: Callable[[Callable[[Any], None]], Any]
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class NotReady:
    """The rank's message to its node's process: rank 0 is not there yet."""

    why: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The rank's message to its node's process: rank 0 has accepted it."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The rank's message to its node's process every PING_S, from then on: its process runs."""


@dataclass(frozen=True, slots=True)
class NotJoined:
    """The rank's message to its node's process: it ends, because rank 0 has not accepted it."""

    why: str
