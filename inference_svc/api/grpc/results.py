"""Results as protobuf messages: the options of a request, and the parts of an answer.

A new kind of result has its option in `from_request` and its form in FORMS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from inference_svc.results.base import Option, ResultPart, Wanted
from inference_svc.results.logprobs import (
    LogprobsMode,
    LogprobsOption,
    PackedLogprobs,
    TokenLogprobs,
    packed_logprobs,
    packed_token_bytes,
)
from inference_svc.results.routed_experts import (
    ExpertLayers,
    ExpertsOption,
    RoutedExperts,
    joined_experts,
)
from inference_svc.results.scores import Scores, logprobs_options, split_scores
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument

MAX_OBJECT_LOGPROBS = 20
"""Most likely tokens at a position, as messages of their own."""
MAX_ARRAY_BYTES = 1 << 20
"""How much of experts, or of log probabilities, a response has at most, unless a token has more."""

_LOGPROBS_MODES = {
    pb.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}

Fields = dict[str, Any]
"""Fields of a response."""


def from_request(request: pb.GenerateRequest, default_mode: LogprobsMode) -> Wanted:
    """Returns all results that a request asks for. Raises InvalidArgument, naming the field."""
    options: list[Option] = [*_logprobs_options(request, default_mode)]
    if request.return_routed_experts:
        options.append(ExpertsOption())
    return Wanted(tuple(options))


def _logprobs_options(
    request: pb.GenerateRequest, default_mode: LogprobsMode
) -> tuple[Option, ...]:
    sampling = request.sampling
    mode = sampling.logprobs_mode
    if mode and mode not in _LOGPROBS_MODES:
        raise InvalidArgument(
            "sampling.logprobs_mode must be RAW or PROCESSED", subject="sampling.logprobs_mode"
        )
    options = logprobs_options(
        sampling.logprobs if sampling.HasField("logprobs") else None,
        sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        _LOGPROBS_MODES.get(mode, default_mode),
        "sampling.",
        echo=request.echo,
        is_packed=request.packed_logprobs,
    )
    if not request.packed_logprobs and sampling.logprobs > MAX_OBJECT_LOGPROBS:
        raise InvalidArgument(
            f"sampling.logprobs must be at most {MAX_OBJECT_LOGPROBS} without packed_logprobs",
            subject="sampling.logprobs",
        )
    return options


def to_logprobs_mode(mode: LogprobsMode) -> pb.LogprobsMode:
    return next(number for number, each in _LOGPROBS_MODES.items() if each is mode)


def to_expert_layers(experts: ExpertLayers | None) -> pb.ExpertLayers | None:
    return None if experts is None else pb.ExpertLayers(**experts._asdict())


# --- parts --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The answer that parts belong to: its options, and its number of tokens so far."""

    wanted: Wanted
    num_tokens: int


class Form(NamedTuple):
    """The form of one kind of part. `arrays` yields fields that a response has one by one, since
    each is large; `fields` returns the ones that the last response of a delta has."""

    arrays: Callable[[list[Any], Place], Iterator[Fields]] = lambda parts, place: iter(())
    fields: Callable[[list[Any], Place], Fields] = lambda parts, place: {}


Groups = Mapping[type[ResultPart], list[Any]]
"""The parts of a delta, by kind."""


def arrays(groups: Groups, place: Place) -> Iterator[Fields]:
    """Yields fields of responses, at most MAX_ARRAY_BYTES in each."""
    for kind, form in FORMS.items():
        if kind in groups:
            yield from form.arrays(groups[kind], place)


def fields(groups: Groups, place: Place) -> Fields:
    """Returns the fields of the last response of a delta, in addition to the last array."""
    found: Fields = {}
    for kind, group in groups.items():
        found |= FORMS[kind].fields(group, place)
    return found


def _scores_arrays(parts: list[Scores], place: Place) -> Iterator[Fields]:
    for scores in split_scores(parts, MAX_ARRAY_BYTES):
        yield {"prompt_logprobs": _to_packed(scores)}


def _is_packed(place: Place) -> bool:
    option = place.wanted.get(LogprobsOption)
    return option is not None and option.is_packed


def _logprobs_arrays(tokens: list[TokenLogprobs], place: Place) -> Iterator[Fields]:
    """Each part by itself: all that a slow reader has not read would block the event loop."""
    if not _is_packed(place):
        return
    size = max(1, MAX_ARRAY_BYTES // packed_token_bytes(tokens[0].num_top))
    for start in range(0, len(tokens), size):
        packed = packed_logprobs(tokens[start : start + size], place.num_tokens + start)
        yield {"packed_logprobs": _to_packed(packed)}


def _logprobs_fields(tokens: list[TokenLogprobs], place: Place) -> Fields:
    return {} if _is_packed(place) else {"logprobs": list(map(_to_logprobs, tokens))}


def _to_packed(logprobs: PackedLogprobs) -> pb.PackedLogprobs:
    return pb.PackedLogprobs(
        first_position=logprobs.first_position,
        num_tokens=logprobs.num_tokens,
        top_k=logprobs.top_k,
        token_ids=logprobs.token_ids.astype("<i4").tobytes(),
        logprobs=logprobs.logprobs.astype("<f4").tobytes(),
        ranks=logprobs.ranks.astype("<i4").tobytes(),
        top_token_ids=logprobs.top_ids.astype("<i4").tobytes(),
        top_logprobs=logprobs.top_logprobs.astype("<f4").tobytes(),
    )


def _to_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=pb.Logprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[pb.Logprob(token_id=i, logprob=value) for i, value in logprobs.top],
    )


def _experts_arrays(parts: list[RoutedExperts], place: Place) -> Iterator[Fields]:
    for routed in joined_experts(parts, MAX_ARRAY_BYTES):
        message = pb.RoutedExperts(num_tokens=routed.num_tokens, **routed._asdict())
        yield {"routed_experts": message}


FORMS: dict[type[ResultPart], Form] = {
    Scores: Form(_scores_arrays),
    TokenLogprobs: Form(_logprobs_arrays, _logprobs_fields),
    RoutedExperts: Form(_experts_arrays),
}
"""In the order in which a delta's arrays are sent."""
