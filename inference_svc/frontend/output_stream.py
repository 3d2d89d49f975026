"""The text of one running request: tokens in, deltas out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from inference_svc.core import AdapterVersion, FinishReason, Request
from inference_svc.engine.transport.messages import Output, Timings, Usage
from inference_svc.results.base import ResultPart, Scope
from inference_svc.text.answers.scanner import CallPiece, Piece, Said
from inference_svc.text.detokenizer import Detokenizer, TokenDecoder
from inference_svc.text.stop import StopMatcher
from servicekit.errors import ShareExceeded
from servicekit.shares import Reservation

UNREAD_BYTES = 16 << 10
"""The least that an answer takes of its account's share, and the steps in which it grows."""
TOKEN_BYTES, DELTA_BYTES = 64, 512
"""The approximate memory of one, as objects."""


@dataclass(slots=True)
class Delta:
    """The output since the previous delta; finish reason, usage and timings are in the last one.
    `parts` of one kind are in the order of their tokens. `echoed_ids` are the prompt's tokens,
    whose text comes first. `version` has made all of its tokens; None: the version that the request
    began with. Of an answer that is read, `text` is without `thoughts` and `calls`, and `pieces`
    are all of these in order. `stop` is the stop string that has ended it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    parts: list[ResultPart] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    version: AdapterVersion | None = None
    echoed_ids: Sequence[int] = ()
    thoughts: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    pieces: Sequence[Piece] = ()
    stop: str = ""

    @property
    def in_order(self) -> Sequence[Piece]:
        """The pieces of its text, also of an answer that is given as it is."""
        return self.pieces or ([Said(self.text)] if self.text else ())


class Generation:
    """Detokenises, ends at stop strings, and keeps unread outputs as one delta for each version of
    the adapter. These and the delta before, which is being sent, take memory from `place`, which
    keeps its first reservation: if there is no more of it, the request ends with ShareExceeded.

    A stop string ends the request here, but the last delta waits for the engine's usage and
    timings, which follow the Cancel within a step. With `withholds_parts` the parts of a token come
    with its text, and never if that is part of the stop string.
    """

    def __init__(
        self,
        request: Request,
        decoder: TokenDecoder,
        place: Reservation,
        *,
        withholds_parts: bool = False,
    ) -> None:
        self._place = place
        self._least_bytes = place.amount
        self._unread_bytes = self._sending_bytes = 0
        self._earlier: deque[Delta] = deque()
        self._min_tokens = request.sampling.min_tokens
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        self._withholds_parts = withholds_parts
        self._withheld: deque[tuple[int, ResultPart]] = deque()
        """Parts of tokens, and where each token's text begins."""
        self._withheld_bytes = 0
        self._num_chars = self._num_shown = 0
        self._stop = StopMatcher(request.sampling.stop)
        self._num_tokens = 0
        self._stopped = False
        self._delta = Delta()
        self._error: Exception | None = None
        self._has_delta = asyncio.Event()

    async def next_delta(self) -> Delta:
        """Returns everything since the last call that one version has made; waits until there is
        something. Raises the error that ended the request."""
        await self._has_delta.wait()
        if self._error is not None:
            raise self._error
        if self._earlier:
            return self._earlier.popleft()
        self._has_delta.clear()
        delta, self._delta = self._delta, Delta(version=self._delta.version)
        self._sending_bytes = self._unread_bytes - self._withheld_bytes
        self._unread_bytes = self._withheld_bytes
        self._place.shrink(max(self._least_bytes, self._sending_bytes + self._unread_bytes))
        return delta

    def push(self, output: Output) -> bool:
        """Adds an output; returns True when a stop string is complete, or nothing more can be kept,
        so that the request is to be cancelled."""
        if self._error is not None:
            return False
        if output.error is not None:
            self.fail(output.error)
            return False
        was_stopped = self._stopped
        if (output.token_ids or output.parts) and not was_stopped:
            try:
                self._count(output)
            except ShareExceeded as error:
                self.fail(error)
                return True
            self._set_version(output)
            self._add_output(output)
            self._has_delta.set()
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason)
            self._has_delta.set()
        return self._stopped and not (was_stopped or output.is_last)

    def fail(self, error: Exception) -> None:
        """Ends the request: the next read raises."""
        self._error = error
        self._earlier.clear()
        self._delta = Delta()
        self._has_delta.set()

    def _set_version(self, output: Output) -> None:
        """Begins another delta where the next tokens are of another version."""
        if output.version != self._delta.version:
            if self._delta.token_ids or self._delta.parts:
                self._earlier.append(self._delta)
                self._delta = Delta()
            self._delta.version = output.version

    def _count(self, output: Output) -> None:
        """Takes the memory of an output. Raises ShareExceeded."""
        self._unread_bytes += TOKEN_BYTES * len(output.token_ids)
        if output.version != self._delta.version:
            self._unread_bytes += DELTA_BYTES
        for part in output.parts:
            self._unread_bytes += part.num_bytes
        missing = self._unread_bytes + self._sending_bytes - self._place.amount
        if missing > 0:
            self._place.grow(max(missing, UNREAD_BYTES))

    def _add_output(self, output: Output) -> None:
        """Adds the output's token, if it has one, and its parts."""
        delta = self._delta
        # The token that the engine stopped at is not part of the text.
        is_shown = output.finish_reason is not FinishReason.STOP
        is_after_held, text = self._detokenizer.holds_text, ""
        for token_id in output.token_ids:
            self._num_tokens += 1
            delta.token_ids.append(token_id)
            text = self._detokenizer.push(token_id) if is_shown else ""
        if self._withholds_parts:
            self._withhold(output, text, is_after_held=is_after_held)
        else:
            delta.parts += output.parts
        if output.token_ids and is_shown:
            self._add_text(text)

    def _withhold(self, output: Output, text: str, *, is_after_held: bool) -> None:
        """Adds the parts of an output, except for its token's: these wait for the token's text."""
        for part in output.parts:
            if part.scope is not Scope.TOKEN:
                self._delta.parts.append(part)
                continue
            [token_id] = output.token_ids
            start = self._start_of(token_id, text, is_after_held=is_after_held)
            self._withheld.append((start, part))
            self._withheld_bytes += part.num_bytes

    def _start_of(self, token_id: int, text: str, *, is_after_held: bool) -> int:
        """Returns where a token's text begins. With this token `text` is certain, and begins with
        the text of the tokens before it that was held back, if there is some."""
        if token_id not in self._decoder.visible_ids:  # it belongs to the text before it
            return self._num_chars - 1
        own = self._decoder.decode((token_id,)) if is_after_held and text else ""
        is_last = own != "" and text.endswith(own)
        return self._num_chars + (len(text) - len(own) if is_last else 0)

    def _add_text(self, text: str) -> None:
        """Adds text to the delta, up to a stop string."""
        may_stop = self._num_tokens >= self._min_tokens
        shown, self._stopped = self._stop.push(text, may_stop=may_stop)
        self._num_chars += len(text)
        self._show(shown)

    def _show(self, text: str) -> None:
        self._delta.text += text
        self._num_shown += len(text)
        while self._withheld and self._withheld[0][0] < self._num_shown:
            self._release_part()

    def _release_part(self) -> None:
        _, part = self._withheld.popleft()
        self._withheld_bytes -= part.num_bytes
        self._delta.parts.append(part)

    def _finish(self, output: Output, reason: FinishReason) -> None:
        delta = self._delta
        if not self._stopped:
            self._add_text(self._detokenizer.flush())
        if not self._stopped:
            self._show(self._stop.flush())
            while self._withheld:
                self._release_part()
        self._withheld.clear()
        self._withheld_bytes = 0
        delta.finish_reason = FinishReason.STOP if self._stopped else reason
        delta.stop = self._stop.found
        delta.timings = output.timings
        if output.usage is not None:
            delta.usage = replace(output.usage, completion_tokens=self._num_tokens)
