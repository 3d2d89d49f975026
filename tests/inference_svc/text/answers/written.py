"""Answers as each family writes them, and as a reader gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from inference_svc.text.answers.families import PARSERS, THOUGHTS, AnswerReader, AnswerSyntax
from inference_svc.text.answers.scanner import CallPiece, Said, Thought
from inference_svc.text.chat import Tool

Call = tuple[str, dict[str, Any]]

KINDS = {"text": "string", "count": "integer", "any": ["array", "object", "null", "boolean"]}
TOOLS = tuple(
    Tool(name, "", json.dumps({"properties": {key: {"type": kind} for key, kind in KINDS.items()}}))
    for name in ("get_weather", "f", "search.all-2")
)
THINK = THOUGHTS[1]


class Read(NamedTuple):
    """An answer's pieces joined."""

    text: str
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    errors: tuple[str, ...] = ()

    @property
    def objects(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def reader_of(family: str, **options: Any) -> AnswerReader:
    calls = PARSERS.get(family)
    thoughts = THOUGHTS[0] if family == "harmony" else THINK
    options.setdefault("tools", TOOLS)
    return AnswerReader(AnswerSyntax(calls, thoughts), **options)


def read(reader: AnswerReader, texts: Sequence[str]) -> Read:
    """Joins the pieces, whose indices, ids and names are as OpenAI streams them."""
    text = thoughts = ""
    calls: list[list[str]] = []
    errors: list[str] = []
    *first, last = texts
    pieces = [piece for each in first for piece in reader.push(each)]
    pieces += reader.push(last, is_last=True)
    ids = set()
    for piece in pieces:
        if isinstance(piece, Said):
            text += piece.text
        elif isinstance(piece, Thought):
            thoughts += piece.text
        else:
            assert isinstance(piece, CallPiece)
            if piece.name:
                assert piece.index == len(calls)
                assert piece.call_id not in ids
                ids.add(piece.call_id)
                calls.append([piece.name, ""])
                errors.append("")
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
            errors[-1] += piece.error
    return Read(text, thoughts, tuple((name, args) for name, args in calls), tuple(errors))


def cut(text: str, places: list[int]) -> list[str]:
    """Cuts a text at places, which may be anywhere."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(text: str, thoughts: str, calls: Sequence[Call]) -> str:
    written = (
        f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )
    return _thinking(thoughts) + "\n".join((text, *written))


def _thinking(thoughts: str) -> str:
    return f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""


def _objects(calls: Sequence[Call], name_key: str = "name", key: str = "arguments") -> list[str]:
    return [_json({name_key: name, key: arguments}) for name, arguments in calls]


def _listed(
    begin: str, end: str, *keys: str, text_first: bool = True
) -> Callable[[str, str, Sequence[Call]], str]:
    def write(text: str, thoughts: str, calls: Sequence[Call]) -> str:
        listed = f"{begin}[{', '.join(_objects(calls, *keys))}]{end}" if calls else ""
        return _thinking(thoughts) + text + listed

    return write


def _llama3(text: str, thoughts: str, calls: Sequence[Call]) -> str:
    objects = "; ".join(_objects(calls, "name", "parameters"))
    return (
        _thinking(thoughts)
        + (f"{text}<|python_tag|>{objects}" if text and calls else text)
        + (objects if not text else "")
    )


def _mistral(text: str, thoughts: str, calls: Sequence[Call]) -> str:
    written = (f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)
    return _thinking(thoughts) + text + "".join(written)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _glm(text: str, thoughts: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )
    return _thinking(thoughts) + text + written


def _qwen_coder(text: str, thoughts: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )
    return _thinking(thoughts) + text + written


def _gemma(begin: str, quote: str, end: str) -> Callable[[str, str, Sequence[Call]], str]:
    def value_of(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{value_of(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(value_of, value)) + "]"
        return _json(value)

    def write(text: str, thoughts: str, calls: Sequence[Call]) -> str:
        written = (f"{begin}call:{name}{value_of(arguments)}{end}" for name, arguments in calls)
        return _thinking(thoughts) + text + "".join(written)

    return write


def _harmony(text: str, thoughts: str, calls: Sequence[Call]) -> str:
    parts = [f"<|channel|>analysis<|message|>{thoughts}<|end|>"] if thoughts else []
    channel = "commentary" if calls else "final"
    parts += [f"<|channel|>{channel}<|message|>{text}<|end|>"] if text else []
    parts += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_json(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(parts)


WRITERS: Mapping[str, Callable[[str, str, Sequence[Call]], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "mistral list": _listed("[TOOL_CALLS] ", ""),
    "gemma": _gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": _gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "harmony": _harmony,
    "glm": _glm,
    "qwen_coder": _qwen_coder,
    "phi": _listed("functools", ""),
    "phi markers": _listed("<|tool_call|>", "<|/tool_call|>"),
    "granite": _listed("<|tool_call|>", ""),
    "command_r": _listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "command_r block": _listed("Action: ```json\n", "\n```", "tool_name", "parameters"),
}
"""Writers of a text, thoughts and calls, by the family's name, and a word for another form."""
