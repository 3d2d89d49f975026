"""Turns a request's grammar into Lark, compiles it, and tries it with a random text."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import time
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from inference_svc.grammars import thoughts
from inference_svc.grammars.calls import Calls, CallsOrForm
from inference_svc.grammars.parts import literal
from inference_svc.grammars.schema_places import Refusal, bad_place, without_idle
from inference_svc.grammars.vocabulary import unpack

LIMITS = llguidance.LLParserLimits(
    step_max_items=20_000,
    step_lexer_fuel=100_000,
    initial_lexer_fuel=500_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About 10 ms for a mask, and tens of megabytes for a grammar, at most."""
OPTIONS = '%llguidance {"no_forcing": true}\n'
"""The model chooses how a text is cut into tokens, as without a grammar."""
WHITESPACE = r" |\n[ \t]{0,40}"
"""Between the parts of a JSON text, on a line or indented: a model that likes whitespace must go on
all the same."""
MAX_ERROR_CHARS = 300
TOO_DEEP = "it is nested too deeply"
TRIAL_TOKENS = 48
"""The tokens of a random text that a check tries a grammar with."""
PLACING_SECONDS = 0.2
"""Processor time, with that of the compile, after which no place of an error is looked for."""
PART_SECONDS = 0.5
"""And after which no call is tried alone."""
SLOW_COMPILE_SECONDS, COSTLY_STEP_SECONDS = 0.01, 5e-3
"""Processor time above which a grammar is slow: it is kept from the others."""
SLOW_STEP_SECONDS, MAX_SLOW_STEPS = 1e-3, 8
"""So is a grammar with so many steps above this time. A few are usual: those of a date, say."""


class Refused(Exception):
    """A grammar that is invalid, or that this engine cannot express. `part`: the call whose schema
    it is, of a grammar of calls."""

    part: int | None = None


class NotApart(Refused):
    """Calls may begin as a text of their form: a grammar whose parts are all valid."""


class Tokens:
    """The vocabulary. A grammar never names the token `end`."""

    def __init__(self, packed: str) -> None:
        tokens, special = unpack(packed)
        self.end = len(tokens)
        self.tokens = [*tokens, b"<|end of the answer|>"]
        self.special_token_ids = [*special, self.end]
        self.eos_token_id, self.bos_token_id = self.end, None
        self.matched = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.end
        )

    def __call__(self, text: bytes) -> list[int]:
        """Nothing is forced, and so nothing is tokenised."""
        return []


def to_lark(kind: str, source: str) -> str:
    """Returns a grammar in Lark. Raises Refused."""
    if kind == "json_schema":
        return f"start: {_json_of(_loaded(source))}\n"
    if kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:
            raise Refused("it ends in a backslash that nothing follows")
        return f"start: /{llguidance.regex_to_lark(source, 'd')}/\n"
    if kind == "choice":
        # Alternatives of the grammar would be items of its parser, which has room for fewer.
        pattern = "|".join(map(literal, json.loads(source)))
        return f"start: /{llguidance.regex_to_lark(pattern, 'd')}/\n"
    if kind == "calls":
        return Calls.of_source(source).to_lark(_json_of)
    if kind == "thoughts":
        return thoughts.to_lark(source, to_lark(*thoughts.form_of(source)))
    if kind == "either":
        return CallsOrForm.of_source(source).to_lark(_json_of, to_lark)
    text = source
    if re.search(r"^\s*[\w-]+\s*::=", source, re.MULTILINE):
        try:
            text = gbnf_to_lark(source).replace("%llguidance {}", "")
        except Exception as error:
            raise Refused(f"it is no EBNF: {error}") from None
    _check_lark(source)
    return text


_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
"""Strings, comments and regular expressions."""


def _check_lark(source: str) -> None:
    """Refuses directives that change how a grammar is used; a text may have their names."""
    if re.search(r"^\s*%llguidance", source, re.MULTILINE):
        raise Refused("%llguidance is not supported")
    if re.search(r"\btemperature\s*=", _LITERALS.sub('""', source)):
        raise Refused("the attribute temperature is not supported")
    for found in re.finditer(r"%json\s*", source):
        with contextlib.suppress(ValueError, RecursionError):  # which the engine refuses
            schema, _ = json.JSONDecoder().raw_decode(source, found.end())
            if isinstance(schema, dict) and "x-guidance" in schema:
                raise Refused("x-guidance is not supported")


