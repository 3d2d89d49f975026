"""The form that a request asks for, as plain data."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.grammars.calls import Calls, CallsOrForm
from inference_svc.grammars.parts import Part
from inference_svc.grammars.thoughts import ThoughtParts
from servicekit.errors import InvalidArgument

MAX_GRAMMAR_BYTES = 256 << 10
"""The largest source. A schema with OpenAI's limits has less."""
MAX_CHOICE_TEXTS = 4096


class GrammarKind(enum.Enum):
    """The language of a source: a JSON schema; a regular expression; a JSON list of choices; Lark
    or EBNF; calls of tools; thoughts and one of these; or calls or another one."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    CALLS = "calls"
    THOUGHTS = "thoughts"
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a request's answer must have. `field` is the caller's name of the field that
    says so; `part_fields` are the names of its parts, which calls have. `is_slow`: it may take long
    to compile, or a mask of it may."""

    kind: GrammarKind
    source: str
    field: str = dataclasses.field(default="", compare=False)
    is_slow: bool = dataclasses.field(default=False, compare=False)
    part_fields: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def json_schema(cls, schema: object, field: str = "") -> Grammar:
        """Returns the grammar of JSON texts that a schema allows: an object, a boolean, or the JSON
        text of one. Raises InvalidArgument for one that is too large."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls._checked(GrammarKind.JSON_SCHEMA, text, field)

    @classmethod
    def json_object(cls, field: str = "") -> Grammar:
        """Returns the grammar of any JSON object."""
        return cls(GrammarKind.JSON_SCHEMA, '{"type": "object"}', field)

    @classmethod
    def regex(cls, pattern: str, field: str = "") -> Grammar:
        """Raises InvalidArgument for a pattern that is empty or too large."""
        return cls._checked(GrammarKind.REGEX, pattern, field)

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "") -> Grammar:
        """Raises InvalidArgument for no choices, an empty choice, or too much text."""
        if not choices or not all(choices):
            raise InvalidArgument(f"{field} must have choices, none of them empty", subject=field)
        if len(choices) > MAX_CHOICE_TEXTS:
            raise InvalidArgument(
                f"{field} must have at most {MAX_CHOICE_TEXTS} choices", subject=field
            )
        return cls._checked(GrammarKind.CHOICE, json.dumps(list(choices)), field)

    @classmethod
    def grammar(cls, text: str, field: str = "") -> Grammar:
        """Returns a grammar in Lark or EBNF (GBNF). Raises InvalidArgument for one that is empty or
        too large."""
        return cls._checked(GrammarKind.GRAMMAR, text, field)

    @classmethod
    def calls(cls, calls: Calls, field: str = "", part_fields: tuple[str, ...] = ()) -> Grammar:
        """Returns the grammar of calls of tools, whose schemas the caller knows by `part_fields`.
        Raises InvalidArgument for schemas that are too large."""
        found = cls._checked(GrammarKind.CALLS, calls.to_source(), field)
        return dataclasses.replace(found, part_fields=part_fields)

    def after(self, thoughts: ThoughtParts) -> Grammar:
        """Returns the grammar of thoughts and then this form."""
        source = thoughts.to_source(self.kind.value, self.source)
        return dataclasses.replace(self, kind=GrammarKind.THOUGHTS, source=source)

    def or_calls(self, calls: Grammar, begin: Sequence[Part]) -> Grammar:
        """Returns the grammar of these calls, or of this form, before which `begin` may come."""
        source = CallsOrForm(calls.source, begin, self.kind.value, self.source).to_source()
        return dataclasses.replace(
            self, kind=GrammarKind.EITHER, source=source, part_fields=calls.part_fields
        )

    @classmethod
    def _checked(cls, kind: GrammarKind, source: str, field: str) -> Grammar:
        if not source.strip():
            raise InvalidArgument(f"{field} must not be empty", subject=field)
        # A surrogate alone is no text; it has as many bytes as its escape at most.
        num_bytes = len(source.encode(errors="replace"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidArgument(
                f"{field} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES}", subject=field
            )
        return cls(kind, source, field)

    @property
    def key(self) -> str:
        """The identity of its content."""
        text = f"{self.kind.value}\0{self.source}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
