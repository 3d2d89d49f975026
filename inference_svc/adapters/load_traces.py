"""The spans of loads that traced requests wait for. Where nothing is traced, an empty dict.

load: wait (for a turn or for room), pull (PullAdapter for each attempt, wait), copy
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.adapters.pull import PullJob
from inference_svc.spans import CANCELLED, OpenSpan, Span, SpanContext


@dataclass(eq=False, slots=True)
class _Traced:
    """`phases` are those that are not over, the outer one first."""

    load: OpenSpan
    phases: list[OpenSpan] = field(default_factory=list)
    jobs: list[PullJob] = field(default_factory=list)

    def enter(self, name: str, now_s: float) -> OpenSpan:
        outer = self.phases[-1] if self.phases else self.load
        self.phases.append(outer.child(name, start_s=now_s))
        return self.phases[-1]

    def leave(self, now_s: float, *names: str) -> None:
        """Ends those of these names that are innermost."""
        while self.phases and self.phases[-1].name in names:
            self.phases.pop().end(now_s)


class LoadTraces:
    """By digest; of others nothing is heard. Owned by the engine's thread; times are seconds on the
    monotonic clock."""

    def __init__(self) -> None:
        self._by_digest: dict[str, _Traced] = {}
        self._spans: list[Span] = []

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def take(self) -> tuple[Span, ...]:
        """Those that are over, each once."""
        if not self._spans:
            return ()
        taken = tuple(self._spans)
        self._spans.clear()
        return taken

    def follow(self, digest: str, asker: SpanContext, now_s: float) -> None:
        """From now on this load is a part of what `asker` does."""
        context = asker.child()
        load = OpenSpan("load", "internal", context, asker.span_id, self._spans.append, now_s)
        load.note(digest=digest)
        self._by_digest[digest] = _Traced(load)

    def link(self, digest: str, asker: SpanContext) -> SpanContext | None:
        """The load's span; None: it is the asker's own."""
        load = self._by_digest[digest].load
        return None if load.parent_id == asker.span_id else load.context

    def waits(self, digest: str, now_s: float) -> None:
        """For a turn, or in the midst of a pull for room."""
        if traced := self._by_digest.get(digest):
            traced.leave(now_s, "wait")
            traced.enter("wait", now_s)

    def goes_on(self, digest: str, now_s: float) -> None:
        """It has got room."""
        if traced := self._by_digest.get(digest):
            traced.leave(now_s, "wait")

    def pulls(self, digest: str, job: PullJob, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.leave(now_s, "wait", "pull")
            job.trace = traced.enter("pull", now_s)
            traced.jobs.append(job)

    def is_pulled(self, digest: str, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.leave(now_s, "wait", "pull")

    def copies(self, digest: str, now_s: float) -> None:
        if traced := self._by_digest.get(digest):
            traced.leave(now_s, "wait", "pull")
            traced.enter("copy", now_s)

    def note(self, digest: str, error: Exception | None = None, **facts: str | int) -> None:
        """What it is of, or why it fails."""
        if traced := self._by_digest.get(digest):
            traced.load.note(**facts)
            if error is not None:
                traced.load.fail(error)

    def end(self, digest: str, now_s: float, *, is_here: bool) -> None:
        """Not `is_here`: it has failed, or nobody waits for it any more."""
        traced = self._by_digest.pop(digest, None)
        if traced is None:
            return
        traced.leave(now_s, "wait", "pull", "copy")
        for job in traced.jobs:
            self._spans += job.spans
        if not is_here and not traced.load.error:
            traced.load.attributes[CANCELLED] = True
        traced.load.end(now_s)
