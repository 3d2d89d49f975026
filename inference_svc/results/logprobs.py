"""Log probabilities of generated tokens, and of the most likely tokens at their positions."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_svc.results.base import Option, Scope, Work
from servicekit.errors import InvalidArgument

MAX_LOGPROBS = 1024
"""Most likely tokens at a position."""
OBJECT_BYTES = 320
"""The approximate memory of a token's log probabilities, in addition to their arrays."""


class LogprobsMode(enum.Enum):
    """The distribution of the log probabilities of generated tokens: the model's own, or the one
    from which tokens were drawn, after penalties, temperature and cuts."""

    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


@dataclass(frozen=True, slots=True)
class LogprobsOption(Option):
    """`top_k` most likely tokens, besides each token's own. `is_packed`: as arrays."""

    scope: ClassVar[Scope] = Scope.TOKEN

    top_k: int
    mode: LogprobsMode = LogprobsMode.RAW
    is_packed: bool = False

    def work(self, *, is_cut: bool) -> Work:
        is_processed = self.mode is LogprobsMode.PROCESSED
        return Work(1 + is_processed, int(is_processed and is_cut), self.top_k)

    def num_logprobs(self, num_tokens: int) -> int:
        return num_tokens * (1 + self.top_k)


def checked_top_k(top_k: int, field: str) -> int:
    """Raises InvalidArgument naming the field."""
    if not 0 <= top_k <= MAX_LOGPROBS:
        raise InvalidArgument(f"{field} must be at most {MAX_LOGPROBS}", subject=field)
    return top_k


class TokenLogprobs(NamedTuple):
    """The log probability of the chosen token, the token's rank, and the most likely tokens; see
    PackedLogprobs. There may be a thousand of these for every token: they are the bytes of arrays,
    int32 and fp32, until a transport needs objects.

    A tuple, as Output is.
    """

    token_id: int
    logprob: float
    rank: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @classmethod
    def of(
        cls,
        token_id: int,
        logprob: float,
        top_ids: ArrayLike = (),
        top_logprobs: ArrayLike = (),
        rank: int = 0,
    ) -> TokenLogprobs:
        """Copies [num_top] token ids and their log probabilities, most likely first."""
        ids, values = np.asarray(top_ids, np.int32), np.asarray(top_logprobs, np.float32)
        return cls(token_id, logprob, rank, ids.tobytes(), values.tobytes())

    @property
    def scope(self) -> Scope:
        return Scope.TOKEN

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.top_ids) + len(self.top_logprobs)

    @property
    def num_top(self) -> int:
        return len(self.top_ids) // 4

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely (token id, log probability)s: made each time."""
        ids, values = memoryview(self.top_ids), memoryview(self.top_logprobs)
        return list(zip(ids.cast("i"), values.cast("f"), strict=True))


class PackedLogprobs(NamedTuple):
    """Log probabilities of N neighbouring tokens: of each token itself, and of the `top_k` most
    likely ones at its position, most likely first. Positions of a prompt count from its first
    token, an output's from its first.

    A token's rank is the number of tokens that are at least as likely: 1 is the most likely one.
    """

    first_position: int
    token_ids: NDArray[np.int32]
    """[N]"""
    logprobs: NDArray[np.float32]
    """[N]"""
    ranks: NDArray[np.int32]
    """[N]"""
    top_ids: NDArray[np.int32]
    """[N, top_k]"""
    top_logprobs: NDArray[np.float32]
    """[N, top_k]"""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def top_k(self) -> int:
        return self.top_ids.shape[1]

    @property
    def token_bytes(self) -> int:
        """The bytes of a token."""
        return packed_token_bytes(self.top_k)

    def slice(self, start: int, end: int) -> Self:
        return self._replace(
            first_position=self.first_position + start,
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            ranks=self.ranks[start:end],
            top_ids=self.top_ids[start:end],
            top_logprobs=self.top_logprobs[start:end],
        )


def packed_token_bytes(top_k: int) -> int:
    """Returns the bytes of a token of PackedLogprobs."""
    return 12 + 8 * top_k


def packed_logprobs(tokens: Sequence[TokenLogprobs], first_position: int) -> PackedLogprobs:
    """Joins neighbouring generated tokens, at least one, as arrays."""
    top_ids = b"".join([token.top_ids for token in tokens])
    top_logprobs = b"".join([token.top_logprobs for token in tokens])
    shape = len(tokens), tokens[0].num_top
    return PackedLogprobs(
        first_position,
        token_ids=np.array([token.token_id for token in tokens], np.int32),
        logprobs=np.array([token.logprob for token in tokens], np.float32),
        ranks=np.array([token.rank for token in tokens], np.int32),
        top_ids=np.frombuffer(top_ids, np.int32).reshape(shape),
        top_logprobs=np.frombuffer(top_logprobs, np.float32).reshape(shape),
    )
