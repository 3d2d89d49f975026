"""The syntax of a model's answers, seen in its chat template, and answers read by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from inference_svc.text.answers.command_r import CommandR
from inference_svc.text.answers.gemma import FunctionGemma, Gemma
from inference_svc.text.answers.granite import Granite
from inference_svc.text.answers.harmony import THOUGHTS as HARMONY_THOUGHTS
from inference_svc.text.answers.harmony import Harmony
from inference_svc.text.answers.hermes import Hermes
from inference_svc.text.answers.llama3 import Llama3
from inference_svc.text.answers.mistral import Mistral
from inference_svc.text.answers.phi import Phi
from inference_svc.text.answers.scanner import Piece, Reading, Scanner
from inference_svc.text.answers.syntax import CallSyntax, Thoughts, read_thoughts, say_all
from inference_svc.text.answers.tagged import Glm, QwenCoder
from inference_svc.text.chat import Tool

SYNTAXES: Final[Sequence[CallSyntax]] = (
    Harmony(),
    Glm(),
    QwenCoder(),
    Granite(),
    CommandR(),
    FunctionGemma(),
    Gemma(),
    Phi(),
    Mistral(),
    Llama3(),
    Hermes(),
)
"""In the order in which templates are asked: the first one that fits is the template's."""
PARSERS: Final[Mapping[str, CallSyntax]] = {each.name: each for each in SYNTAXES}
THOUGHTS: Final[Sequence[Thoughts]] = (
    HARMONY_THOUGHTS,
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    Thoughts("<|channel>thought", "<channel|>"),
    Thoughts("Here is my thought process:", "Here is my response:"),
)
"""Markers around thoughts: of gpt-oss, most models, Mistral, Command A, Gemma 4 and Granite 3.2."""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How the answers of a model are read; None: it calls no tools, or has no thoughts."""

    calls: CallSyntax | None = None
    thoughts: Thoughts | None = None

    @classmethod
    def of(cls, template: str, tool_parser: str = "auto") -> AnswerSyntax:
        """Returns the syntax that a chat template teaches, or the calls of `tool_parser`: one of
        PARSERS, or "none"."""
        calls = PARSERS.get(tool_parser)
        if tool_parser == "auto":
            calls = next((each for each in SYNTAXES if each.fits(template)), None)
        thoughts = next((each for each in THOUGHTS if each.end in template), None)
        if isinstance(calls, Harmony):
            thoughts = HARMONY_THOUGHTS
        elif thoughts is HARMONY_THOUGHTS:
            thoughts = None
        return cls(calls, thoughts)

    def specials(self, *, calls: bool, thoughts: bool) -> tuple[str, ...]:
        """Returns the markers that may be special tokens, whose text is else not shown."""
        found: tuple[str, ...] = ()
        if self.calls is not None and (calls or isinstance(self.calls, Harmony)):
            found += self.calls.specials
        if self.thoughts is not None and thoughts:
            found += (self.thoughts.begin, self.thoughts.end)
        return found

    @property
    def text_begin(self) -> str:
        """The marker that may come before the text of an answer."""
        return "" if self.calls is None else self.calls.text_begin

    def after_thoughts(self, *, is_text: bool = False) -> str:
        """Returns the text between thoughts and calls, or whatever the model writes; with `is_text`
        between thoughts and the text of an answer."""
        if self.calls is None:
            return ""
        return self.calls.next_begin + (self.text_begin if is_text else "")

    def begins_thoughts(self, prompt: str) -> bool:
        """Returns whether a prompt, or its end, ends with the marker before thoughts."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.begin)

    def has_ended_thoughts(self, prompt: str) -> bool:
        """Returns whether a prompt, or its end, ends with the marker after thoughts: its template
        leaves them out."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.end)

    def is_thinking(self, answer: str) -> bool:
        """Returns whether an answer that is to be continued has not ended its thoughts."""
        if self.thoughts is None or not answer.lstrip().startswith(self.thoughts.begin):
            return False
        return self.thoughts.end not in answer


PLAIN = AnswerSyntax()


class AnswerReader:
    """Reads one answer, however its text is cut. `tools` are the ones that it may call; without
    them calls are a part of its text, and so are thoughts without `has_thoughts`. With `has_form` a
    grammar has decided at its begin, or after its thoughts, between calls and a text that has a
    form."""

    def __init__(
        self,
        syntax: AnswerSyntax,
        tools: Sequence[Tool] = (),
        max_calls: int = 0,
        *,
        has_thoughts: bool = True,
        starts_thinking: bool = False,
        has_form: bool = False,
    ) -> None:
        calls = syntax.calls
        # Calls after thoughts that are a part of the text are found behind these.
        has_places = has_thoughts or (has_form and bool(tools))
        thoughts = syntax.thoughts if has_places else None
        new_id = (calls or SYNTAXES[0]).new_id
        by_name = {tool.name: tool for tool in tools}
        self._scanner = Scanner(by_name, new_id, max_calls, apart=has_thoughts)
        if calls is not None:
            self._reading = calls.read_answer(
                self._scanner,
                thoughts,
                starts_thinking=starts_thinking,
                calls=bool(tools),
                has_form=has_form,
            )
        else:
            self._reading = _read_text(self._scanner, thoughts, starts_thinking=starts_thinking)
        self._is_over = False

    @property
    def num_calls(self) -> int:
        return self._scanner.num_calls

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Returns the pieces that are certain now; with the last text, all that are left."""
        self._scanner.feed(text)
        if is_last:
            self._scanner.end()
        if not self._is_over:
            self._is_over = next(self._reading, self) is self
        return self._scanner.pop_pieces()


def _read_text(
    scanner: Scanner, thoughts: Thoughts | None, *, starts_thinking: bool
) -> Reading[None]:
    if thoughts is not None:
        yield from read_thoughts(scanner, thoughts, starts_thinking=starts_thinking)
    yield from say_all(scanner)
    scanner.finish()
