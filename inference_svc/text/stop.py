"""Matches stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete, and holds back text that may become one.

    The match is the string that completes first; of several that complete with the same character,
    the longest. It does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is not empty"
        self._stops = tuple(dict.fromkeys(stops))
        self._max_held = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self.found = ""
        """The stop string that is complete."""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Adds text. Returns the text that may be shown, and whether a stop string is complete
        (then nothing follows).

        With `may_stop` false no match may end within `text`; one may still begin there.
        """
        if not self._stops or not text:
            return text, False
        window = self._held + text
        start = self._find(window, len(self._held)) if may_stop else -1
        if start >= 0:
            return window[:start], True
        shown = len(window) - self._num_to_hold(window)
        self._held = window[shown:]
        return window[:shown], False

    def flush(self) -> str:
        """Returns the text that is still held back; called once, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str, new_from: int) -> int:
        """Returns the start of the first match that ends behind `new_from`, or -1."""
        best_end, best_start = len(window) + 1, -1
        for stop in self._stops:
            start = window.find(stop, max(0, new_from - len(stop) + 1))
            if start >= 0 and (start + len(stop), start) < (best_end, best_start):
                best_end, best_start, self.found = start + len(stop), start, stop
        return best_start

    def _num_to_hold(self, window: str) -> int:
        """Returns the length of the longest suffix of `window` that is the beginning of a stop
        string: a match that completes later begins there, or in text to come."""
        for length in range(min(self._max_held, len(window)), 0, -1):
            end = window[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
