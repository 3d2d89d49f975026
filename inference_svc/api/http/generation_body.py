"""Bodies of the routes that generate: fields that they share, and the calls that they become."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from inference_svc.api.generate_call import (
    MAX_CHOICES,
    MAX_ID_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MIN_TEMPERATURE,
    GenerateCall,
    checked_parts,
    random_seed,
)
from inference_svc.api.http.request import Body
from inference_svc.api.http.results import LogprobsFields, ResultFields
from inference_svc.api.tools import ReadingOptions
from inference_svc.core import MAX_PARTS, SamplingDefaults, SamplingParams, VersionPolicy
from inference_svc.grammars.grammar import MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES, Grammar
from inference_svc.results.base import Wanted
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument

MAX_RESPONSE_LOGPROBS = 1 << 18
"""Logprobs of one response: each token's own, and its alternatives'. They are about 20 MB of JSON,
and a second and a half of a processor."""
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_IGNORED_CHARS = 16, 64, 512
"""OpenAI's bounds."""
Ignored = Annotated[str, Field(max_length=MAX_IGNORED_CHARS)]


def _greedy_or(temperature: float | None) -> float | None:
    """OpenAI allows any value from 0 on; below our minimum sampling is greedy in effect."""
    is_small = temperature is not None and 0 < temperature < MIN_TEMPERATURE
    return 0.0 if is_small else temperature


def _to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class AnswerOptions(NamedTuple):
    """A request's choices about the form of its answer: all that is kept of its body.
    `includes_ids` None: if there is no tokenizer, where they are all there is of an answer."""

    stream: bool
    includes_usage: bool
    includes_ids: bool | None = None
    includes_prompt_ids: bool = False
    names_tokens_by_id: bool = False


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class AdapterPartBody(Body):
    ref: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    scale: float = 1.0


# --- the form of answers ---

MAX_FORMAT_NAME_CHARS, MAX_DESCRIPTION_CHARS = 64, 1 << 14

_Form = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
_Schema = _Form | dict[str, Any] | bool
_Choices = Annotated[
    list[_Form], Field(fail_fast=True), Field(min_length=1, max_length=MAX_CHOICE_TEXTS)
]


class JsonSchema(Body):
    """`name`, `description` and `strict` change nothing: a schema is always enforced."""

    name: Annotated[str, Field(max_length=MAX_FORMAT_NAME_CHARS)] | None = None
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_grammar(self, field: str) -> Grammar | None:
        """Returns None for any text. Raises InvalidArgument naming the field."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            subject = f"{field}.json_schema"
            raise InvalidArgument(
                f'{subject}: set it with type "json_schema", and only then', subject=subject
            )
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.schema_, f"{field}.json_schema.schema")
        return Grammar.json_object(field) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """Exactly one form, by vLLM's names."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: _Form | None = None
    choice: _Choices | None = None
    grammar: _Form | None = None

    # Accepted with values that change nothing.
    disable_fallback: bool | None = None  # there is one engine
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    def to_grammars(self, field: str) -> list[Grammar]:
        return [
            *_grammars(self.json_, self.regex, self.choice, self.grammar, f"{field}."),
            *([Grammar.json_object(f"{field}.json_object")] if self.json_object else []),
        ]


class StructureFields(BaseModel):
    """Fields of a body that say what form the answer has; at most one may be set."""

    structured_outputs: StructuredOutputs | None = None

    # vLLM's names before that.
    guided_json: _Schema | None = None
    guided_regex: _Form | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Form | None = None

    def to_grammar(
        self, path: str, response_format: ResponseFormat | None = None
    ) -> Grammar | None:
        """Returns the form that is asked for; `path` is before the names of these fields. Raises
        InvalidArgument, naming it, for a second one."""
        found: list[Grammar] = []
        if response_format is not None:
            of_format = response_format.to_grammar("response_format")
            found += [] if of_format is None else [of_format]
        if self.structured_outputs is not None:
            field = f"{path}structured_outputs"
            of_outputs = self.structured_outputs.to_grammars(field)
            if not of_outputs:
                raise InvalidArgument(
                    f"{field}: one of json, json_object, regex, choice, grammar", subject=field
                )
            found += of_outputs
        guided = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        found += _grammars(*guided, f"{path}guided_")
        if len(found) > 1:
            first, second = found[0].field, found[1].field
            raise InvalidArgument(f"{second}: not with {first}: give one form", subject=second)
        return found[0] if found else None


def _grammars(
    schema: _Schema | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    prefix: str,
) -> list[Grammar]:
    found = []
    if schema is not None:
        found.append(Grammar.json_schema(schema, f"{prefix}json"))
    if regex is not None:
        found.append(Grammar.regex(regex, f"{prefix}regex"))
    if choice is not None:
        found.append(Grammar.choice(choice, f"{prefix}choice"))
    if grammar is not None:
        found.append(Grammar.grammar(grammar, f"{prefix}grammar"))
    return found


# --- requests ---


