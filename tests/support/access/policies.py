"""Policies for tests: a token's text follows from its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event


def token_of(name: str) -> str:
    return f"secret-of-{name}"


def token_lines(name: str, roles: Sequence[str], tenants: Sequence[str] = ("team-a",)) -> str:
    return (
        f"[tokens.{name}]\n"
        f'sha256 = "{hashlib.sha256(token_of(name).encode()).hexdigest()}"\n'
        f"roles = {json.dumps(list(roles))}\n"
        f"tenants = {json.dumps(list(tenants))}\n"
    )


ROOT = token_lines("root", ["admin"], ["*"])


def write_policy(folder: Path, *parts: str) -> Path:
    path = folder / "policy.toml"
    path.write_text("\n".join(parts))
    return path


@contextmanager
def counted_statements() -> Iterator[list[str]]:
    """Yields a list that the catalog's statements are put into as they run."""
    statements: list[str] = []

    def note(
        conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def answer_of(error: Any) -> tuple[object, ...]:
    """All of an answer that a caller can see."""
    return error.code(), error.details(), error.trailing_metadata()


def audit_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FIRST_RELEASE = Path(__file__).with_name("release_1_policy.toml")
