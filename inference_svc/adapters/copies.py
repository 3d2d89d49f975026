"""Host images on their way into the arena."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from inference_svc.adapters.changes import HostCopy
from inference_svc.adapters.load_times import LoadTimes
from inference_svc.adapters.load_traces import LoadTraces


@dataclass(frozen=True, slots=True)
class _Copy:
    change: HostCopy
    began_s: float
    wanted_s: float | None


@dataclass
class Copies:
    """By digest. The host image is held as long as it is being copied."""

    times: LoadTimes
    traces: LoadTraces
    _by_digest: dict[str, _Copy] = field(default_factory=dict)

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_digest)

    def __len__(self) -> int:
        return len(self._by_digest)

    def begin(self, change: HostCopy, now_s: float, wanted_s: float | None) -> None:
        """`wanted_s` is when the load began; None: nobody has asked for it."""
        self._by_digest[change.host.digest] = _Copy(change, now_s, wanted_s)

    def end(self, digest: str, now_s: float) -> HostCopy:
        """It lies in the arena, whole."""
        copy = self._by_digest.pop(digest)
        self.traces.end(digest, now_s, is_here=True)
        if copy.wanted_s is not None:
            self.times.copy.observe(now_s - copy.began_s)
            self.times.load.observe(now_s - copy.wanted_s)
        return copy.change
