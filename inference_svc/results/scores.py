"""Log probabilities of a prompt's tokens, of the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from inference_svc.results.base import Option, Scope, Work
from inference_svc.results.logprobs import (
    LogprobsMode,
    LogprobsOption,
    PackedLogprobs,
    checked_top_k,
    packed_token_bytes,
)

OBJECT_BYTES = 1024
"""The approximate memory of a part, in addition to its numbers."""


@dataclass(frozen=True, slots=True)
class ScoresOption(Option):
    """`top_k` most likely tokens, besides each token's own. `is_of_echo`: the caller wants them as
    log probabilities of the echoed prompt alone."""

    scope: ClassVar[Scope] = Scope.PROMPT

    top_k: int
    is_of_echo: bool = False

    def work(self, *, is_cut: bool) -> Work:
        return Work(1, 0, self.top_k)

    def num_logprobs(self, num_tokens: int) -> int:
        return (1 + self.top_k) * (num_tokens - 1)

    def prompt_bytes(self, num_tokens: int) -> int:
        return OBJECT_BYTES + packed_token_bytes(self.top_k) * num_tokens


def logprobs_options(
    top_k: int | None,
    prompt_top_k: int | None,
    mode: LogprobsMode,
    path: str,
    *,
    echo: bool = False,
    is_packed: bool = False,
) -> tuple[Option, ...]:
    """Returns the options of log probabilities of generated tokens and of the prompt; None: none.
    With `echo` a prompt whose answer has log probabilities has as many. Raises InvalidArgument
    naming the field, prefixed by `path`."""
    options: list[Option] = []
    if top_k is not None:
        checked_top_k(top_k, f"{path}logprobs")
        options.append(LogprobsOption(top_k, mode, is_packed))
    if prompt_top_k is not None:
        options.append(ScoresOption(checked_top_k(prompt_top_k, f"{path}prompt_logprobs")))
    elif echo and top_k is not None:
        options.append(ScoresOption(top_k, is_of_echo=True))
    return tuple(options)


class Scores(PackedLogprobs):
    """Neighbouring tokens of a prompt. The first token of a prompt has no log probability."""

    __slots__ = ()

    @property
    def scope(self) -> Scope:
        return Scope.PROMPT

    @property
    def end(self) -> int:
        return self.first_position + self.num_tokens

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + self.num_tokens * self.token_bytes


def split_scores(parts: Iterable[Scores], max_bytes: int) -> Iterator[Scores]:
    """Yields parts of as many whole tokens as `max_bytes` hold, at least one."""
    for part in parts:
        size = max(1, max_bytes // part.token_bytes)
        for start in range(0, part.num_tokens, size):
            yield part.slice(start, start + size)