class RequestBody(ResultFields, Body):
    """The fields of a request to generate that are not about sampling; null means absent."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Extensions, by vLLM's names.
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    min_revision: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    version_policy: Literal["pin", "follow_keep", "follow_recompute"] | None = None
    adapters: (
        Annotated[list[AdapterPartBody], Field(fail_fast=True), Field(max_length=MAX_PARTS)] | None
    ) = None

    def to_call(
        self,
        request_id: str,
        adapter: str,
        prompts: tuple[Prompt, ...],
        sampling: SamplingParams,
        wanted: Wanted,
    ) -> GenerateCall:
        """Returns the call for these prompts. Raises InvalidArgument for adapters beside another
        model than the base model, and for invalid scales."""
        if self.adapters and adapter:
            raise InvalidArgument(
                "model: must be the base model if adapters is set", subject="model"
            )
        fields, path = self.sampling_fields
        return GenerateCall(
            request_id=request_id,
            adapter=adapter,
            parts=checked_parts([(part.ref, part.scale) for part in self.adapters or ()]),
            prompts=prompts,
            sampling=sampling,
            wanted=wanted,
            min_revision=self.min_revision or 0,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            num_choices=fields.n or 1,
            adapter_field="model",
            stop_field=f"{path}stop",
            max_tokens_field=fields.max_tokens_field and path + fields.max_tokens_field,
            max_logprobs=MAX_RESPONSE_LOGPROBS,
            is_id_unique=False,
            version_policy=VersionPolicy(self.version_policy or "pin"),
            echo=self.is_echoed,
            withholds_parts=self.withholds_parts,
            grammar=fields.to_grammar(path, self.format_field),
        )

    @property
    def is_echoed(self) -> bool:
        """Whether answers begin with their prompt."""
        return False

    @property
    def format_field(self) -> ResponseFormat | None:
        """OpenAI's field for the form of an answer."""
        return None

    @property
    def withholds_parts(self) -> bool:
        """Whether an answer has results for the tokens of its text only."""
        return False

    @property
    def sampling_fields(self) -> tuple[SamplingBody, str]:
        """The fields about sampling, and the path to them. Every subclass has its own."""
        raise NotImplementedError

    @property
    def answer(self) -> AnswerOptions:
        """The form of the answer. Raises InvalidArgument."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options: only with stream set", subject="stream_options")
        fields, path = self.sampling_fields
        if self.stream and fields.prompt_logprobs is not None:
            subject = f"{path}prompt_logprobs"
            raise InvalidArgument(f"{subject}: not with stream set", subject=subject)
        includes_usage = self.stream_options is not None and self.stream_options.include_usage
        return AnswerOptions(bool(self.stream), bool(includes_usage))


class ReadBody(RequestBody):
    """A request whose answers are read."""

    @property
    def reading(self) -> ReadingOptions:
        """Returns how the server reads these answers. Subclasses define it. Raises
        InvalidArgument."""
        raise NotImplementedError

    def to_call(
        self,
        request_id: str,
        adapter: str,
        prompts: tuple[Prompt, ...],
        sampling: SamplingParams,
        wanted: Wanted,
    ) -> GenerateCall:
        """Raises InvalidArgument."""
        call = super().to_call(request_id, adapter, prompts, sampling, wanted)
        return replace(call, reading=self.reading)


class SamplingBody(LogprobsFields, StructureFields, Body):
    """The fields about sampling; null means absent."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]],
            Field(fail_fast=True),
            Field(max_length=MAX_STOPS),
            BeforeValidator(_to_list),
        ]
        | None
    ) = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Extensions, by vLLM's names.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True), Field(max_length=MAX_STOP_TOKEN_IDS)] | None
    ) = None
    ignore_eos: bool | None = None

    # Accepted with values that change nothing.
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    def to_sampling(self, max_tokens: int, defaults: SamplingDefaults) -> SamplingParams:
        """Returns parameters whose ranges are not checked yet."""
        fields: dict[str, Any] = {
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
        if self.top_k is not None:
            fields["top_k"] = max(self.top_k, 0)
        present = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{"seed": random_seed(), **defaults.choice(), **present},
        )

    @property
    def max_tokens_field(self) -> str:
        """The field that limits the number of tokens; "" if the caller set none."""
        return "" if self.max_tokens is None else "max_tokens"


class IgnoredFields(BaseModel):
    """Fields of OpenAI's routes that are accepted, without effect."""

    user: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    prompt_cache_options: Annotated[dict[str, Any], Field(max_length=MAX_METADATA)] | None = None
    service_tier: Ignored | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)], Ignored],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None


class GenerationBody(IgnoredFields, RequestBody, SamplingBody):
    """The fields that both of OpenAI's routes have."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    response_format: ResponseFormat | None = None

    # Extensions, by vLLM's names.
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def format_field(self) -> ResponseFormat | None:
        return self.response_format

    @property
    def withholds_parts(self) -> bool:
        """With token ids there are as many results."""
        return not self.return_token_ids

    @property
    def sampling_fields(self) -> tuple[SamplingBody, str]:
        return self, ""

    @property
    def answer(self) -> AnswerOptions:
        return super().answer._replace(
            includes_ids=self.return_token_ids,
            includes_prompt_ids=bool(self.return_token_ids),
            names_tokens_by_id=bool(self.return_tokens_as_token_ids),
        )
