"""Measures a grammar engine: the start with SmolLM2's vocabulary, compile times and masks.

    python -m bench.structured.engines llguidance
    python -m bench.structured.engines xgrammar     # after pip install xgrammar

Each mask is for a random one of the tokens that may come next.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench.models import REAL, prepare
from bench.results import median, show
from inference_svc.grammars import compiling
from inference_svc.grammars.vocabulary import make_vocabulary, unpack
from inference_svc.text.tokenizer import Tokenizer

NUM_MASKS = 600
_STRING = {"type": "string"}
_PART = {"type": "object", "properties": {"a": _STRING, "b": _STRING}, "required": ["a", "b"]}
_FIELD = {"anyOf": [_STRING, {"type": "integer"}, {"type": "array", "items": {"enum": [1, "x"]}}]}
_FIELDS = {f"field_{index}": _FIELD for index in range(100)}
SCHEMAS: dict[str, Any] = {
    "three fields": {"type": "object", "properties": {"a": _STRING, "b": _STRING, "c": _STRING}},
    "references": {
        "$defs": {"part": _PART},
        "type": "object",
        "properties": {"parts": {"type": "array", "items": {"$ref": "#/$defs/part"}}},
        "required": ["parts"],
    },
    "any object": {"type": "object"},
    "100 fields": {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)},
}


class Matcher(NamedTuple):
    """A grammar at its beginning: fills a mask, takes a token, begins again."""

    mask: Callable[[], np.ndarray]
    take: Callable[[int], Any]
    reset: Callable[[], Any]


def llguidance_compiler(packed: str) -> Callable[[str], Matcher]:
    tokens = compiling.Tokens(packed)

    def compile_schema(schema: str) -> Matcher:
        made = compiling.compile_grammar(tokens, "json_schema", schema)
        return Matcher(
            lambda: np.frombuffer(made.compute_bitmask(), np.uint8), made.consume_token, made.reset
        )

    return compile_schema


def xgrammar_compiler(packed: str) -> Callable[[str], Matcher]:
    import xgrammar

    tokens, _ = unpack(packed)
    end = len(tokens)
    info = xgrammar.TokenizerInfo([*tokens, b"<end>"], vocab_size=end + 1, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, end + 1)

    def compile_schema(schema: str) -> Matcher:
        made = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))

        def mask() -> np.ndarray:
            made.fill_next_token_bitmask(bits, 0)
            return bits[0].numpy().view(np.uint8)

        return Matcher(mask, made.accept_token, made.reset)

    return compile_schema


ENGINES = {"llguidance": llguidance_compiler, "xgrammar": xgrammar_compiler}


def measure(engine: str) -> list[list[Any]]:
    """Returns for each schema the milliseconds to compile it, and the microseconds of masks."""
    text = Tokenizer(prepare(REAL, 1).model_dir)
    vocabulary = make_vocabulary(text.pieces, text.vocab_size, ())
    began_s = time.perf_counter()
    compile_schema = ENGINES[engine](vocabulary.packed)
    rows: list[list[Any]] = [["(start)", 1e3 * (time.perf_counter() - began_s), None, None, None]]
    for name, schema in SCHEMAS.items():
        began_s = time.perf_counter()
        matcher = compile_schema(json.dumps(schema))
        compile_s, chosen, seconds = time.perf_counter() - began_s, random.Random(1), []
        for _ in range(NUM_MASKS):
            began_s = time.perf_counter()
            mask = matcher.mask()
            seconds.append(time.perf_counter() - began_s)
            found = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = int(chosen.choice(found))
            if token >= vocabulary.num_tokens:
                matcher.reset()
            else:
                matcher.take(token)
        us = [1e6 * each for each in seconds]
        rows.append([name, 1e3 * compile_s, sum(us) / len(us), median(us), max(us)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    arguments = parser.parse_args()
    columns = ["schema", "compile_ms", "mask_mean_us", "median_us", "max_us"]
    show(arguments.engine, columns, measure(arguments.engine))


if __name__ == "__main__":
    main()
