"""Embed, Score and Classify over gRPC: their messages to calls, results to responses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import (
    MAX_ID_CHARS,
    GenerateCall,
    checked_parts,
    deadline_after,
)
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.grpc import convert
from inference_svc.api.grpc.prompts import check, checked_salt
from inference_svc.api.pooling.call import MAX_INPUTS
from inference_svc.api.pooling.classify import Classified, ClassifiedTokens, ClassifyCall
from inference_svc.api.pooling.embed import (
    MAX_DIMENSIONS,
    MAX_PROMPT_NAME_CHARS,
    EmbedCall,
    Embedded,
)
from inference_svc.api.pooling.score import Score, ScoreCall
from inference_svc.api.request_record import MAX_NAME_CHARS
from inference_svc.api.server_facts import ServerFacts
from inference_svc.core import MAX_PARTS, Principal, sum_label
from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from inference_svc.results.pooling import PoolingOption
from inference_svc.text.cut import Kept
from inference_svc.text.pair import Pair
from inference_svc.text.prompt import Prompt, Text
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument
from servicekit.rpc.call import Call
from servicekit.rpc.requests import INLINE_ENTRIES

_POOLINGS = {
    pb.POOLING_UNSPECIFIED: None,
    pb.POOLING_LAST: Pooling.LAST,
    pb.POOLING_MEAN: Pooling.MEAN,
    pb.POOLING_FIRST: Pooling.FIRST,
    pb.POOLING_NONE: Pooling.NONE,
}
_KEPT = {
    pb.TRUNCATION_UNSPECIFIED: None,
    pb.TRUNCATION_END: Kept.FIRST,
    pb.TRUNCATION_START: Kept.LAST,
}
PART_BYTES = 1 << 20
"""Results of tokens in one response: messages of clients are limited."""

PoolRequest: TypeAlias = pb.EmbedRequest | pb.ScoreRequest | pb.ClassifyRequest
M = TypeVar("M", pb.EmbedRequest, pb.ScoreRequest, pb.ClassifyRequest)


def from_embed_request(
    request: pb.EmbedRequest, deadline_s: float | None = None, *, rule: EmbeddingRule
) -> GenerateCall:
    """Converts a message within its bounds; `rule` is the model's, and `deadline_s` the caller's,
    in monotonic time. Raises InvalidArgument, naming the field."""
    has_name = len(request.prompt_name) <= MAX_PROMPT_NAME_CHARS
    check(has_name, "prompt_name", f"at most {MAX_PROMPT_NAME_CHARS} long")
    check(request.dimensions <= MAX_DIMENSIONS, "dimensions", f"at most {MAX_DIMENSIONS}")
    known = "LAST, MEAN, FIRST or NONE"
    check(request.pooling in _POOLINGS, "pooling", f"{known}, not {request.pooling}")
    call = EmbedCall(
        **_common(request, deadline_s),
        **_limit(request),
        inputs=_from_inputs(request.inputs, may_be_pairs=False),
        option=PoolingOption(
            _POOLINGS[request.pooling],
            request.normalize if request.HasField("normalize") else None,
            request.dimensions,
        ),
        prompt_name=request.prompt_name,
    )
    return call.to_call(rule)


def from_score_request(
    request: pb.ScoreRequest, deadline_s: float | None = None, *, facts: ServerFacts
) -> GenerateCall:
    """Converts as `from_embed_request`; `facts` are the server's."""
    documents = request.documents[: MAX_INPUTS + 1]
    query = request.query  # each access makes another copy
    call = ScoreCall(
        **_common(request, deadline_s),
        **_limit(request),
        is_raw=request.raw,
        pairs=tuple((query, document) for document in documents),
        instruction=request.instruction,
        inputs_field="documents",
    )
    return call.to_call(facts, generates=facts.generates)


def from_classify_request(
    request: pb.ClassifyRequest, deadline_s: float | None = None, *, rule: ClassifierRule
) -> GenerateCall:
    """Converts as `from_embed_request`."""
    call = ClassifyCall(
        **_common(request, deadline_s),
        **_limit(request),
        inputs=_from_inputs(request.inputs, may_be_pairs=True),
        per_token=request.per_token if request.HasField("per_token") else None,
    )
    return call.to_call(rule)


def _limit(request: PoolRequest) -> dict[str, Any]:
    """Returns the fields of `PoolCall` about the lengths of inputs."""
    given = request.truncation
    check(given in _KEPT, "truncation", f"END or START, not {given}")
    return {"kept": _KEPT[given], "max_tokens": request.max_tokens}


def _common(request: PoolRequest, deadline_s: float | None) -> dict[str, Any]:
    """Returns the fields of `PoolCall`."""
    check(len(request.request_id) <= MAX_ID_CHARS, "request_id", f"at most {MAX_ID_CHARS} long")
    check(not (request.adapters and request.adapter), "adapters", "empty where adapter is set")
    parts = [(p.ref, p.scale if p.HasField("scale") else 1.0) for p in request.adapters]
    return {
        "request_id": request.request_id or uuid.uuid4().hex,
        "adapter": request.adapter,
        "parts": checked_parts(parts),
        "min_revision": request.min_revision,
        "priority": request.priority,
        "cache_salt": checked_salt(request.cache_salt),
        "deadline_s": deadline_s,
    }


def _from_inputs(given: Sequence[pb.EmbedInput], *, may_be_pairs: bool) -> tuple[Prompt, ...]:
    # One more than may be shows that there are too many.
    some = enumerate(given[: MAX_INPUTS + 1])
    return tuple(_from_input(each, f"inputs[{at}]", may_be_pair=may_be_pairs) for at, each in some)


