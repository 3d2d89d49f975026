"""The audit: one JSON line for every requested change, granted or not.

Lines go to a logger, and to a file where one is set. They hold names and digests, never tokens,
prompts or other credentials. Where the file is required, a call that changes something has a line
with the result "started" before it does, and without it is refused.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from servicekit.auth.principal import Principal
from servicekit.errors import ServiceError, Unavailable

MAX_NAME_CHARS = 200
_MODE = 0o640


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _is_same(file: int, other: int) -> bool:
    return os.path.samestat(os.fstat(file), os.fstat(other))


def _ends_torn(path: Path) -> bool:
    """Returns whether a file, if it may be read, ends without the end of its last line."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - 1))
            return file.read(1) not in (b"", b"\n")
    except OSError:
        return False


@dataclass(slots=True)
class AuditEntry:
    """The fields of a line; a service derives its own to add some. `result` is ok, refused (for
    `reason`), failed or cancelled; or started, in a first line."""

    what: str = ""
    name: str = ""
    peer: str = ""
    who: str = field(default="", init=False)
    roles: list[str] = field(default_factory=list, init=False)
    digest: str = field(default="", init=False)
    result: str = field(default="", init=False)
    reason: str = field(default="", init=False)
    time: str = field(default_factory=_now, init=False)
    pending: asyncio.Future[Any] | None = field(default=None, init=False)
    """Set once the change goes on to its end even if the caller leaves: the line is written then,
    with that result."""

    def set_caller(self, caller: Principal[Any]) -> None:
        self.who = caller.name
        self.roles = sorted(caller.roles)

    def set_outcome(self, outcome: Any) -> None:
        """Called with the message of `pending`; a service overrides it to set its fields."""

    def set_result(self, error: BaseException | None) -> None:
        match error:
            case None:
                self.result = "ok"
            case ServiceError(reason=reason):
                self.result, self.reason = "refused", reason
            case asyncio.CancelledError() | GeneratorExit():
                self.result = "cancelled"
            case _:
                self.result, self.reason = "failed", type(error).__name__

    def facts(self) -> dict[str, Any]:
        """Returns the line's fields: the caller first, then the change, then the result."""
        first = ("time", "who", "roles", "peer", "what", "name")
        last = ("result", "reason")
        skipped = {*first, *last, "pending"}
        between = [each.name for each in fields(self) if each.name not in skipped]
        facts = {key: getattr(self, key) for key in (*first, *between, *last)}
        facts["name"] = self.name[:MAX_NAME_CHARS]
        return facts


EntryT = TypeVar("EntryT", bound=AuditEntry)


class Audit(Generic[EntryT]):
    """Appends lines; several processes may share a file. Lives on the event loop.

    `audited` names the calls that are written down, as the contract does.
    """

    def __init__(
        self,
        path: Path | None,
        entry_type: type[EntryT],
        audited: frozenset[str],
        logger: logging.Logger,
        *,
        is_required: bool = False,
    ) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = path
        self._entry_type = entry_type
        self._audited = audited
        self._logger = logger
        self._is_required = is_required
        self._file: int | None = None
        self._is_torn = False
        """Whether the file ends with a part of a line, as a full disk leaves it."""
        self.make_room: Callable[[], None] = lambda: None
        """Called when the file's volume is full, before a line is written once more."""
        self.reopen()

    def reopen(self) -> None:
        """Goes on in a new file if the old one was moved away. Raises OSError; the old stays."""
        if self._path is None:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        opened = os.open(self._path, flags, _MODE)
        was_torn = self._is_torn and self._file is not None and _is_same(self._file, opened)
        self.close()
        self._file, self._is_torn = opened, was_torn or _ends_torn(self._path)

    def close(self) -> None:
        """Further lines go to the logger only."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def record(self, entry: EntryT) -> Iterator[EntryT]:
        """Writes the entry when the context ends, with how it ended; or when `pending` does."""
        error: BaseException | None = None
        try:
            yield entry
        except BaseException as caught:
            error = caught
            raise
        finally:
            if entry.pending is None:
                entry.set_result(error)
                self.write(entry)
            else:
                self._write_when_done(entry, entry.pending)

    def entry(self, what: str, name: str = "", peer: str = "") -> EntryT:
        return self._entry_type(what, name, peer)

    def begin(self, entry: EntryT) -> None:
        """Writes down that an authorized call starts, if the file is required. Raises Unavailable
        if that fails: a change that cannot be audited must not happen."""
        if not self._is_required:
            return
        entry.result = "started"
        try:
            self._append(entry.facts())
        except OSError as error:
            self._logger.error("audit file not writable: refused", extra={"why": str(error)})
            raise Unavailable(
                "--audit-file: this service may change nothing while its audit file cannot be "
                "written (--audit-required)",
                subject="audit_file",
                reason="AUDIT_UNAVAILABLE",
            ) from error

    def refuse(self, what: str, peer: str, error: ServiceError) -> None:
        """Records a call that was refused before anything of it was read."""
        if what in self._audited:
            entry = self.entry(what, peer=peer)
            entry.set_result(error)
            self.write(entry)

    def write(self, entry: EntryT) -> None:
        """A line that cannot be written is logged as lost; the change that it is about stays."""
        facts = entry.facts()
        self._logger.info("audit", extra={"audit": facts})
        try:
            self._append(facts)
        except OSError as error:
            self._logger.error("audit line lost from the file", extra={"why": str(error)})

    def _append(self, facts: dict[str, Any]) -> None:
        if self._file is None:
            return
        data = b"\n" * self._is_torn + json.dumps(facts).encode() + b"\n"
        try:
            num_written = os.write(self._file, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.make_room()
            num_written = os.write(self._file, data)
        self._is_torn = num_written != len(data)
        if self._is_torn:
            raise OSError("only a part of the line was written")

    def _write_when_done(self, entry: EntryT, pending: asyncio.Future[Any]) -> None:
        if pending.done():
            self._write_outcome(entry, pending)
        else:
            pending.add_done_callback(lambda done: self._write_outcome(entry, done))

    def _write_outcome(self, entry: EntryT, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            entry.set_result(asyncio.CancelledError())
        else:
            entry.set_result(done.exception())
            if done.exception() is None:
                entry.set_outcome(done.result())
        self.write(entry)
