"""Parts and options of any kind of result.

A request has options, one for each kind that it asks for; the engine returns parts. The layers
between the module that computes a part and the transport that sends it handle all kinds alike.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.embedding_rule import EmbeddingRule

OBJECT_BYTES = 192
"""The approximate memory of a part with one array, in addition to its numbers."""
FP32_BYTES = 4


class Scope(enum.Enum):
    """The tokens that a kind of result is about."""

    TOKEN = "token"
    """One generated token: the part comes with it."""
    PROMPT = "prompt"
    """The tokens of a prompt; of several answers to a prompt, the first one has the result."""
    SEQUENCE = "sequence"
    """All tokens that are computed, of prompt and answer."""
    POOLED = "pooled"
    """A prompt that has no answer but this result: nothing is generated."""


class Kind(enum.Enum):
    """The kind of a request: to generate tokens; or to pool its prompt, to a vector, to a score, or
    to the outputs of a classifier."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"


class ResultPart(Protocol):
    """A result of one token, or of neighbouring tokens. Parts are plain data that pickles."""

    @property
    def scope(self) -> Scope: ...

    @property
    def num_bytes(self) -> int:
        """The approximate memory that the part takes until it is sent."""
        ...


class PlacedPart(ResultPart, Protocol):
    """A part of another scope than TOKEN. The parts of a sequence follow one another."""

    @property
    def end(self) -> int:
        """The position after the part's last token."""
        ...


P = TypeVar("P", bound=ResultPart)


def of_kind(parts: Iterable[ResultPart], kind: type[P]) -> list[P]:
    """Returns the parts of one kind, in order."""
    return [part for part in parts if isinstance(part, kind)]


def grouped(parts: Iterable[ResultPart]) -> dict[type[ResultPart], list[Any]]:
    """Returns the parts of each kind, in order."""
    groups: dict[type[ResultPart], list[Any]] = {}
    for part in parts:
        groups.setdefault(type(part), []).append(part)
    return groups


class Work(NamedTuple):
    """The work for one position: walks over the vocabulary, sorts of it, and returned tokens."""

    walks: int = 0
    sorts: int = 0
    listed: int = 0


class Server(Protocol):
    """The facts about a server on which a result depends."""

    @property
    def base_model(self) -> str: ...

    @property
    def expert_token_bytes(self) -> int:
        """The bytes of a token's experts; 0 for a model without experts."""
        ...

    @property
    def embedding(self) -> EmbeddingRule:
        """How the model embeds."""
        ...

    @property
    def classifier(self) -> ClassifierRule:
        """How the server classifies."""
        ...


@dataclass(frozen=True, slots=True)
class Option:
    """A kind of result that a request asks for. A subclass has the request's choices about it, and
    overrides whatever differs."""

    scope: ClassVar[Scope]
    cache_seed: ClassVar[str] = ""
    """Before the seed of the request's page keys, if it must not share the pages of requests
    without this option. No tenant, with which seeds begin, has a "\\0"."""

    @property
    def kind(self) -> Kind:
        """The kind of requests with this option. Of another kind than GENERATE it is the only
        one."""
        return Kind.GENERATE

    def served_by(self, server: Server) -> Self:
        """Returns the option with the server's facts. Raises InvalidArgument if the server does not
        have this result."""
        return self

    def work(self, *, is_cut: bool) -> Work:
        """Returns the work for each position. `is_cut`: see `SamplingParams.is_cut`."""
        return Work()

    def num_logprobs(self, num_tokens: int) -> int:
        """Returns how many log probabilities the scope's tokens add to an answer, of so many
        generated tokens or tokens of a prompt."""
        return 0

    def prompt_bytes(self, num_tokens: int) -> int:
        """Returns the memory of the parts that come at once for a prompt of so many tokens."""
        return 0

    def positions(self, num_prompt: int) -> tuple[int, int]:
        """Returns the range of a prompt's tokens that are pooled, of scope POOLED."""
        raise NotImplementedError


OptionT = TypeVar("OptionT", bound=Option)


@dataclass(frozen=True, slots=True)
class Wanted:
    """All results that a request asks for, at most one option of each kind, and the work for them:
    for a position of the prompt, a generated token, and a token drawn from a part of the
    vocabulary, if it `depends_on_cut`. The scheduler asks for it in each step."""

    options: tuple[Option, ...] = ()
    prompt_work: Work = field(init=False, compare=False, repr=False)
    token_work: Work = field(init=False, compare=False, repr=False)
    cut_token_work: Work = field(init=False, compare=False, repr=False)
    depends_on_cut: bool = field(init=False, compare=False, repr=False)
    kind: Kind = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_work", self._work(Scope.PROMPT, is_cut=False))
        object.__setattr__(self, "token_work", self._work(Scope.TOKEN, is_cut=False))
        object.__setattr__(self, "cut_token_work", self._work(Scope.TOKEN, is_cut=True))
        object.__setattr__(self, "depends_on_cut", self.cut_token_work != self.token_work)
        kinds = [option.kind for option in self.options if option.scope is Scope.POOLED]
        object.__setattr__(self, "kind", kinds[0] if kinds else Kind.GENERATE)

    def __iter__(self) -> Iterator[Option]:
        return iter(self.options)

    def get(self, kind: type[OptionT]) -> OptionT | None:
        """Returns the option of this kind; None: the request does not ask for it."""
        for option in self.options:
            if type(option) is kind:
                return option
        return None

    def has_scope(self, scope: Scope) -> bool:
        return any(option.scope is scope for option in self.options)

    def pooled(self, num_prompt: int) -> tuple[int, int]:
        """Returns the range of a prompt's tokens that are pooled, by a request that pools."""
        [option] = self.options
        return option.positions(num_prompt)

    def without(self, scope: Scope) -> Wanted:
        """Returns the options of other scopes."""
        return Wanted(tuple(option for option in self.options if option.scope is not scope))

    def served_by(self, server: Server) -> Wanted:
        """Raises InvalidArgument for a result that the server does not have."""
        return Wanted(tuple(option.served_by(server) for option in self.options))

    def _work(self, scope: Scope, *, is_cut: bool) -> Work:
        found = [option.work(is_cut=is_cut) for option in self.options if option.scope is scope]
        return Work(*map(sum, zip(*found, strict=True))) if found else Work()

    def num_logprobs(self, scope: Scope, num_tokens: int) -> int:
        """Returns how many log probabilities so many tokens of one scope add to an answer."""
        return sum(
            option.num_logprobs(num_tokens) for option in self.options if option.scope is scope
        )

    def prompt_bytes(self, num_tokens: int) -> int:
        """Returns the memory of all parts that come at once for a prompt."""
        return sum(option.prompt_bytes(num_tokens) for option in self.options)

    @property
    def cache_seed(self) -> str:
        return "".join(option.cache_seed for option in self.options)


NOTHING = Wanted()
