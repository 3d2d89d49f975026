"""Host images on their way into the arena."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from inference_svc.adapters.changes import HostCopy
from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.load_traces import LoadTraces
from inference_svc.adapters.loads import Load


@dataclass(frozen=True, slots=True)
class _Copy:
    change: HostCopy
    began_s: float
    load: Load | None


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

    def begin(self, change: HostCopy, now_s: float, load: Load | None) -> None:
        """It is the last part of `load`; None: nobody has asked for it."""
        self._by_digest[change.host.digest] = _Copy(change, now_s, load)

    def end(self, digest: str, now_s: float) -> HostCopy:
        """It lies in the arena, whole."""
        copy = self._by_digest.pop(digest)
        self.traces.end(digest, now_s, is_here=True)
        if copy.load is not None:
            self.times.copy.observe(now_s - copy.began_s)
            self.times.load[copy.load.source].observe(now_s - copy.load.started_s)
        return copy.change
