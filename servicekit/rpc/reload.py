"""Takes over policy and certificates that change: on SIGHUP, and by watching the files."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from servicekit.auth.audit import Audit
from servicekit.auth.policy import PolicyFile
from servicekit.rpc.tls import CertificateFiles
from servicekit.settings.files import FileWatch, ReloadableFiles, Sight
from servicekit.settings.service import ServiceSettings
from servicekit.telemetry.metrics import FILES_REFUSED, Sample

logger = logging.getLogger(__name__)

LOOKS_PER_INTERVAL = 2
"""A change is taken over at the second look that finds it, so it is within the interval."""


class Reloader:
    """Takes over the files of policy and certificates, and opens the audit file anew. A file that
    cannot be taken over stays as it was.

    Lives on the event loop and reads in threads. One `reload` or `look` runs at a time.
    """

    def __init__(
        self, policies: PolicyFile[Any], certificates: CertificateFiles, audit: Audit[Any]
    ) -> None:
        self._policies = policies
        self._audit = audit
        self._files: tuple[ReloadableFiles, ...] = (policies, certificates)
        self._watches = [FileWatch(files) for files in self._files if files.can_be_watched]
        self._problems: dict[str, str] = {}
        """Why the files' contents are not in force, by setting."""

    async def reload(self) -> None:
        """Takes over everything as it is now."""
        try:
            self._audit.reopen()
        except OSError as error:
            _log_refused("audit_file", error)
        else:
            _log_taken_over("audit_file")
        for files in self._files:
            try:
                await asyncio.to_thread(files.reload)
            except Exception as error:
                self._note_refused(files, error)
            else:
                self._note_taken_over(files)

    async def look(self) -> None:
        """Looks once whether files have changed. A file that cannot be taken over is tried at each
        look, and reported at the first."""
        for watch in self._watches:
            files = watch.files
            try:
                found = await asyncio.to_thread(watch.look)
            except Exception as error:  # of any kind: the next look may succeed
                if self._problems.get(files.setting) != str(error):
                    self._note_refused(files, error)
                continue
            if found is Sight.TAKEN_OVER:
                self._note_taken_over(files)
            elif found is Sight.SAME and self._problems.pop(files.setting, None) is not None:
                logger.info("the files are as before", extra={"setting": files.setting})

    def samples(self) -> list[Sample]:
        """Returns the values of FILES_REFUSED, in any thread."""
        settings = [files.setting for files in self._files]
        return [Sample(FILES_REFUSED, each in self._problems, (each,)) for each in settings]

    def _note_refused(self, files: ReloadableFiles, error: Exception) -> None:
        self._problems[files.setting] = str(error)
        self._audit_policy(files, error)
        _log_refused(files.setting, error)

    def _note_taken_over(self, files: ReloadableFiles) -> None:
        self._problems.pop(files.setting, None)
        self._audit_policy(files, None)
        _log_taken_over(files.setting)

    def _audit_policy(self, files: ReloadableFiles, error: Exception | None) -> None:
        if files is self._policies:
            entry = self._audit.entry("ReloadPolicy")
            entry.set_result(error)
            self._audit.write(entry)


@asynccontextmanager
async def reloading(settings: ServiceSettings, reloader: Reloader) -> AsyncIterator[None]:
    """Reloads all files on SIGHUP, and changed files periodically, while the context lasts. Does
    nothing if there is nothing to read again: then a terminal that closes ends the process."""
    if not (settings.policy_file or settings.tls_cert_file or settings.audit_file):
        yield
        return
    requested = asyncio.Event()
    # The handler stays: a signal during the drain must not end the process.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
    period_s = settings.reload_seconds / LOOKS_PER_INTERVAL
    task = asyncio.create_task(_reload_forever(reloader, requested, period_s or None))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _reload_forever(
    reloader: Reloader, requested: asyncio.Event, period_s: float | None
) -> None:
    """Looks every `period_s`, if that is given; reloads when it is requested."""
    while True:
        try:
            await asyncio.wait_for(requested.wait(), period_s)
        except TimeoutError:
            await reloader.look()
        else:
            requested.clear()
            await reloader.reload()


def _log_refused(setting: str, error: Exception) -> None:
    logger.error("not reloaded", extra={"setting": setting, "why": str(error)})


def _log_taken_over(setting: str) -> None:
    logger.info("reloaded", extra={"setting": setting})
