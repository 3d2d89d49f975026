"""Results over HTTP: the fields that ask for them, and the parts of an answer as JSON.

A new kind of result has its field in `ResultFields`, its option in `to_wanted` and its form in
FORMS.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, Field

from inference_svc.api.http.sse import to_json
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import Option, ResultPart, Scope, Wanted, grouped, of_kind
from inference_svc.results.logprobs import (
    MAX_LOGPROBS,
    LogprobsMode,
    PackedLogprobs,
    TokenLogprobs,
)
from inference_svc.results.routed_experts import ExpertsOption, RoutedExperts, joined_experts
from inference_svc.results.scores import Scores, ScoresOption, logprobs_options, split_scores

SLICE_TOKENS, SLICE_SCORES_BYTES, SLICE_ROUTED_BYTES = 32, 4 << 10, 256 << 10
"""Tokens with logprobs, bytes of packed ones, and bytes of experts, that are formatted before other
requests may run."""
FEW_LOGPROBS = 21
"""Logprobs of a token for which a slice has SLICE_TOKENS tokens; with more logprobs it has
fewer."""


class ResultFields(BaseModel):
    """Fields of a body that ask for results, by vLLM's names; null means absent."""

    return_routed_experts: bool | None = None


class LogprobsFields(BaseModel):
    """Fields about log probabilities, among the ones about sampling. Each route has its own field
    for the most likely tokens."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None


def to_wanted(
    fields: ResultFields,
    logprobs_fields: LogprobsFields,
    top_k: int | None,
    default_mode: LogprobsMode,
    path: str,
    *,
    echo: bool,
) -> Wanted:
    """Returns all results that a body asks for; `top_k` is of its logprobs. Raises InvalidArgument
    naming the field; the ones about sampling are prefixed by `path`."""
    mode = logprobs_fields.logprobs_mode
    prompt_top_k = logprobs_fields.prompt_logprobs
    options: list[Option] = [
        *logprobs_options(
            top_k, prompt_top_k, LogprobsMode(mode) if mode else default_mode, path, echo=echo
        )
    ]
    if fields.return_routed_experts:
        options.append(ExpertsOption())
    return Wanted(tuple(options))


# --- the forms of parts -------------------------------------------------------------------------


class LogprobsFormatter(Protocol):
    """The words of a route for log probabilities. A choice's are lists by name with an entry for
    each token, and the `logprob_constants`."""

    logprob_constants: Mapping[str, None]
    scores_in_choice: bool
    """Whether log probabilities of a prompt are part of its first choice, not of the response."""

    def prompt_logprobs(self, scores: PackedLogprobs) -> list[dict[str, Any]]:
        """Returns an entry for each token of the prompt."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]: ...


P = TypeVar("P", bound=ResultPart)


class Form(Generic[P]):
    """One kind of result: how deltas are cut, its members of an event, and its part of one choice
    of a full answer, encoded while it comes. `is_in_choice`: it is a member of the choice, not of
    the answer."""

    kind: ClassVar[type[ResultPart]]
    is_in_choice = True

    def __init__(self, formatter: LogprobsFormatter, wanted: Wanted) -> None:
        """`wanted` are the results that the choice's request asks for."""

    @staticmethod
    def share(part: P) -> float:
        """Returns the part's share of a slice."""
        raise NotImplementedError

    @staticmethod
    def slice_tokens(part: P) -> int:
        """Returns how many tokens with such parts a slice has; for the scope TOKEN."""
        raise NotImplementedError

    @staticmethod
    def split(parts: list[P]) -> Iterator[P]:
        """Yields the parts joined and cut to a slice each; for other scopes than TOKEN."""
        raise NotImplementedError

    @staticmethod
    def event(parts: list[P]) -> dict[str, Any]:
        """Returns members of a choice's event."""
        return {}

    def add(self, parts: list[P]) -> int:
        """Returns about how many bytes the parts add to the answer."""
        raise NotImplementedError

    def member(self) -> bytes:
        """Returns the member with all that was added, after a comma; b"" if there is none."""
        raise NotImplementedError


