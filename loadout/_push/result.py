"""What a push returns: the registration, and the replicas that can sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadout.types import Registration


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """A replica that can sample from what was pushed, and how many seconds after the start of the
    push it could."""

    address: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Pushed:
    """A pushed adapter, and the replicas that were waited for; `skipped` says why others were not,
    by their addresses: they are down, or serve another base model."""

    registration: Registration
    replicas: tuple[LoadedReplica, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.registration.adapter.name

    @property
    def version(self) -> int:
        return self.registration.adapter.version

    @property
    def digest(self) -> str:
        return self.registration.adapter.digest

    @property
    def revision(self) -> int:
        return self.registration.revision
