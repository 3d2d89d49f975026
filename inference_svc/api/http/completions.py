"""/v1/completions: its body, and the format of its choices."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import MAX_CHOICES
from inference_svc.api.http.chat.formatter import MIN_LOGPROB, prompt_logprobs
from inference_svc.api.http.errors import Names
from inference_svc.api.http.generation_body import GenerationBody
from inference_svc.api.http.response import FINISH_REASONS, Choice
from inference_svc.api.server_facts import ServerFacts
from inference_svc.core import FinishReason, SamplingParams
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import MAX_LOGPROBS, PackedLogprobs, TokenLogprobs
from inference_svc.text.pieces import AnyPieces
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def are_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _to_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Accepts a text, token ids, or a list of one of these."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if are_ids(value):
            return (tuple(value),)
        if len(value) > MAX_CHOICES:
            raise ValueError(f"has {len(value)} prompts; at most {MAX_CHOICES} choices are made")
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(map(are_ids, value)):
            return tuple(map(tuple, value))
    raise ValueError("must be a text, a list of token ids, or a list of one of these")


class CompletionBody(GenerationBody):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_to_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    # Accepted with values that change nothing.
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @property
    def is_echoed(self) -> bool:
        return bool(self.echo)


class Completions:
    """See `generate.Endpoint`."""

    body: ClassVar = CompletionBody
    id_prefix: ClassVar = "cmpl"
    object: ClassVar = "text_completion"
    chunk_object: ClassVar = "text_completion"
    names: ClassVar[Names] = {"adapter": "model"}
    has_prompt_ids_in_choices: ClassVar = True

    def prompts(self, body: CompletionBody) -> tuple[Prompt, ...]:
        """Raises InvalidArgument."""
        if len(body.prompt) * (body.n or 1) > MAX_CHOICES:
            raise InvalidArgument(
                f"prompt: {len(body.prompt)} prompts times n are more than {MAX_CHOICES} choices",
                subject="prompt",
            )
        if body.add_special_tokens and not isinstance(body.prompt[0], str):
            raise InvalidArgument(
                "add_special_tokens: must not be true for token ids, to which nothing is added",
                subject="add_special_tokens",
            )
        adds = body.add_special_tokens is not False
        return tuple(Text(each, adds) if isinstance(each, str) else each for each in body.prompt)

    def sampling(self, body: CompletionBody, facts: ServerFacts) -> SamplingParams:
        """Raises InvalidArgument."""
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidArgument("best_of: must be n", subject="best_of")
        if body.echo and body.logprobs is not None and (body.n or 1) > 1:
            raise InvalidArgument(
                "n: must be 1 with echo and logprobs, which cover the prompt, too", subject="n"
            )
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return body.to_sampling(max_tokens, facts.sampling)

    def top_logprobs(self, body: CompletionBody) -> int | None:
        return body.logprobs

    def formatter(self, index: int, pieces: AnyPieces, includes_ids: bool) -> CompletionFormatter:
        return CompletionFormatter(index, pieces, includes_ids)


class CompletionFormatter:
    """See `response.ChoiceFormatter`."""

    logprob_constants: Mapping[str, None] = {}
    scores_in_choice = True

    def __init__(self, index: int, pieces: AnyPieces, includes_ids: bool) -> None:
        self._index = index
        self._pieces = pieces
        self._includes_ids = includes_ids
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def full(self, choice: Choice) -> dict[str, Any]:
        return self._format(choice.text, choice.finish_reason, choice.token_ids)

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        reason = delta.finish_reason
        if not (delta.text or delta.parts or reason or self._includes_ids):
            return None
        tokens = of_kind(delta.parts, TokenLogprobs)
        logprobs = self.logprobs(tokens) if tokens else None
        return self._format(delta.text, reason, delta.token_ids) | {"logprobs": logprobs}

    def _format(
        self, text: str, reason: FinishReason | None, token_ids: Sequence[int]
    ) -> dict[str, Any]:
        formatted = {
            "index": self._index,
            "text": text,
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
        }
        return formatted | {"token_ids": token_ids} if self._includes_ids else formatted

    def prompt_logprobs(self, scores: PackedLogprobs) -> list[dict[str, Any]]:
        return prompt_logprobs(scores, self._pieces)

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Offsets are the tokens' positions in the choice's text: a character of several tokens
        counts once, and a special token has no characters."""
        pieces = [self._pieces.of(token.token_id) for token in tokens]
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(piece.shown))
        return {
            "tokens": [piece.text for piece in pieces],
            "token_logprobs": [_number(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float] | None:
        """Includes the token itself; of tokens with the same text only the most likely. None for a
        prompt's first token, which follows nothing."""
        if math.isnan(token.logprob):
            return None
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            found.setdefault(self._pieces.of(token_id).text, max(logprob, MIN_LOGPROB))
        return found


def _number(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, MIN_LOGPROB)