class LogprobsForm(Form[TokenLogprobs]):
    """A choice always has the member. The formatter has its place in events."""

    kind = TokenLogprobs

    def __init__(self, formatter: LogprobsFormatter, wanted: Wanted) -> None:
        self._formatter = formatter
        self._texts: dict[str, list[bytes]] = {}

    @staticmethod
    def share(part: TokenLogprobs) -> float:
        return 1 / _slice_tokens(part.num_top)

    @staticmethod
    def slice_tokens(part: TokenLogprobs) -> int:
        return _slice_tokens(part.num_top)

    def add(self, parts: list[TokenLogprobs]) -> int:
        num_bytes = 0
        for name, entries in self._formatter.logprobs(parts).items():
            encoded = to_json(entries)[1:-1].encode()
            self._texts.setdefault(name, []).append(encoded)
            num_bytes += len(encoded)
        return num_bytes

    def member(self) -> bytes:
        if not self._texts:
            return b',"logprobs":null'
        lists = [
            b'"%s":[%s]' % (name.encode(), b",".join(entries))
            for name, entries in self._texts.items()
        ]
        lists += [b'"%s":null' % name.encode() for name in self._formatter.logprob_constants]
        return b',"logprobs":{%s}' % b",".join(lists)


class ExpertsForm(Form[RoutedExperts]):
    """The experts of neighbouring tokens as base64: a remainder of less than three bytes waits for
    more."""

    kind = RoutedExperts

    def __init__(self, formatter: LogprobsFormatter, wanted: Wanted) -> None:
        self._first: RoutedExperts | None = None
        self._num_tokens = 0
        self._encoded: list[bytes] = []
        self._rest = b""

    @staticmethod
    def share(part: RoutedExperts) -> float:
        return len(part.experts) / SLICE_ROUTED_BYTES

    @staticmethod
    def split(parts: list[RoutedExperts]) -> Iterator[RoutedExperts]:
        return joined_experts(parts, SLICE_ROUTED_BYTES)

    @staticmethod
    def event(parts: list[RoutedExperts]) -> dict[str, Any]:
        [part] = parts
        head = _experts_head(part, part.num_tokens)
        return {"routed_experts": {**head, "data": b64encode(part.experts).decode()}}

    def add(self, parts: list[RoutedExperts]) -> int:
        num_bytes = 0
        for part in parts:
            self._first = self._first or part
            data = self._rest + part.experts
            whole = len(data) - len(data) % 3
            encoded, self._rest = b64encode(data[:whole]), data[whole:]
            self._encoded.append(encoded)
            self._num_tokens += part.num_tokens
            num_bytes += len(encoded)
        return num_bytes

    def member(self) -> bytes:
        if self._first is None:
            return b""
        head = to_json(_experts_head(self._first, self._num_tokens)).encode()[:-1]
        data = b"".join((*self._encoded, b64encode(self._rest)))
        return b',"routed_experts":%s,"data":"%s"}' % (head, data)


def _experts_head(first: RoutedExperts, num_tokens: int) -> dict[str, Any]:
    """Returns the fields that describe how to read the experts of so many tokens."""
    return {
        "first_position": first.first_position,
        "shape": [num_tokens, first.num_layers, first.num_chosen],
        "dtype": f"uint{8 * first.bytes_per_id}",
    }


