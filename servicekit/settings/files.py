"""Files that settings name and that may change while the service runs: the contents in force, and
how changes are taken over."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypeAlias

Contents: TypeAlias = tuple[bytes, ...]


class ReloadableFiles(ABC):
    """Files that are taken over together, or not at all. `setting` names them in the log.

    `take_over` may be called from any thread, by one at a time.
    """

    def __init__(self, setting: str, *paths: Path) -> None:
        """Raises as `reload`."""
        self.setting = setting
        self._paths = paths
        self.contents: Contents = ()
        """The contents in force."""
        self.reload()

    @property
    def can_be_watched(self) -> bool:
        """Whether there are files, and reading them again is free of effects: a pipe, as a shell's
        <(...) gives, is empty the second time."""
        return bool(self._paths) and all(path.is_file() for path in self._paths)

    def read(self) -> Contents:
        """Raises OSError."""
        return tuple(path.read_bytes() for path in self._paths)

    def take_over(self, contents: Contents) -> None:
        """Puts contents into force. Raises InvalidSetting; the old ones stay."""
        self._use(contents)
        self.contents = contents

    def reload(self) -> None:
        """Takes over the files as they are now. Raises InvalidSetting, and OSError for a file that
        cannot be read; the old ones stay."""
        self.take_over(self.read())

    @abstractmethod
    def _use(self, contents: Contents) -> None:
        """Called with the contents to use. Raises InvalidSetting without a change."""


class Sight(enum.Enum):
    """The result of a look: contents equal those in force; other contents, which may be half
    written; or new contents that were taken over."""

    SAME = enum.auto()
    UNSETTLED = enum.auto()
    TAKEN_OVER = enum.auto()


class FileWatch:
    """Looks whether files have changed, and takes over contents that it has found at two looks in a
    row.

    A file that is being written is different at each look, an empty or a valid first half included.
    Only contents count: on some file systems dates and inodes stay while contents change, or change
    while contents stay.
    """

    def __init__(self, files: ReloadableFiles) -> None:
        self.files = files
        self._last: tuple[Contents, str] | None = None

    def look(self) -> Sight:
        """Blocks, in any thread. Raises InvalidSetting or OSError, at every look, as long as the
        files hold contents that cannot be taken over."""
        found: Contents = ()
        error: OSError | None = None
        try:
            found = self.files.read()
        except OSError as caught:
            error = caught
        seen = (found, str(error))
        is_settled, self._last = seen == self._last, seen
        if error is None and found == self.files.contents:
            return Sight.SAME
        if not is_settled:
            return Sight.UNSETTLED
        if error is not None:
            raise error
        self.files.take_over(found)
        return Sight.TAKEN_OVER
