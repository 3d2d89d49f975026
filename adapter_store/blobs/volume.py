"""The file system of the data folder, and a reserve on it for the work that frees space once it is
full.

    reserve/<n>    files that hold space, and nothing else

A deletion has to be recorded before its space is free, and a start writes, too. Where these find
too little space they are given the reserve, file by file, and then images of the disk tier, which
can be compiled again. Until the reserve is whole again, every addition to the volume is refused. A
file system that lets nobody hold space has no reserve, and is used without.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from adapter_store.blobs.fsync import make_folder
from adapter_store.errors import disk_full

logger = logging.getLogger(__name__)

RESERVE_BYTES = 32 << 20
MAX_SHARE = 8
"""The reserve takes an eighth of a small volume."""
NUM_PIECES = 32
SMALL_PIECES, LARGE_PIECES = 2, 8
"""How many pieces of the reserve a change of a few rows of the catalog may take, or of a thousand.
Few, since another program may take the space that is given up."""
MIN_INODES = 4
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Volume:
    """Thread-safe. `evict` removes about as many bytes of files that can be made again."""

    def __init__(self, folder: Path, evict: Callable[[int], object]) -> None:
        self.folder = folder
        """The data folder."""
        self._evict = evict
        self._lock = threading.Lock()
        self._is_reported = self._lacks_reserve = False
        found = os.statvfs(folder)
        reserve_bytes = min(RESERVE_BYTES, found.f_blocks * found.f_frsize // MAX_SHARE)
        self._piece_bytes = reserve_bytes // NUM_PIECES
        self._pieces = {path for path in self._paths() if self._holds_space(path)}

    def make_room(self, *, is_large: bool = False) -> None:
        """Sees to it that a change of the catalog finds space: call it before. The change fails if
        there is nothing left to give up."""
        num_bytes = (LARGE_PIECES if is_large else SMALL_PIECES) * self._piece_bytes
        if self._is_free(num_bytes):
            return
        with self._lock:
            while self._pieces and not self._is_free(num_bytes):
                self._give_up(max(self._pieces))
            if not self._is_free(num_bytes):
                self._evict(num_bytes)

    def restore(self) -> bool:
        """Makes the reserve whole again, once there is more space than it takes. Returns False if
        the volume is too full for it; True without a reserve, where the file system refuses one."""
        if len(self._pieces) == NUM_PIECES:
            return True
        with self._lock:
            missing = [path for path in self._paths() if path not in self._pieces]
            if not self._is_free((len(missing) + 2 * LARGE_PIECES) * self._piece_bytes):
                return False
            try:
                for path in missing:
                    self._allocate(path)
            except OSError as error:
                if error.errno in _FULL:
                    logger.warning("the volume's reserve is not whole", extra={"why": str(error)})
                    return False
                self._report_lack(error)
                return True
            self._lacks_reserve = False
            if self._is_reported:
                logger.info("the volume has space again", extra={"folder": str(self.folder)})
            self._is_reported = False
        return True

    def has_space(self, num_bytes: int = 0) -> bool:
        """Returns whether so many bytes can be added to the volume."""
        return self.restore() and self._is_free(num_bytes + LARGE_PIECES * self._piece_bytes)

    def check_space(self, num_bytes: int) -> None:
        """Raises DiskFull unless so many bytes can be added to the volume."""
        if not self.has_space(num_bytes):
            raise disk_full()

    def _paths(self) -> list[Path]:
        return [self.folder / "reserve" / str(number) for number in range(NUM_PIECES)]

    def _is_free(self, num_bytes: int) -> bool:
        """Returns whether so many bytes are free, and inodes for some files."""
        found = os.statvfs(self.folder)
        if not found.f_blocks:  # the file system does not tell
            return True
        has_inodes = not found.f_files or found.f_favail >= MIN_INODES
        return has_inodes and found.f_bavail * found.f_frsize >= num_bytes

    def _holds_space(self, piece: Path) -> bool:
        """Returns whether a piece is there; a copy of one may be sparse."""
        return piece.exists() and piece.stat().st_blocks * 512 >= self._piece_bytes

    def _give_up(self, piece: Path) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.error(
                "the volume is full: registrations are refused until it has space again",
                extra={"folder": str(self.folder)},
            )
        piece.unlink(missing_ok=True)
        self._pieces.discard(piece)

    def _report_lack(self, error: OSError) -> None:
        """Logs once that there is no reserve. The next call tries again: files may have run out."""
        if not self._lacks_reserve:
            self._lacks_reserve = True
            logger.warning(
                "the volume has no reserve: once it is full, deletions may find no space",
                extra={"folder": str(self.folder), "why": str(error)},
            )

    def _allocate(self, piece: Path) -> None:
        """Makes a file that holds its space, or none."""
        make_folder(piece.parent)
        try:
            with open(piece, "wb") as file:
                self._hold(file)
        except BaseException:
            piece.unlink(missing_ok=True)
            raise
        self._pieces.add(piece)

    def _hold(self, file: BinaryIO) -> None:
        """Takes space for an empty piece. Network and FUSE file systems may not allocate any that
        is not written, each with an error of its own."""
        try:
            os.posix_fallocate(file.fileno(), 0, self._piece_bytes)
        except OSError as error:
            if error.errno in _FULL:
                raise
            file.write(bytes(self._piece_bytes))
            file.flush()
            os.fsync(file.fileno())  # a full one may tell no earlier


@contextmanager
def reporting_full() -> Iterator[None]:
    """Raises DiskFull in place of the operating system's error for a full volume."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise disk_full() from exc
        raise
