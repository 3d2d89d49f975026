"""Compiles grammars and computes masks: the task of a sandboxed process.

A request has the field `vocabulary` once, first. The kind of an answer is V, the vocabulary is
known; C, the verdict of a check, as JSON; or M, masks: the length of a header, four bytes, the
header, as JSON, and the masks that it lists.
"""

from __future__ import annotations

import json
from typing import Any

from inference_svc.grammars.compiling import Tokens, check
from inference_svc.grammars.rows import Rows

STATE: dict[str, Any] = {}


def answer(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """Answers one request; `servicekit.sandbox` calls it."""
    if "vocabulary" in request:
        STATE["tokens"] = tokens = Tokens(request["vocabulary"])
        STATE["rows"] = Rows(tokens)
        return b"V", b""
    if "kind" in request:
        return b"C", json.dumps(check(STATE["tokens"], request)).encode()
    header, masks = STATE["rows"].take(request)
    data = json.dumps(header).encode()
    return b"M", len(data).to_bytes(4, "big") + data + b"".join(masks)
