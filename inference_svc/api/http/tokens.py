"""/inference/v1/generate: token ids in, token ids out, by the names of vLLM's route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.http.chat.formatter import ChatFormatter
from inference_svc.api.http.completions import DEFAULT_MAX_TOKENS, are_ids
from inference_svc.api.http.errors import Names
from inference_svc.api.http.generation_body import RequestBody, SamplingBody
from inference_svc.api.http.request import MAX_REQUEST_ID_CHARS, is_request_id
from inference_svc.api.http.response import FINISH_REASONS, Choice
from inference_svc.api.server_facts import ServerFacts
from inference_svc.core import FinishReason, SamplingParams
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import Wanted
from inference_svc.results.logprobs import MAX_LOGPROBS
from inference_svc.text.pieces import AnyPieces
from inference_svc.text.prompt import Prompt


def to_token_ids(value: object) -> tuple[int, ...]:
    """Raises ValueError."""
    if not are_ids(value):
        raise ValueError("must be a list of token ids")
    return tuple(value)


def _to_request_id(value: object) -> str | None:
    if value is None or (isinstance(value, str) and is_request_id(value)):
        return value
    raise ValueError(f"must be 1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters")


class TokensSampling(SamplingBody):
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # Accepted, without effect: they are about texts, and the answer has none.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    # Accepted with values that change nothing.
    output_kind: Literal[2] | None = None  # the whole answer at its end
    bad_words: Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_token_ids: None = None
    truncate_prompt_tokens: None = None


class TokensBody(RequestBody):
    """`model` null is the base model."""

    token_ids: Annotated[tuple[int, ...], PlainValidator(to_token_ids)]
    sampling_params: TokensSampling
    request_id: Annotated[str | None, PlainValidator(_to_request_id)] = None

    # Accepted with values that change nothing.
    features: None = None
    kv_transfer_params: None = None

    @property
    def sampling_fields(self) -> tuple[SamplingBody, str]:
        return self.sampling_params, "sampling_params."

    def to_call(
        self,
        request_id: str,
        adapter: str,
        prompts: tuple[Prompt, ...],
        sampling: SamplingParams,
        wanted: Wanted,
    ) -> GenerateCall:
        """The body's own id counts more than the header's."""
        return super().to_call(self.request_id or request_id, adapter, prompts, sampling, wanted)


class Tokens:
    """See `generate.Endpoint`. A token's name in logprobs is its id, as "token_id:5"."""

    body: ClassVar = TokensBody
    id_prefix: ClassVar = ""
    object: ClassVar = ""
    chunk_object: ClassVar = ""
    names: ClassVar[Names] = {"adapter": "model", "prompt": "token_ids"}
    has_prompt_ids_in_choices: ClassVar = True

    def prompts(self, body: TokensBody) -> tuple[Prompt, ...]:
        return (body.token_ids,)

    def sampling(self, body: TokensBody, facts: ServerFacts) -> SamplingParams:
        """Returns vLLM's default number of tokens where the body has none."""
        fields = body.sampling_params
        max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        return fields.to_sampling(max_tokens, facts.sampling)

    def top_logprobs(self, body: TokensBody) -> int | None:
        return body.sampling_params.logprobs

    def formatter(self, index: int, pieces: AnyPieces, includes_ids: bool) -> TokensFormatter:
        return TokensFormatter(index, pieces, includes_ids)


class TokensFormatter(ChatFormatter):
    """See `response.ChoiceFormatter`."""

    logprob_constants: Mapping[str, None] = {}

    def full(self, choice: Choice) -> dict[str, Any]:
        return self._format(choice.token_ids, choice.finish_reason)

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        if not (delta.token_ids or delta.parts or delta.finish_reason):
            return None
        formatted = self._format(delta.token_ids, delta.finish_reason)
        return formatted | {"logprobs": self._chunk_logprobs(delta)}

    def _format(self, token_ids: Any, reason: FinishReason | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
            "token_ids": token_ids,
        }
