"""What bodies that ask for tokens have in common: OpenAI's fields, and some of ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from inference_svc.api.generate_call import MAX_ID_CHARS
from inference_svc.api.http.request import Body
from inference_svc.api.sampling import MAX_STOP_TOKEN_IDS, MAX_STOPS, MIN_TEMPERATURE, random_seed
from inference_svc.core import SamplingParams
from servicekit.errors import InvalidArgument

MAX_CHOICES = 128
"""Of one request: of all its prompts together."""


def _greedy_or(temperature: float | None) -> float | None:
    """OpenAI takes any from 0 on; below ours the most likely token is as good as certain."""
    is_small = temperature is not None and 0 < temperature < MIN_TEMPERATURE
    return 0.0 if is_small else temperature


def _to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """null is as good as absent."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: (
        Annotated[
            list[str], Field(fail_fast=True), Field(max_length=MAX_STOPS), BeforeValidator(_to_list)
        ]
        | None
    ) = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Ours, by the names that vLLM has for them.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True), Field(max_length=MAX_STOP_TOKEN_IDS)] | None
    ) = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    return_token_ids: bool | None = None
    min_revision: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None

    # Taken, and of no effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None

    # Taken where they ask for nothing that we do not do.
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    def to_sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Not checked yet, but for their types."""
        given = {
            "temperature": _greedy_or(self.temperature),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
        }
        stated: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_k=max(self.top_k or 0, 0),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{"seed": random_seed(), **stated},
        )

    @property
    def limit_field(self) -> str:
        """The one that the caller has limited the number of tokens with; "": it has not."""
        return "" if self.max_tokens is None else "max_tokens"

    def check_streaming(self) -> None:
        """Raises InvalidArgument."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options: only with stream set", subject="stream_options")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
