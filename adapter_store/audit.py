"""The audit: one JSON line for every change that is asked for, granted or not.

Lines go to the logger `adapter_store.audit`, and to a file where one is set. They hold names and
digests, never tokens or anything else that a caller sends as proof of who it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from adapter_store.access import Principal
from adapter_store.core import AdapterRecord
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 200
_MODE = 0o640


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class AuditLine:
    """What a line says. `result` is ok, refused (`reason` says why), failed or cancelled."""

    what: str
    name: str = ""
    peer: str = ""
    who: str = ""
    roles: list[str] = field(default_factory=list)
    version: int = 0
    digest: str = ""
    revision: int = 0
    result: str = ""
    reason: str = ""
    time: str = field(default_factory=_now)
    recording: asyncio.Future[tuple[AdapterRecord, int]] | None = None
    """Set once the change goes on to its end even if the caller leaves: it then says the result."""

    def identify(self, who: Principal) -> None:
        self.who = who.name
        self.roles = sorted(role.value for role in who.roles)

    def describe(self, record: AdapterRecord, revision: int) -> None:
        """Says what was changed, as it is now."""
        self.name, self.version = str(record.name), record.version
        self.digest, self.revision = record.digest, revision

    def end(self, error: BaseException | None) -> None:
        """Says how it ended."""
        match error:
            case None:
                self.result = "ok"
            case ServiceError(reason=reason):
                self.result, self.reason = "refused", reason
            case asyncio.CancelledError() | GeneratorExit():
                self.result = "cancelled"
            case _:
                self.result, self.reason = "failed", type(error).__name__


_FACTS = (
    *("time", "who", "roles", "peer"),
    *("what", "name", "version", "digest", "revision"),
    *("result", "reason"),
)


class Audit:
    """Appends whole lines; several processes may share a file. Lives on the event loop."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = path
        self._file: int | None = None
        self.reopen()

    def reopen(self) -> None:
        """Goes on in a new file if the old one was moved away. Raises OSError; the old stays."""
        if self._path is None:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        opened = os.open(self._path, flags, _MODE)
        self.close()
        self._file = opened

    def close(self) -> None:
        """Further lines go to the logger only."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def watching(self, line: AuditLine) -> Iterator[AuditLine]:
        """Writes the line when the context ends, with how it ended; or when the recording does."""
        error: BaseException | None = None
        try:
            yield line
        except BaseException as caught:
            error = caught
            raise
        finally:
            if line.recording is None:
                line.end(error)
                self.write(line)
            elif line.recording.done():
                self._write_outcome(line, line.recording)
            else:
                line.recording.add_done_callback(lambda done: self._write_outcome(line, done))

    def _write_outcome(
        self, line: AuditLine, done: asyncio.Future[tuple[AdapterRecord, int]]
    ) -> None:
        if done.cancelled():
            line.end(asyncio.CancelledError())
        else:
            line.end(done.exception())
            if done.exception() is None:
                line.describe(*done.result())
        self.write(line)

    def write(self, line: AuditLine) -> None:
        """A line that cannot be written is logged as lost; it does not undo what it tells of."""
        facts = {key: getattr(line, key) for key in _FACTS}
        facts["name"] = line.name[:MAX_NAME_CHARS]
        logger.info("audit", extra={"audit": facts})
        if self._file is None:
            return
        data = json.dumps(facts).encode() + b"\n"
        try:
            if os.write(self._file, data) != len(data):
                raise OSError("only a part of the line was written")
        except OSError as error:
            logger.error("audit line lost from the file", extra={"why": str(error)})