def _from_input(given: pb.EmbedInput, field: str, *, may_be_pair: bool) -> Prompt:
    match given.WhichOneof("input"):
        case "text":
            return Text(given.text)
        case "token_ids":
            return tuple(given.token_ids.ids)
        case "pair" if may_be_pair:
            pair = given.pair
            return Pair(pair.first, pair.second, (f"{field}.pair.first", f"{field}.pair.second"))
        case "pair":
            raise InvalidArgument(
                f"{field} is a pair of texts, which Classify alone reads: send two texts, or one "
                "text that has both",
                subject=field,
            )
    kinds = "text, token_ids, pair" if may_be_pair else "text, token_ids"
    raise InvalidArgument(f"{field} is missing: one of {kinds}", subject=field)


class IncomingPoolCall(Generic[M]):
    """A call whose message is here, until it is read; see `service.IncomingCall`."""

    def __init__(
        self,
        request: M,
        context: Call,
        convert_request: Callable[[M, float | None], GenerateCall],
    ) -> None:
        self.request_id: str = request.request_id[:MAX_ID_CHARS]
        parts = sum_label(part.ref[:MAX_NAME_CHARS] for part in request.adapters[:MAX_PARTS])
        self.adapter: str = request.adapter[:MAX_NAME_CHARS] or parts
        self.num_read = 0  # the transport has read, and charged, it
        self._request: M | None = request
        self._context = context
        self._convert: Callable[[M, float | None], GenerateCall] = convert_request

    def accept(self, caller: Principal) -> int:
        return 0  # held by the transport since before it was read

    async def read(self, parsers: Executor) -> GenerateCall:
        request, self._request = self._request, None
        assert request is not None, "it is read once"
        deadline_s = deadline_after(self._context.time_remaining())
        if _num_entries(request) <= INLINE_ENTRIES:
            return self._convert(request, deadline_s)
        converting = parsers.submit(self._convert, request, deadline_s)
        del request  # the parser alone holds it
        return await asyncio.wrap_future(converting)


def _num_entries(request: PoolRequest) -> int:
    if isinstance(request, pb.ScoreRequest):
        num_chars = sum(map(len, request.documents[:INLINE_ENTRIES]))
        return len(request.query) + num_chars + len(request.documents)
    num_ids = sum(len(each.token_ids.ids) for each in request.inputs[:INLINE_ENTRIES])
    return num_ids + len(request.inputs)


def to_embed_responses(stream: GenerateStream, found: Embedded) -> Iterator[pb.EmbedResponse]:
    """Yields the responses of one input of a call."""
    common = _to_common(stream, found)
    if found.vector.ndim == 1:
        yield pb.EmbedResponse(embedding=found.vector.astype("<f4").tobytes(), **common)
        return
    for fields, values in _token_parts(found.vector, common):
        yield pb.EmbedResponse(embedding=values, **fields)


def _token_parts(
    values: NDArray[np.float32], common: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields the fields of each response, and its values, of results [tokens, numbers]: the last
    one has the usage and the times."""
    step = max(1, PART_BYTES // values[0].nbytes)
    for first in range(0, len(values), step):
        part = values[first : first + step]
        fields = {**common, "num_tokens": len(part), "first_token": first}
        if first + step < len(values):
            del fields["usage"], fields["timings"]
        yield fields, part.astype("<f4").tobytes()


def to_score_responses(stream: GenerateStream, found: Score) -> Iterator[pb.ScoreResponse]:
    """Yields the response of one document of a call."""
    yield pb.ScoreResponse(score=found.score, **_to_common(stream, found))


def to_classify_responses(
    stream: GenerateStream, found: Classified | ClassifiedTokens
) -> Iterator[pb.ClassifyResponse]:
    """Yields the responses of one input of a call."""
    common = _to_common(stream, found)
    if isinstance(found, ClassifiedTokens):
        for fields, values in _token_parts(found.probabilities, common):
            yield pb.ClassifyResponse(probabilities=values, labels=found.labels, **fields)
        return
    yield pb.ClassifyResponse(
        label=found.label,
        label_index=found.label_index,
        probabilities=found.probabilities.astype("<f4").tobytes(),
        **common,
    )


def _to_common(
    stream: GenerateStream, found: Embedded | Score | Classified | ClassifiedTokens
) -> dict[str, Any]:
    return {
        "request_id": stream.call.request_id,
        "index": found.index,
        "adapter": convert.to_identity(stream.binding, stream.requests[found.index]),
        "adapters": convert.to_identities(stream.binding),
        "usage": convert.to_usage(found.usage),
        "timings": convert.to_timings(found.timings),
    }


def to_embedding_info(facts: ServerFacts) -> pb.EmbeddingInfo | None:
    """Returns how the server embeds; None if it does not."""
    rule = facts.embedding
    if rule.refusal:
        return None
    numbers = {pooling: number for number, pooling in _POOLINGS.items()}
    return pb.EmbeddingInfo(
        pooling=numbers[rule.pooling],
        normalized=rule.is_normalised,
        size=rule.size,
        dimensions=rule.dimensions,
        prompt_names=sorted(rule.prompts),
        default_prompt_name=rule.default_prompt,
        max_tokens=facts.max_input_tokens,
    )


def to_classifier_info(facts: ServerFacts) -> pb.ClassifierInfo | None:
    """Returns how the server classifies; None if it does not."""
    rule = facts.classifier
    if rule.refusal:
        return None
    return pb.ClassifierInfo(
        labels=rule.labels, per_token=rule.per_token, scores_pairs=facts.scores_pairs
    )
