"""A call to score documents for queries, independent of its transport: its fields, the prompts of
its pairs, and the scores.

A model that generates judges each document in a chat, by the words of Qwen3-Reranker, and answers
with one token: the score is the probability of "yes" against "no". A cross-encoder, a classifier
with one output, reads query and document as a pair of texts: the score is made of that output.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.pooling.call import PoolCall, pooled_inputs
from inference_svc.api.pooling.classify import check_one_output
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.results.base import Server, Wanted, of_kind
from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.embedding_rule import DenseActivation
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.cut import NO_LIMIT, WHOLE_TIMES, Kept
from inference_svc.text.encoder import Encoder
from inference_svc.text.pair import Pair
from inference_svc.text.prompt import PromptEncoder, Question
from servicekit.errors import InvalidArgument

MAX_INSTRUCTION_CHARS = 4096
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default."""
_TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_ANSWERS = ("no", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall(PoolCall):
    """Each of the `pairs` has a query and a document; `queries_field` is the caller's name of the
    first. `instruction` says what makes a document relevant; "": the default. If it `is_raw`, which
    the caller says in `raw_field`, such as by `raw_words`, scores are a cross-encoder's outputs as
    they are; otherwise the activation that its config names makes them, if it `is_configured`."""

    pairs: tuple[tuple[str, str], ...]
    instruction: str = ""
    queries_field: str = "query"
    is_raw: bool = False
    raw_field: str = "raw"
    raw_words: str = "raw: true"
    is_configured: bool = True

    def to_call(self, server: Server, *, generates: bool) -> GenerateCall:
        """Returns the call of a server that `generates`, or scores as a cross-encoder. Raises
        InvalidArgument naming the field."""
        self._check_count(len(self.pairs))
        if not all(query for query, _ in self.pairs):
            field = self.queries_field
            raise InvalidArgument(f"{field} must not be empty", subject=field)
        if len(self.instruction) > MAX_INSTRUCTION_CHARS:
            raise InvalidArgument(
                f"instruction must be at most {MAX_INSTRUCTION_CHARS} long", subject="instruction"
            )
        for index, (_, document) in enumerate(self.pairs):
            self._check_filled(index, bool(document))
        fields = self.queries_field, self.inputs_field
        if not generates:
            return self._to_pairs(server, fields)
        if self.is_raw:
            raise InvalidArgument(
                f"{self.raw_field}: {server.base_model} generates, and its scores are "
                "probabilities: outputs as they are have only classifiers",
                subject=self.raw_field,
            )
        questions = Questions(self.instruction or INSTRUCTION, self.pairs, fields, self.kept)
        return self._to_call(questions, ChosenLogitsOption(_ANSWERS), NO_LIMIT)

    def _to_pairs(self, server: Server, fields: tuple[str, str]) -> GenerateCall:
        if self.instruction:
            raise InvalidArgument(
                f"instruction: {server.base_model} is no model that generates, and reads a query "
                "and a document alone",
                subject="instruction",
            )
        refusal = server.classifier.score_refusal
        if refusal and self.is_configured and not self.is_raw:
            raise InvalidArgument(
                f"{server.base_model} has no scores: {refusal}; to have its output as it is, send "
                f"{self.raw_words}",
                subject=self.raw_field,
            )
        option = ClassLogitsOption(per_token=False, is_score=True)
        return self._to_call(Pairs(self.pairs, fields), option, NO_LIMIT)


@dataclass(frozen=True, slots=True)
class Pairs(Sequence[Pair]):
    """The prompts of `pairs`, each made as it is read. `fields` are the caller's names of queries
    and documents."""

    pairs: tuple[tuple[str, str], ...]
    fields: tuple[str, str]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        query, document = self.pairs[index]
        return Pair(query, document, (self.fields[0], f"{self.fields[1]}[{index}]"))


@dataclass(frozen=True, slots=True)
class Questions(Sequence[Chat | Question]):
    """The prompts about `pairs`, each made as it is read: a query that all share is copied into
    every one. `fields` are the caller's names of queries and documents. Documents that are too long
    are cut if some tokens are `kept`."""

    instruction: str
    pairs: tuple[tuple[str, str], ...]
    fields: tuple[str, str]
    kept: Kept | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        query, document = self.pairs[index]
        ask = partial(_question, self.instruction, query)
        return ask(document) if self.kept is None else Question(document, ask)

    def check_lengths(self, max_chars: int) -> None:
        """Raises InvalidArgument, naming it, for a text longer than the context can hold."""
        queries_field, documents_field = self.fields
        whole = f"this model's context holds at most {max_chars}"
        cut = f"no longer text is cut than of {WHOLE_TIMES * max_chars}"
        of_query = max_chars, whole
        of_document = of_query if self.kept is None else (WHOLE_TIMES * max_chars, cut)
        for index, (query, document) in enumerate(self.pairs):
            for text, field, (most, why) in (
                (query, queries_field, of_query),
                (document, f"{documents_field}[{index}]", of_document),
            ):
                if len(text) > most:
                    raise InvalidArgument(
                        f"{field} has {len(text)} characters; {why}: shorten it", subject=field
                    )

    def check_words(self, names: Sequence[str]) -> None:
        """Raises InvalidArgument, naming it, for a text with one of the `names` of the tokens that
        stand for images: documents are judged by their text alone."""
        queries_field, documents_field = self.fields
        checked = ""
        _check_words(self.instruction, "instruction", names)
        for index, (query, document) in enumerate(self.pairs):
            if query is not checked:  # all pairs may share one
                _check_words(query, queries_field, names)
            checked = query
            _check_words(document, f"{documents_field}[{index}]", names)


def _check_words(text: str, field: str, names: Sequence[str]) -> None:
    if name := next((each for each in names if each and each in text), ""):
        raise InvalidArgument(
            f"{field} has {name!a}, which stands for an image: leave it out, since queries and "
            "documents are texts alone",
            subject=field,
        )


def _question(instruction: str, query: str, document: str) -> Chat:
    """Returns the chat whose answer is "yes" or "no". Documents differ last, so that they share
    the pages of all else."""
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = (ChatMessage("system", _TASK), ChatMessage("user", text))
    return Chat(messages, reasoning_effort="none", may_lack_effort=True)


def with_answer_tokens(
    call: GenerateCall, encoder: Encoder, prompts: PromptEncoder, binding: Binding | None
) -> GenerateCall:
    """Returns the call with the tokens of its answers, if it scores. Raises InvalidArgument for a
    text that is too long for `prompts`, or has the name of a token of images, and if the `encoder`
    of the model or adapter has no single tokens for the answers, or such that the model has no
    logits of."""
    option = call.wanted.get(ChosenLogitsOption)
    if option is None:
        return call
    assert isinstance(call.prompts, Questions)
    call.prompts.check_lengths(prompts.max_chars(encoder))
    if (rule := prompts.picture_rule) is not None:
        call.prompts.check_words(rule.names(encoder.name_of))
    subject = "model" if binding is None else "adapter"
    vocab_size = prompts.vocab_size + (0 if binding is None else binding.added_tokens)
    token_ids = []
    for text in option.texts:
        found = encoder.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise InvalidArgument(
                f"the tokenizer has no single token for {text!a}, by which documents are scored",
                subject=subject,
            )
        if found[0] >= vocab_size:
            raise InvalidArgument(
                f"the tokenizer's token {found[0]} for {text!a}, by which documents are scored, is "
                f"none of the {vocab_size} tokens that this model knows",
                subject=subject,
            )
        token_ids += found
    return replace(call, wanted=Wanted((replace(option, token_ids=tuple(token_ids)),)))


@dataclass(frozen=True, slots=True)
class Score:
    """How relevant a document is: from 0 to 1, unless a cross-encoder has other scores."""

    index: int
    score: float
    usage: Usage
    timings: Timings


async def scores(
    stream: GenerateStream, activation: DenseActivation
) -> AsyncGenerator[Score, None]:
    """Yields the score of each pair as it is there, in any order: of a cross-encoder's output the
    `activation` makes it. Raises InvalidArgument for an adapter whose head has several outputs, and
    like `pooled_inputs`."""
    async with aclosing(pooled_inputs(stream)) as found:
        async for each in found:
            if judged := of_kind(each.parts, ChosenLogits):
                score = judged[0].share_of_last()
            else:
                [made] = of_kind(each.parts, ClassLogits)
                score = _score_of(made, stream, activation)
            yield Score(each.index, score, each.usage, each.timings)


def _score_of(made: ClassLogits, stream: GenerateStream, activation: DenseActivation) -> float:
    """Raises InvalidArgument for a head that has several outputs."""
    if len(made.logits) != 1:
        assert stream.binding is not None, "the model's head is known to have one output"
        check_one_output(stream.binding.label, len(made.logits), "adapter")
    return float(activation(made.logits)[0])
