"""The facts known about the call in progress, for its line in the log."""

from __future__ import annotations

from contextvars import ContextVar

from adapter_store.core import Principal

MAX_CHARS = 256

_FACTS: ContextVar[dict[str, object] | None] = ContextVar("call_facts", default=None)


def begin(facts: dict[str, object]) -> None:
    """Makes `note` add to `facts` in the current task; each call has a task of its own."""
    _FACTS.set(facts)


def note(**facts: str) -> None:
    """Adds what is not empty, if a call is in progress; of callers' long words the beginning."""
    found = _FACTS.get()
    if found is not None:
        found.update({key: value[:MAX_CHARS] for key, value in facts.items() if value})


def note_caller(caller: Principal) -> None:
    """Adds its token's name, and the tenant that it is of."""
    note(who=caller.name, tenant=caller.home_tenant)
