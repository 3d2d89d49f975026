"""The child's end: one side, told what to do on standard input, answering on standard output.

    python -m bench.sides.serve ours|ours_grpc|vllm|peft

Whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from bench.sides.protocol import Side, Spec, decode_job


def answer(side: Side, message: dict[str, Any]) -> Any:
    """What one message is answered with. Raises whatever the side raises."""
    action = message["action"]
    if action == "load":
        return side.load(Spec(**message["spec"]))
    if action == "set_resident":
        return side.set_resident(message["names"])
    if action == "register":
        return side.register(message["name"], message["folder"])
    assert action == "run", action
    return asdict(side.run(decode_job(message["job"])))


def serve(side: Side, answers: TextIO) -> None:
    """Until the input ends."""
    try:
        for line in sys.stdin:
            try:
                reply = {"result": answer(side, json.loads(line))}
            except Exception:
                reply = {"error": traceback.format_exc()}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    finally:
        side.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"bench.sides.{sys.argv[1]}_side")
    serve(module.make_side(), answers)


if __name__ == "__main__":
    main()