class ScoresForm(Form[Scores]):
    """The prompt's first token has no log probability. Not in events: they are refused."""

    kind = Scores

    def __init__(self, formatter: LogprobsFormatter, wanted: Wanted) -> None:
        self._formatter = formatter
        self.is_in_choice = formatter.scores_in_choice
        option = wanted.get(ScoresOption)
        self._texts = [] if option is None or option.is_of_echo else [b"null"]

    @staticmethod
    def share(part: Scores) -> float:
        return part.num_tokens * part.token_bytes / SLICE_SCORES_BYTES

    @staticmethod
    def split(parts: list[Scores]) -> Iterator[Scores]:
        return split_scores(parts, SLICE_SCORES_BYTES)

    def add(self, parts: list[Scores]) -> int:
        num_bytes = 0
        for part in parts if self._texts else ():
            encoded = to_json(self._formatter.prompt_logprobs(part))[1:-1].encode()
            self._texts.append(encoded)
            num_bytes += len(encoded)
        return num_bytes

    def member(self) -> bytes:
        return b',"prompt_logprobs":[%s]' % b",".join(self._texts) if self._texts else b""


FORMS: dict[type[ResultPart], type[Form[Any]]] = {
    form.kind: form for form in (LogprobsForm, ExpertsForm, ScoresForm)
}
"""In the order of a choice's members."""


# --- slices -------------------------------------------------------------------------------------


def share(delta: Delta) -> float:
    """Returns the share of a slice that formatting the parts of a delta takes."""
    return sum(FORMS[type(part)].share(part) for part in delta.parts)


def slices(delta: Delta, echoed_top_k: int | None = None) -> Iterator[Delta]:
    """Splits a delta by its parts, which take long to format: data that a slow reader has not read
    grows without a bound. The text is in the last slice. A slice has tokens' parts of the same
    tokens, and at most one part of each other kind. With `echoed_top_k` the logprobs begin with the
    echoed prompt's, as many for each token; the first token's are not a number."""
    if echoed_top_k is not None:
        yield from _echo_slices(delta, echoed_top_k)
        first = [TokenLogprobs(token_id, math.nan) for token_id in delta.echoed_ids[:1]]
        others = [part for part in delta.parts if not isinstance(part, Scores)]
        delta = replace(delta, parts=[*first, *others])
    groups = grouped(delta.parts)
    of_tokens = [group for group in groups.values() if group[0].scope is Scope.TOKEN]
    rest: list[ResultPart] = []
    for kind, group in groups.items():
        if group[0].scope is Scope.TOKEN:
            continue
        previous: ResultPart | None = None
        for part in FORMS[kind].split(group):
            if previous is not None:
                yield Delta(parts=[previous], version=delta.version)
            previous = part
        if previous is not None:
            rest.append(previous)
    sizes = (FORMS[type(group[0])].slice_tokens(group[0]) for group in of_tokens)
    size = min(sizes, default=SLICE_TOKENS)
    num_tokens = max(map(len, of_tokens), default=0)
    last = max(num_tokens - 1, 0) // size * size
    for start in range(0, last, size):
        end = start + size
        parts = [part for group in of_tokens for part in group[start:end]]
        yield Delta(delta.token_ids[start:end], parts=parts, version=delta.version)
    parts = rest + [part for group in of_tokens for part in group[last:]]
    yield replace(delta, token_ids=delta.token_ids[last:], parts=parts)


def _slice_tokens(num_top: int) -> int:
    """Returns how many tokens a slice has: fewer if each has many logprobs."""
    return max(1, min(SLICE_TOKENS, SLICE_TOKENS * FEW_LOGPROBS // (1 + num_top)))


def _echo_slices(delta: Delta, top_k: int) -> Iterator[Delta]:
    """Yields the log probabilities of an echoed prompt in the form of generated tokens', slice by
    slice: objects of all that is not read yet would block the event loop. The slices have them as
    arrays, too."""
    for piece in of_kind(delta.parts, Scores):
        size = _slice_tokens(piece.top_k)
        for start in range(0, piece.num_tokens, size):
            part = piece.slice(start, start + size)
            echoed = [
                TokenLogprobs.of(token_id, logprob, ids[:top_k], values[:top_k])
                for token_id, logprob, ids, values in zip(
                    part.token_ids.tolist(),
                    part.logprobs.tolist(),
                    part.top_ids,
                    part.top_logprobs,
                    strict=True,
                )
            ]
            yield Delta(parts=[*echoed, part], version=delta.version)
