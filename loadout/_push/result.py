"""The result of a push: the registration, and the replicas that can sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadout.types import Registration


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """A replica that has loaded the pushed version."""

    address: str
    seconds: float
    """Seconds from the start of the push until the replica could sample from it."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A pushed adapter, and the replicas that have loaded it."""

    registration: Registration
    replicas: tuple[LoadedReplica, ...] = ()
    """The replicas that the push waited for."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reasons why it did not wait for other replicas, by address: they are down, or serve another
    base model."""

    @property
    def name(self) -> str:
        """Returns the adapter's name, "tenant/name"."""
        return self.registration.adapter.name

    @property
    def version(self) -> int:
        """Returns the number of the pushed version."""
        return self.registration.adapter.version

    @property
    def digest(self) -> str:
        """Returns the digest of the content, "sha256:<hex>"."""
        return self.registration.adapter.digest

    @property
    def revision(self) -> int:
        """Returns the catalog revision at which the version became current."""
        return self.registration.revision
