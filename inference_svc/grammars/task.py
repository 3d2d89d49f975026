"""Compiles grammars and computes masks: the task of a sandboxed process.

A request has the field `vocabulary` once, first. The kind of an answer is V, the vocabulary is
known; C, the verdict of a check, as JSON; or M, masks: the length of a header, four bytes, the
header, as JSON, and the masks that it lists.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from inference_svc.grammars import calls
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
TRIAL_TOKENS = 48
"""The tokens of a random text that a check tries a grammar with."""
SLOW_COMPILE_SECONDS, SLOW_STEP_SECONDS = 0.1, 5e-3
"""Processor time above which a grammar is slow: it is kept from the others."""
MAX_OPEN_SECONDS = 20.0
"""A process that compiles for longer ends: no check has let this grammar pass."""
MAX_TEMPLATES, MAX_TEMPLATE_CHARS = 64, 1 << 20
TENANT_TEMPLATES, TENANT_TEMPLATE_CHARS = 16, 512 << 10
"""Compiled grammars that are kept for other requests: of all tenants, and of one."""


class Refused(Exception):
    """A grammar that is invalid, or that this engine cannot express."""


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
        return f"start: %json {json.dumps(_schema(source))}\n"
    if kind == "regex":
        return f"start: /{llguidance.regex_to_lark(source, 'd')}/\n"
    if kind == "choice":
        return f"start: {' | '.join(map(json.dumps, json.loads(source)))}\n"
    if kind == "calls":
        return calls.to_lark(source, lambda schema: f"%json {json.dumps(_schema(schema))}")
    text = source
    if re.search(r"^\s*[\w-]+\s*::=", source, re.MULTILINE):
        try:
            text = gbnf_to_lark(source).replace("%llguidance {}", "")
        except Exception as error:
            raise Refused(f"it is no EBNF: {error}") from None
    for pattern, name in _FORBIDDEN:
        if re.search(pattern, source, re.MULTILINE):
            raise Refused(f"{name} is not supported")
    return text


_FORBIDDEN = (
    (r"^\s*%llguidance", "%llguidance"),
    (r"\btemperature\s*=", "the attribute temperature"),
    (r"\bx-guidance\b", "x-guidance"),
)


def _schema(source: str) -> dict[str, Any]:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"it is no JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Refused("it must be a JSON object")
    if "x-guidance" in schema:
        raise Refused("x-guidance is not supported")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def compile_grammar(tokens: Tokens, kind: str, source: str) -> Any:
    """Returns a matcher at its beginning. Raises Refused."""
    matcher = llguidance.LLMatcher(
        tokens.matched, OPTIONS + to_lark(kind, source), log_level=0, limits=LIMITS
    )
    _check(matcher)
    return matcher


def _check(matcher: Any) -> None:
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
    return line[:MAX_ERROR_CHARS]


def check(tokens: Tokens, request: dict[str, Any]) -> dict[str, Any]:
    """Compiles a grammar, and tries it with a random text."""
    signal.setitimer(signal.ITIMER_PROF, request["max_seconds"])
    try:
        start_s = time.process_time()
        matcher = compile_grammar(tokens, request["kind"], request["source"])
        compile_s = time.process_time() - start_s
        step_s = _try(tokens, matcher)
    except Refused as error:
        return {"error": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    is_slow = compile_s > SLOW_COMPILE_SECONDS or step_s > SLOW_STEP_SECONDS
    return {"compile_s": compile_s, "is_slow": is_slow}


def _try(tokens: Tokens, matcher: Any) -> float:
    """Returns the processor time of the slowest step, but for the first. Raises Refused."""
    chosen, slowest_s = random.Random(0), 0.0
    for index in range(TRIAL_TOKENS):
        start_s = time.thread_time()
        mask = matcher.compute_bitmask()
        _check(matcher)
        token = _any_token(mask, tokens.end, chosen)
        if token is None:
            if not _has(mask, tokens.end):
                raise Refused("no token of this model continues such a text")
            break
        matcher.consume_token(token)
        _check(matcher)
        if index:
            slowest_s = max(slowest_s, time.thread_time() - start_s)
    return slowest_s


def _has(mask: bytes | bytearray, token: int) -> bool:
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


class Templates:
    """The grammars that were used last, compiled, of each tenant."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()

    def get(self, tenant: str, key: str) -> Any:
        """Returns a matcher at its beginning; None if it is to be compiled."""
        found = self._known.get((tenant, key))
        if found is None:
            return None
        self._known.move_to_end((tenant, key))
        return found[0].deep_copy()

    def add(self, tenant: str, key: str, matcher: Any, num_chars: int) -> None:
        self._known[tenant, key] = matcher.deep_copy(), num_chars
        while self._is_over(tenant, TENANT_TEMPLATES, TENANT_TEMPLATE_CHARS):
            self._drop(tenant)
        while self._is_over(None, MAX_TEMPLATES, MAX_TEMPLATE_CHARS):
            self._drop(None)

    def _is_over(self, tenant: str | None, max_count: int, max_chars: int) -> bool:
        sizes = [size for (of, _), (_, size) in self._known.items() if tenant in (None, of)]
        return len(sizes) > max_count or sum(sizes) > max_chars

    def _drop(self, tenant: str | None) -> None:
        del self._known[next(key for key in self._known if tenant in (None, key[0]))]


