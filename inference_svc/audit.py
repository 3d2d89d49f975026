"""The audit: one JSON line for every change of residency that is asked for, granted or not.

Lines go to the logger `inference_svc.audit`, and to a file where one is set. They hold names and
digests, never tokens or prompts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from inference_svc.access import Principal
from servicekit.errors import InvalidSetting, ServiceError

log = logging.getLogger(__name__)

AUDITED = frozenset({"LoadAdapter", "UnloadAdapter", "PinAdapter", "UnpinAdapter"})
"""What is written down, by the names that the contract gives it."""

MAX_NAME_CHARS = 200
_MODE = 0o640


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class AuditLine:
    """What a line says. `result` is ok, refused (`reason` says why), failed or cancelled."""

    time: str = field(default_factory=_now, init=False)
    who: str = field(default="", init=False)
    roles: list[str] = field(default_factory=list, init=False)
    peer: str = ""
    what: str = ""
    name: str = ""
    digest: str = field(default="", init=False)
    result: str = field(default="", init=False)
    reason: str = field(default="", init=False)

    def identify(self, who: Principal) -> None:
        self.who = who.name
        self.roles = sorted(role.value for role in who.roles)

    def end(self, error: BaseException | None) -> None:
        """Says how it ended."""
        match error:
            case None:
                self.result = "ok"
            case ServiceError(reason=reason):
                self.result, self.reason = "refused", reason
            case InvalidSetting():
                self.result, self.reason = "refused", "SETTING_INVALID"
            case asyncio.CancelledError():
                self.result = "cancelled"
            case _:
                self.result, self.reason = "failed", type(error).__name__


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
        """Writes the line when the context ends, with how it ended."""
        error: BaseException | None = None
        try:
            yield line
        except BaseException as caught:
            error = caught
            raise
        finally:
            line.end(error)
            self.write(line)

    def write(self, line: AuditLine) -> None:
        """A line that cannot be written is logged as lost; it does not undo what it tells of."""
        line.name = line.name[:MAX_NAME_CHARS]
        data = json.dumps(asdict(line))
        log.info("%s", data)
        if self._file is None:
            return
        encoded = data.encode() + b"\n"
        try:
            if os.write(self._file, encoded) != len(encoded):
                raise OSError("only a part of the line was written")
        except OSError as error:
            log.error("an audit line is lost from the file: %s", error)

    def refuse(self, what: str, peer: str, error: ServiceError) -> None:
        """Writes down who was refused before anything of the call was read."""
        if what in AUDITED:
            line = AuditLine(peer, what)
            line.end(error)
            self.write(line)
