"""The child's end: one system, told what to do on standard input, answering on standard output.

    python -m bench.systems.serve ours|ours_grpc|vllm|peft

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

from bench.systems.protocol import Spec, System, decode_job


def answer(system: System, message: dict[str, Any]) -> Any:
    """What one message is answered with. Raises whatever the system raises."""
    action = message["action"]
    if action == "load":
        return system.load(Spec(**message["spec"]))
    if action == "set_resident":
        return system.set_resident(message["names"])
    if action == "register":
        return system.register(message["name"], message["folder"])
    assert action == "run", action
    return asdict(system.run(decode_job(message["job"])))


def serve(system: System, answers: TextIO) -> None:
    """Until the input ends."""
    try:
        for line in sys.stdin:
            try:
                reply = {"result": answer(system, json.loads(line))}
            except Exception:
                reply = {"error": traceback.format_exc()}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    finally:
        system.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"bench.systems.{sys.argv[1]}")
    serve(module.make_system(), answers)


if __name__ == "__main__":
    main()
