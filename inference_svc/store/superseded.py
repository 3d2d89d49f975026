"""Which contents no name points to any more, among the contents that names used here pointed to:
the first to leave memory, and shown as old."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

MAX_SUPERSEDED = 4096
"""Contents, and names, that are remembered; the longest superseded is dropped first."""


@dataclass(frozen=True, slots=True)
class Version:
    """The target of a name: "tenant/name@version" and the digest."""

    label: str
    digest: str


class SupersededVersions:
    """Contents that a name pointed to when it was used here, or later, and that nothing has used
    since it moved.

    `on_change` is called with a digest, and whether it is superseded now.
    """

    def __init__(self, on_change: Callable[[str, bool], None]) -> None:
        self._on_change = on_change
        self._labels: OrderedDict[str, str] = OrderedDict()
        self._moved: OrderedDict[str, Version] = OrderedDict()
        self._moved_to: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def label(self, digest: str) -> str:
        """Returns "tenant/name@version" of a superseded content, "" of any other."""
        return self._labels.get(digest, "")

    def moved_to(self, digest: str) -> list[str]:
        """Returns "tenant/name@version" of the names that point to a content since they moved."""
        return list(self._moved_to.get(digest, ()))

    def previous(self, name: str) -> Version | None:
        """Returns the former target of a name that has moved since it was last used, if it was."""
        return self._moved.get(name)

    def move(self, name: str, old: Version, new: Version | None, *, is_used: bool) -> None:
        """Records that a name in use here moved, or was deleted: its old content is superseded
        unless something else uses it (`is_used`), and its new one is not."""
        self._forget_move(name)
        if new is not None:
            self._moved[name] = new
            self._moved_to[new.digest][new.label] = None
            self.use(new.digest)
            if len(self._moved) > MAX_SUPERSEDED:
                self._forget_move(next(iter(self._moved)))
        if (new is None or new.digest != old.digest) and not is_used:
            self._supersede(old)

    def use(self, digest: str) -> None:
        """Records that a reference to this content was resolved: it is not superseded then."""
        if self._labels.pop(digest, None) is not None:
            self._on_change(digest, False)

    def _forget_move(self, name: str) -> None:
        version = self._moved.pop(name, None)
        if version is None:
            return
        del self._moved_to[version.digest][version.label]
        if not self._moved_to[version.digest]:
            del self._moved_to[version.digest]

    def _supersede(self, old: Version) -> None:
        if old.digest not in self._labels:
            self._on_change(old.digest, True)
        self._labels[old.digest] = old.label
        if len(self._labels) > MAX_SUPERSEDED:
            self.use(next(iter(self._labels)))