class Row:
    """A running sequence: its matcher once it is compiled, and tokens that came before."""

    def __init__(self, tokens: list[int], opening: Future[Any]) -> None:
        self.backlog = tokens
        self.opening: Future[Any] | None = opening
        self.since_s = time.monotonic()
        self.matcher: Any = None
        self.num_tokens = 0


class Rows:
    """The running sequences of a lane. Grammars are compiled in a thread, since others' masks must
    not wait for that."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._templates = Templates()
        self._rows: dict[int, Row] = {}
        self._compiler = ThreadPoolExecutor(1)
        self._num_hits = 0
        self._compile_s = 0.0

    def take(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytearray]]:
        """Takes sequences that open, tokens of others, and the ids of ended ones. Returns a header
        and the masks that are ready."""
        start_s = time.process_time()
        for row_id in request["close"]:
            self._rows.pop(row_id, None)
        for each in request["open"]:
            opening = self._compiler.submit(self._open, each)
            self._rows[each["id"]] = Row(each["tokens"], opening)
        ready = [row_id for row_id, row in self._rows.items() if row.opening is not None]
        for row_id, token in request["step"]:
            if row_id in self._rows:
                self._rows[row_id].backlog.append(token)
                ready.append(row_id)
        header: dict[str, Any] = {"masks": [], "errors": [], "slow": []}
        masks: list[bytearray] = []
        for row_id in dict.fromkeys(ready):
            self._advance(row_id, header, masks)
        header["num_opening"] = sum(row.opening is not None for row in self._rows.values())
        header["num_hits"], self._num_hits = self._num_hits, 0
        header["compile_s"], self._compile_s = self._compile_s, 0.0
        header["seconds"] = time.process_time() - start_s
        return header, masks

    def _open(self, request: dict[str, Any]) -> Any:
        start_s = time.thread_time()
        tenant, key, source = request["tenant"], request["key"], request["source"]
        matcher = self._templates.get(tenant, key)
        if matcher is None:
            matcher = compile_grammar(self._tokens, request["kind"], source)
            self._templates.add(tenant, key, matcher, len(source))
        else:
            self._num_hits += 1
        self._compile_s += time.thread_time() - start_s
        return matcher

    def _advance(self, row_id: int, header: dict[str, Any], masks: list[bytearray]) -> None:
        row = self._rows[row_id]
        start_s = time.thread_time()
        try:
            if row.opening is not None:
                if not row.opening.done():
                    if time.monotonic() > row.since_s + MAX_OPEN_SECONDS:
                        os._exit(1)
                    return
                row.matcher, row.opening = row.opening.result(), None
            if row.backlog:
                row.matcher.consume_tokens(row.backlog)
                row.num_tokens += len(row.backlog)
                row.backlog = []
            mask = bytearray(row.matcher.compute_bitmask())
            _check(row.matcher)
        except Refused as error:
            header["errors"].append([row_id, str(error)])
            del self._rows[row_id]
            return
        end = self._tokens.end
        may_end = _has(mask, end)
        mask[end >> 3] &= ~(1 << (end & 7))
        header["masks"].append([row_id, row.num_tokens, may_end])
        masks.append(mask)
        if time.thread_time() - start_s > SLOW_STEP_SECONDS and row.num_tokens:
            header["slow"].append(row_id)


STATE: dict[str, Any] = {}


def answer(request: dict[str, Any]) -> tuple[bytes, bytes]:
    if "vocabulary" in request:
        STATE["tokens"] = Tokens(request["vocabulary"])
        return b"V", b""
    tokens: Tokens = STATE["tokens"]
    if "kind" in request:
        return b"C", json.dumps(check(tokens, request)).encode()
    rows: Rows = STATE.setdefault("rows", Rows(tokens)) if "rows" not in STATE else STATE["rows"]
    header, masks = rows.take(request)
    data = json.dumps(header).encode()
    return b"M", len(data).to_bytes(4, "big") + data + b"".join(masks)
