"""Facts about the call in progress, for its log line and its span."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from servicekit.auth.principal import Principal

MAX_CHARS = 256

_FACTS: ContextVar[dict[str, str] | None] = ContextVar("call_facts", default=None)


def begin(facts: dict[str, str]) -> None:
    """Collects the notes of this call's task in `facts` from now on. Each call has a task of its
    own."""
    _FACTS.set(facts)


def note(**facts: str) -> None:
    """Adds facts to the call in progress, if there is one; empty ones are skipped, long ones cut
    off."""
    found = _FACTS.get()
    if found is not None:
        found.update({key: value[:MAX_CHARS] for key, value in facts.items() if value})


def note_caller(caller: Principal[Any]) -> None:
    """Adds the name of the caller's token, and its tenant."""
    note(who=caller.name, tenant=caller.home_tenant)
