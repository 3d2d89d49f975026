"""Adapters of the store as folders of plain LoRAs, for an engine on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from loadout import types
from loadout.aio import AsyncClient
from loadout.errors import FailedPrecondition, ResourceExhausted

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3600.0
"""How long a folder stays after its last use: engines read it again for requests that still run."""
MAX_EXPORTS = 4
"""Exports at once."""
EXPORT_SECONDS = 900.0
"""How long an export may take."""
LOCK = "lock"
_OWN = re.compile(r"\.?[0-9a-f]{64}(\.|$)")
"""Folders of adapters, complete or not."""


@dataclass(slots=True)
class _Folder:
    path: Path
    num_bytes: int
    released_s: float


class AdapterFolders:
    """Folders by digest under `root`, which this process alone uses. For one event loop.

    A folder is held from `take` to `release`, any number of times, and `GRACE_SECONDS` longer.
    Others are removed, the longest unused first, when new ones need their bytes. An export takes
    its bytes before the first arrives, so that all folders together never have more than
    `max_bytes`.

    Raises FailedPrecondition if another process uses the root.
    """

    def __init__(self, client: AsyncClient, root: Path, max_bytes: int) -> None:
        self._client = client
        self._root = root.absolute()
        self._max_bytes = max_bytes
        self._folders: dict[str, _Folder] = {}
        self._holders: Counter[str] = Counter()
        self._exports: dict[str, asyncio.Task[_Folder]] = {}
        self._reserved: dict[str, int] = {}
        """The bytes of exports that run."""
        self._removing_bytes = 0
        self._making_room = asyncio.Lock()
        self._places = asyncio.Semaphore(MAX_EXPORTS)
        self._lock = _lock(self._root)
        for left in self._root.iterdir():
            if _OWN.match(left.name):
                shutil.rmtree(left)

    @property
    def used_bytes(self) -> int:
        complete = sum(folder.num_bytes for folder in self._folders.values())
        return complete + sum(self._reserved.values()) + self._removing_bytes

    def path_of(self, digest: str) -> Path:
        """Returns the path of an adapter's folder, which may not be there."""
        return self._root / digest.removeprefix("sha256:")

    def has_path(self, path: str) -> bool:
        """Returns whether a path is of a folder of an adapter, now or before."""
        return Path(path).parent == self._root

    async def take(self, digest: str) -> Path:
        """Returns the folder of an adapter's plain LoRA, and holds it. Callers of one digest share
        its export.

        Raises NotFound, FailedPrecondition for an adapter that is more than a plain LoRA,
        ResourceExhausted if it does not fit beside the held ones, and as the client.
        """
        self._holders[digest] += 1
        try:
            folder = self._folders.get(digest)
            if folder is None:
                export = self._exports.get(digest)
                if export is None:
                    export = asyncio.create_task(self._export(digest))
                    self._exports[digest] = export
                    export.add_done_callback(lambda _: self._exports.pop(digest, None))
                folder = await asyncio.shield(export)
            return folder.path
        except BaseException:
            self.release(digest)
            raise

    def release(self, digest: str) -> None:
        """Ends one hold."""
        self._holders[digest] -= 1
        if self._holders[digest] <= 0:
            del self._holders[digest]
            if digest in self._folders:
                self._folders[digest].released_s = time.monotonic()

    async def close(self) -> None:
        """Ends exports, and lets other processes use the root. The folders stay."""
        exports = list(self._exports.values())
        for export in exports:
            export.cancel()
        await asyncio.gather(*exports, return_exceptions=True)
        os.close(self._lock)

    async def _export(self, digest: str) -> _Folder:
        loop = asyncio.get_running_loop()

        def admit(num_bytes: int) -> None:
            """Waits for room, in the thread that writes the files."""
            asyncio.run_coroutine_threadsafe(self._reserve(digest, num_bytes), loop).result()

        async with self._places:
            path = self.path_of(digest)
            start_s = time.monotonic()
            try:
                await self._client.export(digest, path, admit=admit, timeout_s=EXPORT_SECONDS)
            finally:
                num_bytes = self._reserved.pop(digest, 0)
            folder = self._folders[digest] = _Folder(path, num_bytes, time.monotonic())
            seconds = round(time.monotonic() - start_s, 3)
            logger.info("adapter %s: %d bytes in %s s", digest, num_bytes, seconds)
            return folder

    async def _reserve(self, digest: str, num_bytes: int) -> None:
        """Takes the bytes of an export. Removes folders that nobody holds, if it needs theirs.
        Raises ResourceExhausted."""
        async with self._making_room:
            before_s = time.monotonic() - GRACE_SECONDS
            longest_unused = sorted(self._folders, key=lambda each: self._folders[each].released_s)
            for unused in longest_unused:
                if self.used_bytes + num_bytes <= self._max_bytes:
                    break
                # Only now: somebody may have used it while others were removed.
                if not self._holders[unused] and self._folders[unused].released_s <= before_s:
                    await self._remove(unused)
            if self.used_bytes + num_bytes > self._max_bytes:
                raise ResourceExhausted(
                    f"{num_bytes} bytes do not fit beside the adapters in use: {self.used_bytes} "
                    f"of {self._max_bytes} bytes (LOADOUT_CACHE_BYTES) are taken",
                    subject="LOADOUT_CACHE_BYTES",
                )
            export = self._exports.get(digest)
            if export is not None and not export.done():  # else nobody would give the bytes back
                self._reserved[digest] = num_bytes

    async def _remove(self, digest: str) -> None:
        """Removes a folder, whose bytes count until the disk has them back. One that cannot be
        removed stays, with a warning: another adapter's export does not fail for it."""
        folder = self._folders[digest]
        away = folder.path.with_name(f".{folder.path.name}.{secrets.token_hex(8)}.removed")
        try:
            folder.path.rename(away)  # at once: the next export of this digest makes it anew
        except FileNotFoundError:  # somebody else has removed it
            del self._folders[digest]
            return
        except OSError as error:
            logger.warning("the folder of adapter %s stays: %s", digest, error)
            return
        del self._folders[digest]
        self._removing_bytes = folder.num_bytes
        try:
            await asyncio.to_thread(shutil.rmtree, away, ignore_errors=True)
        finally:
            self._removing_bytes = 0


def _lock(root: Path) -> int:
    """Returns the descriptor of the root's lock."""
    root.mkdir(parents=True, exist_ok=True)
    file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise FailedPrecondition(f"another process uses {root}", subject="LOADOUT_CACHE") from None
    return file


def is_named_by(ref: str, event: types.AdapterEvent) -> bool:
    """Returns whether a reference may mean the adapter of an event: a name without a tenant is of
    any."""
    if ref.startswith("sha256:"):
        return ref == event.digest
    name = ref.partition("@")[0]
    return name == event.name or ("/" not in name and name == event.name.rpartition("/")[2])
