"""The child's side: one system, which reads messages from standard input and answers on standard
output.

python -m bench.systems.serve ours|ours_grpc|ours_steps|vllm|peft|llama_cpp
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from bench.systems.protocol import Spec, decode_job


def answer(system: Any, message: dict[str, Any]) -> Any:
    """Returns the reply of a `System` or `StepSystem` to a message. Raises the system's errors."""
    action = message["action"]
    if action == "load":
        return system.load(Spec(**message["spec"]))
    if action == "set_resident":
        return system.set_resident(message["names"])
    if action == "register":
        return system.register(message["name"], message["folder"])
    if action == "start":
        return system.start(decode_job(message["job"]))
    if action == "step":
        return system.step(message["count"])
    if action == "outputs":
        return system.outputs()
    if action == "choices":
        return system.choices(decode_job(message["job"]), message["outputs"])
    assert action == "run", action
    return asdict(system.run(decode_job(message["job"])))


def serve(answer: Callable[[dict[str, Any]], Any], answers: TextIO) -> None:
    """Answers each line of standard input until it ends."""
    for line in sys.stdin:
        try:
            reply = {"result": answer(json.loads(line))}
        except Exception:
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def take_standard_output() -> TextIO:
    """Returns standard output for answers, and sends libraries' output to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = take_standard_output()
    system = importlib.import_module(f"bench.systems.{sys.argv[1]}").make_system()
    try:
        serve(partial(answer, system), answers)
    finally:
        system.close()


if __name__ == "__main__":
    main()
