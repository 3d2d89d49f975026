"""A call to score documents for queries, independent of its transport: its fields, the question
that the model is asked about each pair, and the scores.

The model judges each document in a chat, by the words of Qwen3-Reranker, and answers with one
token: the score is the probability of "yes" against "no".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.pooling.call import PoolCall, pooled_inputs
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.results.base import Wanted, of_kind
from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.prompt import NO_LIMIT, Encoder, PromptEncoder
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
    first. `instruction` says what makes a document relevant; "": the default."""

    pairs: tuple[tuple[str, str], ...]
    instruction: str = ""
    queries_field: str = "query"

    def to_call(self) -> GenerateCall:
        """Raises InvalidArgument naming the field."""
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
        questions = Questions(self.instruction or INSTRUCTION, self.pairs, fields)
        return self._to_call(questions, ChosenLogitsOption(_ANSWERS), NO_LIMIT)


@dataclass(frozen=True, slots=True)
class Questions(Sequence[Chat]):
    """The prompts about `pairs`, each made as it is read: a query that all share is copied into
    every one. `fields` are the caller's names of queries and documents."""

    instruction: str
    pairs: tuple[tuple[str, str], ...]
    fields: tuple[str, str]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        return _question(self.instruction, *self.pairs[index])

    def check_lengths(self, max_chars: int) -> None:
        """Raises InvalidArgument, naming it, for a text longer than the context can hold."""
        queries_field, documents_field = self.fields
        for index, (query, document) in enumerate(self.pairs):
            for text, field in ((query, queries_field), (document, f"{documents_field}[{index}]")):
                if len(text) > max_chars:
                    raise InvalidArgument(
                        f"{field} has {len(text)} characters; this model's context holds at most "
                        f"{max_chars}",
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
    text that is too long for `prompts`, and if the `encoder` of the model or adapter has no single
    tokens for the answers, or such that the model has no logits of."""
    option = call.wanted.get(ChosenLogitsOption)
    if option is None:
        return call
    assert isinstance(call.prompts, Questions)
    call.prompts.check_lengths(prompts.max_chars(encoder))
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
    """How relevant a document is, from 0 to 1."""

    index: int
    score: float
    usage: Usage
    timings: Timings


async def scores(stream: GenerateStream) -> AsyncGenerator[Score, None]:
    """Yields the score of each pair as it is there, in any order. Raises like `pooled_inputs`."""
    async with aclosing(pooled_inputs(stream)) as found:
        async for each in found:
            [logits] = of_kind(each.parts, ChosenLogits)
            yield Score(each.index, logits.share_of_last(), each.usage, each.timings)
