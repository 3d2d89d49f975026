"""HTTP/1.1 without ambiguity: refuses bytes that two readers could take for different requests.

h11 takes a line feed for the end of a line, folds lines, reads the trailers of a chunked body the
same way, and lets Transfer-Encoding win over Content-Length, in HTTP/1.0, too. A proxy in front may
read the same bytes otherwise, and pass one caller's request inside another's.
"""

from __future__ import annotations

import re
from collections import Counter

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

_HEAD_END = re.compile(rb"\n\r?\n")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_FOLDED_LINE = re.compile(rb"\n[ \t]")
_END = b"\r\n"
_LENGTHS = frozenset((b"content-length", b"transfer-encoding"))


class StrictServer(h11.Connection):
    """A server's side of a connection. `next_event` raises RemoteProtocolError, too, for a request
    whose lines end in a mere line feed or are folded, that says its length twice, that has more
    than one Authorization, that is chunked as HTTP/1.0 cannot be, or whose chunked body has
    trailers."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns the next event. Raises RemoteProtocolError for bytes that h11 or this refuses."""
        if self.their_state is h11.IDLE:
            self._check_lines(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = Counter(name for name, _ in event.headers)
            _check_names(names)
            if b"transfer-encoding" in names:
                if event.http_version < b"1.1":
                    raise h11.RemoteProtocolError("a request of HTTP/1.0 has Transfer-Encoding")
                self._reader = _PlainChunks()
        return event

    @staticmethod
    def _check_lines(received: bytes) -> None:
        """Raises RemoteProtocolError for a head whose lines are not plain. Looks at it once all of
        it is there: faults that h11 finds before are its own errors."""
        end = _HEAD_END.search(received)
        if end is None:
            return
        head = received[: end.end()]
        if _BARE_LINE_FEED.search(head):
            raise h11.RemoteProtocolError("a line ends in a line feed without a carriage return")
        if _FOLDED_LINE.search(head):
            raise h11.RemoteProtocolError("a header continues in a second line")


class _PlainChunks(ChunkedReader):
    """Reads a chunked body that ends in an empty line after its last chunk. No client needs
    trailers; h11 would read theirs as leniently as a head, and nothing here would look at them.
    The lines before chunks are strict in h11."""

    def __call__(self, buf: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        if not self._reading_trailer:
            return super().__call__(buf)  # which comes here again after the last chunk
        end = bytes(buf)[: len(_END)]
        if not _END.startswith(end):
            raise h11.LocalProtocolError("a chunked body has trailers, or ends in a line feed")
        return super().__call__(buf) if end == _END else None


def _check_names(names: Counter[bytes]) -> None:
    """Raises RemoteProtocolError for a head that says its length twice, or has two tokens: which of
    them counts is each reader's own choice."""
    if names.keys() >= _LENGTHS:
        raise h11.RemoteProtocolError("a request has Content-Length and Transfer-Encoding")
    if names[b"authorization"] > 1:
        raise h11.RemoteProtocolError("a request has more than one Authorization")