def _loaded(source: str) -> Any:
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except RecursionError:
        raise Refused(TOO_DEEP) from None
    except ValueError as error:
        raise Refused(f"it is no JSON: {error}") from None


def _json_of(schema: Any) -> str:
    """Returns the part of a rule that stands for JSON of a schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Refused("it must be a JSON object")
    if "x-guidance" in schema:
        raise Refused("x-guidance is not supported")
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps({**without_idle(schema), **options})}"


def _refuse_constant(name: str) -> None:
    raise Refused(f"it is no JSON: it has {name}")


def compile_grammar(tokens: Tokens, kind: str, source: str) -> Any:
    """Returns a matcher at its beginning. Raises Refused."""
    try:
        text = OPTIONS + to_lark(kind, source)
        text.encode()
        matcher = llguidance.LLMatcher(tokens.matched, text, log_level=0, limits=LIMITS)
    except UnicodeEncodeError:
        raise Refused("it has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise Refused(_reason(str(error))) from None
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: Any) -> None:
    """Raises Refused if the matcher has failed."""
    if matcher.is_error():
        raise Refused(_reason(matcher.get_error()))


def _reason(error: str) -> str:
    """Returns the line of an error that says what is wrong, without its place in our form of the
    grammar."""
    lines = error.replace("<non-verbose/>", "").strip().split("\n")
    line = next((each for each in lines if each.startswith("error: ")), lines[0])
    line = re.sub(r"^at \d+\(\d+\): ", "", line)
    line = re.sub(r"^failed to compile JSON schema: ", "", line)
    if line.startswith("NoExtensionBias"):
        line = "no text has this form"
    if "recursion" in line:  # Python's, or of the engine's parser
        line = TOO_DEEP
    if "coerce_one_of" in line:
        line = "parts of a oneOf may overlap: use anyOf"
    return line[:MAX_ERROR_CHARS]


def check(tokens: Tokens, request: dict[str, Any]) -> dict[str, Any]:
    """Compiles a grammar, and tries it with a random text."""
    signal.setitimer(signal.ITIMER_PROF, request["max_seconds"])
    start_s = time.process_time()
    try:
        if _check_apart(tokens, request["kind"], request["source"]):
            # A form that was compiled alone has its whole time once more, next to calls.
            signal.setitimer(signal.ITIMER_PROF, request["max_seconds"])
            start_s = time.process_time()
        matcher = compile_grammar(tokens, request["kind"], request["source"])
        compile_s = time.process_time() - start_s
        is_slow = _try(tokens, matcher) or compile_s > SLOW_COMPILE_SECONDS
    except NotApart as error:
        return {"error": str(error), "part": None}
    except Refused as error:
        found = _placed(tokens, request, str(error), start_s)
        return {"error": str(found), "part": found.part}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"compile_s": compile_s, "is_slow": is_slow}


def _check_apart(tokens: Tokens, kind: str, source: str) -> bool:
    """Returns whether it compiled the form, as it does if calls begin with a text. Raises NotApart
    for calls that may begin as a text of their form does: the matcher would take one of them for
    the other, unless both are JSON."""
    if kind == "thoughts":
        return _check_apart(tokens, *thoughts.form_of(source))
    if kind != "either":
        return False
    found = CallsOrForm.of_source(source)
    begins = Calls.of_source(found.calls).first_chars
    if found.is_joined or not begins:
        return False
    form = compile_grammar(tokens, found.kind, found.source)
    if any(_may_continue(tokens, form, each.encode()) for each in begins):
        raise NotApart(
            f"a call of a tool may begin with {' or '.join(map(repr, begins))}, as its text "
            'may: leave the tools out, or set tool_choice to "none"'
        )
    return True


def _may_continue(tokens: Tokens, matcher: Any, char: bytes) -> bool:
    """Returns whether a text may go on with a character, which tokens may cut."""
    mask = matcher.compute_bitmask()
    starts = {char[:end] for end in range(1, len(char) + 1)}
    for token, text in enumerate(tokens.tokens[: tokens.end]):
        if text[: len(char)] not in starts or token in tokens.special_token_ids:
            continue
        if not has_token(mask, token):
            continue
        if len(text) >= len(char):
            return True
        after = matcher.deep_copy()
        if after.consume_token(token) and _may_continue(tokens, after, char[len(text) :]):
            return True
    return False


def _placed(tokens: Tokens, request: dict[str, Any], error: str, start_s: float) -> Refused:
    """Returns the error of a schema with the place that it is about, as far as that is found in
    time."""

    def refusal(schema: dict[str, Any]) -> str:
        if time.process_time() > start_s + PLACING_SECONDS:
            return ""
        return _why_refused(tokens, "json_schema", json.dumps(schema))

    def of_call(call: Calls) -> str:
        if time.process_time() > start_s + PART_SECONDS:
            return ""
        return _why_refused(tokens, "calls", call.to_source())

    for kind, source in _forms(request["kind"], request["source"]):
        if kind == "calls":
            for part, call in enumerate(Calls.of_source(source).alone()):
                schema = dict(call.calls[0].schema)
                reason = refusal(schema)
                found = _with_place(schema, reason, refusal) if reason else of_call(call)
                if found:
                    refused = Refused(found)
                    refused.part = part
                    return refused
        elif kind == "json_schema":
            with contextlib.suppress(Refused):
                schema = _loaded(source)
                if isinstance(schema, dict) and (reason := refusal(schema)):
                    return Refused(_with_place(schema, reason, refusal))
    return Refused(error)


def _why_refused(tokens: Tokens, kind: str, source: str) -> str:
    """Returns why a grammar cannot be compiled; "" if it can."""
    try:
        compile_grammar(tokens, kind, source)
    except Refused as error:
        return str(error)
    return ""


def _forms(kind: str, source: str) -> list[tuple[str, str]]:
    """Returns the forms that a grammar is made of, each by its kind and its source."""
    if kind == "thoughts":
        return _forms(*thoughts.form_of(source))
    if kind == "either":
        found = CallsOrForm.of_source(source)
        return [("calls", found.calls), (found.kind, found.source)]
    return [(kind, source)]


def _with_place(schema: dict[str, Any], error: str, refusal: Refusal) -> str:
    place = bad_place(schema, error, refusal)
    return error if place == "$" else f"{place[:MAX_ERROR_CHARS]}: {error}"


def _try(tokens: Tokens, matcher: Any) -> bool:
    """Returns whether steps are slow, but for the first. Raises Refused."""
    chosen, slowest_s, num_slow = random.Random(0), 0.0, 0
    for index in range(TRIAL_TOKENS):
        start_s = time.thread_time()
        mask = matcher.compute_bitmask()
        check_matcher(matcher)
        token = _any_token(mask, tokens.end, chosen)
        if token is None:
            if not has_token(mask, tokens.end):
                raise Refused("no token of this model continues such a text")
            break
        matcher.consume_token(token)
        check_matcher(matcher)
        if index:
            step_s = time.thread_time() - start_s
            slowest_s = max(slowest_s, step_s)
            num_slow += step_s > SLOW_STEP_SECONDS
    return slowest_s > COSTLY_STEP_SECONDS or num_slow >= MAX_SLOW_STEPS


def has_token(mask: bytes | bytearray, token: int) -> bool:
    """Returns whether a mask allows a token."""
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _any_token(mask: bytes, end: int, chosen: random.Random) -> int | None:
    """Returns one of the tokens that may come next, other than the end."""
    start = chosen.randrange(len(mask))
    for place in range(start, start + len(mask) + 1):
        place %= len(mask)
        if mask[place]:
            found = [8 * place + bit for bit in range(8) if mask[place] >> bit & 1]
            found = [each for each in found if each < end]
            if found:
                return chosen.choice(found)
    return None
