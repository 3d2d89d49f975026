"""Thoughts of a request's answers: the form that follows them, and a bound on their tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inference_svc.api.tools import ReadingOptions
from inference_svc.grammars.budget import ThoughtBudget
from inference_svc.grammars.grammar import Grammar
from inference_svc.text.answers.forced import Cutter, calls_of
from inference_svc.text.chat import Tool
from inference_svc.text.text_model import TextModel
from servicekit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thoughts of answers that are read as `reading` says. `prompt` is the end of their prompt,
    `vocab_size` the model's, and `end_ids` are all tokens that end an answer."""

    reading: ReadingOptions
    text: TextModel
    prompt: str
    vocab_size: int
    end_ids: Collection[int]

    def form(self, grammar: Grammar | None) -> Grammar | None:
        """Returns the form of the whole answer, thoughts and all: of the calls that it has to make,
        where the text that has the `grammar` is left out, or of that text, in whose place it may
        make calls. Raises InvalidArgument for schemas that are too large."""
        reading, syntax = self.reading, self.text.answers
        cutter = Cutter(syntax, self._token_of)
        if reading.forced:
            form = self._grammar_of(reading.forced)
        elif grammar is None:
            return None
        elif reading.tools:
            calls = self._grammar_of(reading.tools)
            form = grammar.or_calls(calls, cutter.parts(syntax.text_begin))
        else:
            form = grammar
        if syntax.has_ended_thoughts(self.prompt):
            return form
        after = syntax.after_thoughts(is_text=not reading.tools)
        parts = cutter.thoughts(syntax, after, is_begun=self._is_begun)
        return form if parts is None else form.after(parts)

    def _grammar_of(self, tools: Sequence[Tool]) -> Grammar:
        """Returns the grammar of calls of these tools."""
        reading = self.reading
        calls = calls_of(self.text.answers, tools, self._token_of, reading.max_calls)
        return Grammar.calls(calls, reading.choice_field, reading.schema_fields(tools))

    def budget(self, *, has_form: bool) -> ThoughtBudget | None:
        """Returns the bound on tokens that the request asks for. Raises InvalidArgument where no
        token of the model ends its thoughts."""
        reading, markers = self.reading, self.text.answers.thoughts
        if reading.budget is None:
            return None
        assert markers is not None, "the options are checked"
        begin, end = self._ids(markers.begin), self._ids(markers.end)
        # A text may come in other tokens than the tokenizer cuts it into: a marker has its own.
        has_begin = len(begin) == 1 or any(not self.text.pieces.of(each).shown for each in begin)
        has_end = len(end) == 1 and end[0] not in self.end_ids and end[0] < self.vocab_size
        if not has_end or not (has_begin or self._is_begun):
            marker = markers.begin if has_end else markers.end
            raise InvalidArgument(
                f"{reading.budget_field}: {marker} is no token of this model for thoughts alone: "
                "use max_tokens",
                subject=reading.budget_field,
            )
        after = self.text.answers.after_thoughts(is_text=has_form and not reading.tools)
        return ThoughtBudget(reading.budget, begin, end[0], self._ids(after), self._is_begun)

    @property
    def _is_begun(self) -> bool:
        return self.reading.starts_thinking(self.text.answers, self.prompt)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.text.encode(text, add_special_tokens=False)) if text else ()

    def _token_of(self, marker: str) -> int | None:
        token_id = self.text.special_id(marker)
        if token_id is None or token_id >= self.vocab_size:
            raise KeyError(marker)
        return None if token_id in self.end_ids else token_id
