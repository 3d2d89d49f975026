"""Compiles grammars and computes masks: the task of a sandboxed process.

A request has the field `vocabulary` once, first; of a lane also `memory`, which masks are written
to: its file, and its places. Later ones of a lane are `Work`, packed. The kind of an answer is V,
the vocabulary is known; C, the verdict of a check, as JSON; or M, `Written`, packed.
"""

from __future__ import annotations

import json
from typing import Any

from inference_svc.grammars.compiling import Tokens, check
from inference_svc.grammars.lanes.memory import MaskPlaces, WrittenMasks
from inference_svc.grammars.lanes.messages import Work
from inference_svc.grammars.lanes.rows import Rows

STATE: dict[str, Any] = {}


def answer(request: dict[str, Any] | bytes) -> tuple[bytes, bytes]:
    """Answers one request; `servicekit.sandbox` calls it."""
    if isinstance(request, bytes):
        return b"M", STATE["rows"].take(Work.unpack(request)).pack()
    if "vocabulary" in request:
        STATE["tokens"] = tokens = Tokens(request["vocabulary"])
        if "memory" in request:
            file, *places = request["memory"]
            STATE["rows"] = Rows(tokens, WrittenMasks(file, MaskPlaces(*places)))
        return b"V", b""
    return b"C", json.dumps(check(STATE["tokens"], request)).encode()
